"""Envelopes and messages: what goes in comes out, and what must not go out is refused here."""

from enum import Enum
from typing import Annotated, Literal

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core import limits
from kv_core.block import BlockRef
from kv_core.compatibility import Compatibility, ServedModel
from kv_core.errors import KVError, LocalProtocolError, UnknownRemoteError
from kv_core.hashing import BlockHash
from kv_core.ids import Generation, Incarnation, NodeId, RegionId
from kv_core.testing.strategies import envelopes
from kv_core.wire import (
    WIRE_VERSION,
    Envelope,
    ErrorReply,
    InvalidSchemaError,
    Message,
    Registry,
    SchemaMismatchError,
    UnencodableMessageError,
    UnknownMessageTypeError,
    UnregisteredMessageError,
    decode,
    encode,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Ping(Message, frozen=True, tag="ping"):
    nonce: int
    blob: bytes = b""


class Tree(msgspec.Struct, frozen=True, array_like=True):
    name: str
    children: list["Tree"] = []


class Everything(Message, frozen=True, tag=7):
    flag: bool
    share: float
    text: str
    raw: bytes | None
    numbers: list[int]
    pair: tuple[int, str]
    many: tuple[bytes, ...]
    settings: dict[str, int]
    colour: Colour
    kind: Literal["a", "b"]
    tree: Tree
    blocks: list[BlockHash]
    reference: BlockRef
    who: Compatibility
    limited: Annotated[int, msgspec.Meta(ge=0, le=9)] = 0


class Texts(Message, frozen=True, tag="texts"):
    texts: tuple[str, ...]
    numbers: dict[str, int]


REGISTRY = Registry(Ping, Everything)

pings = st.builds(Ping, st.integers(limits.MIN_INT64, limits.MAX_UINT64), st.binary(max_size=200))
trees = st.recursive(
    st.builds(Tree, st.text(max_size=3)),
    lambda inner: st.builds(Tree, st.text(max_size=3), st.lists(inner, max_size=3)),
).filter(lambda tree: depth_of(tree) <= 6)
uint = st.integers(0, limits.MAX_INT64)
everything = st.builds(
    Everything,
    flag=st.booleans(),
    share=st.floats(allow_nan=False),
    text=st.text(st.characters(codec="utf-8"), max_size=20),
    raw=st.none() | st.binary(max_size=20),
    numbers=st.lists(uint, max_size=5),
    pair=st.tuples(uint, st.text(st.characters(codec="utf-8"), max_size=3)),
    many=st.lists(st.binary(max_size=3), max_size=3).map(tuple),
    settings=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), uint, max_size=4),
    colour=st.sampled_from(Colour),
    kind=st.sampled_from(["a", "b"]),
    tree=trees,
    blocks=st.lists(
        st.builds(BlockHash, st.binary(min_size=16, max_size=16), st.integers(0, limits.MAX_UINT32)), max_size=3
    ),
    reference=st.builds(BlockRef, uint.map(RegionId), uint, uint.map(Generation)),
    who=st.just(Compatibility((ServedModel("m", "r", 16),))),
    limited=st.integers(0, 9),
)


def depth_of(tree: Tree) -> int:
    return 1 + max((depth_of(child) for child in tree.children), default=0)


def envelope(body: Message, deadline_ns: int = 5) -> Envelope:
    return Envelope(
        NodeId("node-a"), Incarnation(3), Incarnation(4), 1_700_000_000_000_000_000, 2, 77, deadline_ns, body
    )


@given(envelopes(pings | everything))
def test_what_is_encoded_is_decoded(sent: Envelope) -> None:
    assert decode(encode(sent, REGISTRY), REGISTRY) == sent


@given(envelopes(pings))
def test_bytearray_and_memoryview_are_read_as_bytes_are(sent: Envelope) -> None:
    data = encode(sent, REGISTRY)
    assert decode(bytearray(data), REGISTRY) == decode(memoryview(data), REGISTRY) == sent


def test_the_form_on_the_wire_is_what_the_docs_say() -> None:
    data = encode(envelope(Ping(7, b"x")), REGISTRY)
    assert msgpack.unpackb(data) == [
        WIRE_VERSION, "node-a", 3, 4, 1_700_000_000_000_000_000, 2, 77, 5, ["ping", 7, b"x"],
    ]  # fmt: skip


