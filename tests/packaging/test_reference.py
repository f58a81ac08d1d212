"""The reference pages of the manual say what the code says."""

from docs import make_reference as reference


def test_the_reference_pages_are_those_the_code_gives() -> None:
    stale = [name for name, text in reference.pages().items() if (reference.FOLDER / name).read_text() != text]
    assert stale == [], "run `make docs`"
