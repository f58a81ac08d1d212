"""Joining: what differs is named with both values; what only one serves is nobody's business."""

import msgspec
import pytest

from kv_core.compatibility import Compatibility, IncompatiblePeerError, ServedModel, check_compatible
from kv_core.errors import error_from_wire

OURS = Compatibility((ServedModel("llama", "main", 16), ServedModel("qwen", "v2", 32)))


def changed(**fields: object) -> Compatibility:
    return msgspec.structs.replace(OURS, **fields)


def test_equal_peers_and_peers_of_other_models_may_join() -> None:
    check_compatible("node-b", OURS, changed())
    check_compatible("node-b", OURS, changed(models=(ServedModel("mistral", "main", 64),)))
    check_compatible("node-b", OURS, changed(models=()))


@pytest.mark.parametrize(
    ("theirs", "what", "values"),
    [
        (changed(hash_scheme="sha256/1"), "hash scheme", ("xxh3-128+crc32c/1", "sha256/1")),
        (changed(wire_version=2), "wire version", (1, 2)),
        (changed(models=(ServedModel("llama", "main", 32),)), "block size of llama", (16, 32)),
        (changed(models=(ServedModel("qwen", "v3", 32),)), "weights revision of qwen", ("v2", "v3")),
    ],
)
def test_a_difference_is_refused_with_both_values(
    theirs: Compatibility, what: str, values: tuple[object, object]
) -> None:
    with pytest.raises(IncompatiblePeerError) as caught:
        check_compatible("node-b", OURS, theirs)
    fields = caught.value.fields
    assert (fields["peer"], fields["what"], fields["ours"], fields["theirs"]) == ("node-b", what, *values)
    assert all(repr(value) in str(caught.value) for value in values)
    assert str(error_from_wire(*caught.value.to_wire())) == str(caught.value)


def test_the_refusal_is_the_same_from_both_sides() -> None:
    theirs = changed(models=(ServedModel("llama", "main", 32),))
    for one, two in ((OURS, theirs), (theirs, OURS)):
        with pytest.raises(IncompatiblePeerError, match="block size"):
            check_compatible("peer", one, two)