def test_the_body_owns_its_bytes() -> None:
    data = bytearray(encode(envelope(Ping(7, b"payload")), REGISTRY))
    body = decode(data, REGISTRY).body
    data[:] = bytes(len(data))
    assert body == Ping(7, b"payload")


class PingV2(Message, frozen=True, tag="ping"):
    nonce: int
    blob: bytes = b""
    hops: int = 1
    notes: tuple[str, ...] = ()


def test_an_older_peer_skips_new_fields_and_a_newer_one_fills_in_defaults() -> None:
    old, new = Registry(Ping), Registry(PingV2)
    assert decode(encode(envelope(PingV2(7, b"x", 3, ("n",))), new), old).body == Ping(7, b"x")
    assert decode(encode(envelope(Ping(7, b"x")), old), new).body == PingV2(7, b"x", 1, ())


def test_an_envelope_with_more_parts_than_known_is_read() -> None:
    frame = msgpack.unpackb(encode(envelope(Ping(7)), REGISTRY))
    assert decode(msgpack.packb([*frame, "from the future"]), REGISTRY) == envelope(Ping(7))


class Refused(KVError):
    code = 990_001
    template = "refused {what} by {who}"


def test_an_error_crosses_with_code_and_fields() -> None:
    error = Refused(what="block", who="node-b", sizes=[16, 32], ratio=0.5, raw=b"\x00", none=None, big=1 << 63)
    reply = decode(encode(envelope(ErrorReply.of(error)), Registry()), Registry()).body
    assert isinstance(reply, ErrorReply)
    there = reply.to_error()
    assert type(there) is Refused
    assert there.fields == error.fields
    assert str(there) == "refused block by node-b"


def test_an_error_of_an_unknown_code_keeps_its_fields() -> None:
    there = ErrorReply(987_654, {"what": "x"}).to_error()
    assert isinstance(there, UnknownRemoteError)
    assert there.fields["remote_code"] == 987_654
    assert "'what': 'x'" in str(there)


def test_an_error_whose_fields_the_wire_cannot_hold_still_crosses() -> None:
    error = Refused(what=float("nan"), who="\ud800" * 5000, deep=[[[1]]], huge=1 << 80, long=list(range(500)))
    reply = decode(encode(envelope(ErrorReply.of(error)), REGISTRY), REGISTRY).body
    assert isinstance(reply, ErrorReply)
    assert reply.to_error().fields["what"] == "nan"


def test_a_message_of_another_registry_is_not_sent() -> None:
    with pytest.raises(UnregisteredMessageError, match="PingV2"):
        encode(envelope(PingV2(1)), REGISTRY)


def test_a_class_that_shares_a_tag_is_not_taken_for_the_other() -> None:
    assert decode(encode(envelope(Ping(1)), REGISTRY), REGISTRY).body.__class__ is Ping


