"""The link checker sees what is broken, and nothing is."""

from pathlib import Path

import pytest

from tests.docs_links import anchors, broken_links, links, markdown_files


def test_no_link_of_the_repository_is_broken() -> None:
    assert [problem for file in markdown_files() for problem in broken_links(file)] == []


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("other.md", ""),
        ("other.md#second-part", ""),
        ("#own-heading", ""),
        ("/sub/deep.md", ""),
        ("https://example.org/none", ""),
        ("mailto:a@example.org", ""),
        ("none.md", "does not exist"),
        ("other.md#third-part", "has no such heading"),
        ("#nowhere", "has no such heading"),
        ("../outside.md", "leads out of the repository"),
    ],
)
def test_a_link_is_followed_to_its_heading(tmp_path: Path, target: str, problem: str) -> None:
    root = tmp_path / "repo"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "outside.md").write_text("x")
    (root / "sub" / "deep.md").write_text("deep")
    (root / "other.md").write_text("# Other\n\n## Second `part`\n")
    page = root / "page.md"
    page.write_text(f"# Own heading\n\nSee [this]({target}).\n")
    found = broken_links(page, root)
    assert [problem] == [p.split(target + " ")[1] for p in found] if problem else found == []


def test_links_in_code_are_not_links() -> None:
    assert list(links('`[a](b.md)`\n```\n[c](d.md)\n```\n[e](f.md) <img src="g.svg">\n\n[h]: i.md\n')) == [
        "f.md",
        "i.md",
        "g.svg",
    ]


def test_equal_headings_get_numbered_anchors() -> None:
    assert anchors('# A b\n## A b\n### C & d: "e"\n<a id="x"></a>\n```\n# no\n```\n') == {"a-b", "a-b-1", "c--d-e", "x"}
