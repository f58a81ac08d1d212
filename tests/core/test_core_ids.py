"""Names from outside are checked once."""

from collections.abc import Callable

import pytest

from kv_core.ids import InvalidIdError, node_id, request_id, tenant_id


@pytest.mark.parametrize("make", [node_id, request_id, tenant_id])
@pytest.mark.parametrize("text", ["a", "node-1.rack/3", "x" * 255, "узел", "two words"])
def test_text_that_prints_is_a_name(make: Callable[[str], str], text: str) -> None:
    assert make(text) == text


@pytest.mark.parametrize("text", ["", " a", "a\n", "a\x00b", "\u202eabc", "x" * 256, "é" * 128, "\ud800", "\t"])
def test_other_text_is_refused_and_shown_safely(text: str) -> None:
    with pytest.raises(InvalidIdError) as caught:
        node_id(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