@pytest.mark.parametrize(
    "sent",
    [
        envelope(Ping(1 << 64)),
        envelope(Ping(-(1 << 63) - 1)),
        envelope(Ping(1), deadline_ns=-1),
        Envelope(NodeId("n"), Incarnation(-1), Incarnation(0), 0, 0, 0, 0, Ping(1)),
        Envelope(NodeId("n"), Incarnation(0), Incarnation(-1), 0, 0, 0, 0, Ping(1)),
        Envelope(NodeId("n"), Incarnation(0), Incarnation(0), 0, 0, -1, 0, Ping(1)),
        Envelope(NodeId("n"), Incarnation(0), Incarnation(0), -1, 0, 0, 0, Ping(1)),
        Envelope(NodeId("n"), Incarnation(0), Incarnation(0), 0, 1 << 32, 0, 0, Ping(1)),
        Envelope(NodeId(""), Incarnation(0), Incarnation(0), 0, 0, 0, 0, Ping(1)),
        envelope(Texts(("x" * (limits.MAX_STRING_BYTES + 1),), {})),
        envelope(Texts(("",) * (limits.MAX_ARRAY_LENGTH + 1), {})),
        envelope(Texts((), {str(i): 0 for i in range(limits.MAX_MAP_LENGTH + 1)})),
        envelope(ErrorReply(1, {"x": float("nan")})),
        envelope(ErrorReply(1, {"x": object()})),
        envelope(Ping(1, b"x" * (limits.MAX_MESSAGE_BYTES + 1))),
    ],
    ids=[
        *("2**64", "-2**63-1", "deadline", "sender life", "target life", "correlation", "wall", "logical", "no sender"),
        *("text", "list", "map", "nan", "object", "too large"),
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(sent: Envelope) -> None:
    with pytest.raises(UnencodableMessageError):
        encode(sent, Registry(Ping, Texts))


def test_what_just_fits_is_sent() -> None:
    registry = Registry(Texts)
    for body in (
        Texts(("x" * limits.MAX_STRING_BYTES,), {}),
        Texts(("",) * limits.MAX_ARRAY_LENGTH, {}),
        Texts((), {str(i): 0 for i in range(limits.MAX_MAP_LENGTH)}),
    ):
        assert decode(encode(envelope(body), registry), registry).body == body


def test_nesting_beyond_the_limit_is_not_sent() -> None:
    tree = Tree("leaf")
    for _ in range(limits.MAX_NESTING_DEPTH):
        tree = Tree("node", [tree])
    registry = Registry(Forest)
    with pytest.raises(UnencodableMessageError, match="deeper"):
        encode(envelope(Forest(tree)), registry)


class Forest(Message, frozen=True, tag="forest"):
    tree: Tree


def test_a_smaller_limit_holds_on_both_sides() -> None:
    with pytest.raises(UnencodableMessageError, match="limit is 10"):
        encode(envelope(Ping(1)), REGISTRY, max_bytes=10)


def test_registries_join_and_know_what_they_hold() -> None:
    class Pong(Message, frozen=True, tag="pong"):
        nonce: int

    joined = Registry(Pong).include(REGISTRY)
    assert len(joined) == 4
    assert {entry.tag for entry in joined} == {"ping", 7, "pong", "error"}
    with pytest.raises(UnknownMessageTypeError, match="pong"):
        decode(encode(envelope(Pong(1)), joined), REGISTRY)


def test_register_serves_as_a_decorator_and_twice_is_once() -> None:
    registry = Registry()

    @registry.register
    class Pong(Message, frozen=True, tag="pong"):
        nonce: int

    registry.register(Pong)
    assert len(registry) == 2
    assert Pong(1).nonce == 1


class NoTag(Message, frozen=True):
    x: int


class SameTag(Message, frozen=True, tag="ping"):
    x: int


class LongTag(Message, frozen=True, tag="x" * 65):
    x: int


class EmptyTag(Message, frozen=True, tag=""):
    x: int


class ErrorTag(Message, frozen=True, tag="error"):
    x: int


class ASet(Message, frozen=True, tag="set"):
    x: frozenset[int]


class AnObject(Message, frozen=True, tag="object"):
    x: object


class IntKeys(Message, frozen=True, tag="keys"):
    x: dict[int, int]


class ArrayBytes(Message, frozen=True, tag="ba"):
    x: bytearray


class RawField(Message, frozen=True, tag="raw"):
    x: msgspec.Raw


class Hidden(Message, frozen=True, tag="hidden"):
    x: list[tuple[int, dict[str, memoryview]]]


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (NoTag, "no tag"),
        (SameTag, "has tag 'ping'"),
        (LongTag, "64 bytes"),
        (EmptyTag, "64 bytes"),
        (ErrorTag, "has tag 'error'"),
        (ASet, "FrozenSet"),
        (AnObject, "Custom"),
        (IntKeys, "keys are str"),
        (ArrayBytes, "ByteArray"),
        (RawField, "Raw"),
        (Hidden, "MemoryView"),
        (Tree, "subclass of Message"),
    ],
)
def test_a_class_that_cannot_cross_is_refused_at_registration(cls: type[Message], why: str) -> None:
    with pytest.raises(InvalidSchemaError, match=why):
        Registry(Ping).register(cls)


def test_an_unknown_annotation_is_refused_at_registration() -> None:
    class Lost(Message, frozen=True, tag="lost"):
        x: "Nowhere"  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidSchemaError, match="Nowhere"):
        Registry(Lost)


def test_refusals_say_whose_fault_it_is() -> None:
    assert issubclass(UnencodableMessageError, LocalProtocolError)
    assert not issubclass(SchemaMismatchError, LocalProtocolError)
