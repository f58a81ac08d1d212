"""Whatever bytes arrive, `decode` gives an envelope or a `WireError`, in bounded memory and time."""

import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core import limits
from kv_core.errors import KVError, RemoteProtocolError
from kv_core.wire import (
    Envelope,
    MalformedMessageError,
    Message,
    MessageTooLargeError,
    Registry,
    SchemaMismatchError,
    UnknownMessageTypeError,
    UnsupportedWireVersionError,
    WireError,
    decode,
    encode,
)
from tests.core.test_core_wire import REGISTRY, Everything, Forest, Ping, envelope, everything

GOOD: list[Any] = [1, "node-a", 3, 4, 5, 6, 7, 8, ["ping", 9, b"x"]]


def packed(frame: object) -> bytes:
    return bytes(msgpack.packb(frame))


def with_part(at: int, value: object) -> bytes:
    return packed([*GOOD[:at], value, *GOOD[at + 1 :]])


def with_body(*body: object) -> bytes:
    return with_part(8, list(body))


def test_the_frames_that_the_cases_start_from_are_good() -> None:
    assert decode(packed(GOOD), REGISTRY).body == Ping(9, b"x")
    for fits in ("x" * limits.MAX_STRING_BYTES, [None] * limits.MAX_ARRAY_LENGTH, {"a": 1}):
        assert decode(packed([*GOOD, fits]), REGISTRY).body == Ping(9, b"x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        packed(GOOD)[:-1],
        packed(GOOD) + b"\x00",
        packed(GOOD) * 2,
        packed(None),
        packed({}),
        packed([]),
        packed(GOOD[:8]),
        with_part(0, "1"),
        with_part(0, True),
        with_part(1, ""),
        with_part(1, "x" * 256),
        with_part(1, b"node"),
        with_part(2, -1),
        with_part(2, 1 << 63),
        with_part(3, "4"),
        with_part(4, 1.5),
        with_part(5, 1 << 32),
        with_part(6, None),
        with_part(7, -5),
        with_part(8, None),
        with_part(8, {}),
        with_part(8, []),
        with_part(8, {"type": "ping", "nonce": 1}),
        with_body([], 1),
        with_body(None),
        with_body(True, 1),
        with_body(1.0),
        with_body(b"ping", 1),
        b"\xd9\x01\xff",
        packed([*GOOD, "x" * (limits.MAX_STRING_BYTES + 1)]),
        packed([*GOOD, [None] * (limits.MAX_ARRAY_LENGTH + 1)]),
        packed([*GOOD, {str(i): i for i in range(limits.MAX_MAP_LENGTH + 1)}]),
        packed([*GOOD, msgpack.ExtType(5, b"x")]),
        packed([*GOOD, msgpack.ExtType(5, b"")]),
        packed([*GOOD, msgpack.Timestamp(5)]),
        packed([*GOOD, {1: 2}]),
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
    ],
    ids=lambda data: data[:24].hex(),
)
def test_bytes_that_are_no_envelope_are_refused_as_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        decode(data, REGISTRY)
    assert caught.value.fields["nbytes"] == len(data)


@pytest.mark.parametrize(
    "data",
    [
        with_body("ping"),
        with_body("ping", "9"),
        with_body("ping", 9, "eA=="),
        with_body("ping", 9, None),
        with_body("ping", 9.5),
        with_body("ping", [9]),
        with_body(7),
        with_body("forest", ["leaf", "children"]),
    ],
    ids=lambda data: data[-12:].hex(),
)
def test_a_body_that_does_not_fit_its_type_is_refused_and_named(data: bytes) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        decode(data, Registry(Ping, Everything, Forest))
    assert caught.value.fields["type"] in ("ping", 7, "forest")


def changed(field: str, value: object) -> bytes:
    """A good `Everything` with one field changed on the wire."""
    frame = msgpack.unpackb(encode(envelope(everything.example()), REGISTRY))
    frame[8][1 + Everything.__struct_fields__.index(field)] = value
    return packed(frame)


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share", float("nan")),
        ("raw", "eA=="),
        ("many", ["eA=="]),
        ("pair", [1]),
        ("pair", [1, "x", 2]),
        ("settings", {"a": "b"}),
        ("colour", "green"),
        ("kind", "c"),
        ("limited", 10),
        ("numbers", [1.5]),
        ("blocks", [["not bytes", 1]]),
        ("reference", [1, -1, 1]),
        ("reference", [1, 2]),
        ("who", [[["m", "r", 0]]]),
        ("flag", 1),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(field: str, value: object) -> None:
    with pytest.raises(SchemaMismatchError):
        decode(changed(field, value), REGISTRY)


def test_a_map_that_names_a_key_twice_is_refused() -> None:
    twice = packed(GOOD)[:-1] + b"x" + b"\x82\xa1a\x01\xa1a\x02"
    body_of_four = twice.replace(b"\x93\xa4ping", b"\x94\xa4ping")
    assert msgpack.unpackb(body_of_four)[8][3] == {"a": 2}  # without a check the second silently wins
    with pytest.raises(MalformedMessageError, match="twice"):
        decode(body_of_four, REGISTRY)


def test_another_wire_version_is_refused_with_both_numbers_whatever_follows() -> None:
    with pytest.raises(UnsupportedWireVersionError) as caught:
        decode(packed([2, "anything"]), REGISTRY)
    assert (caught.value.fields["theirs"], caught.value.fields["ours"]) == (2, 1)


@pytest.mark.parametrize("tag", ["pong", "x" * 5000, 8, -1, 1 << 63])
def test_an_unknown_type_is_refused_and_named_in_short(tag: str | int) -> None:
    with pytest.raises(UnknownMessageTypeError) as caught:
        decode(with_body(tag, 1), REGISTRY)
    assert len(str(caught.value)) < 200


def test_a_message_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(MessageTooLargeError) as caught:
        decode(bytes(limits.MAX_MESSAGE_BYTES + 1), REGISTRY)
    assert caught.value.fields["limit"] == limits.MAX_MESSAGE_BYTES
    with pytest.raises(MessageTooLargeError):
        decode(packed(GOOD), REGISTRY, max_bytes=10)


def test_deep_nesting_in_a_recursive_type_is_refused() -> None:
    tree: list[object] = ["leaf", []]
    for _ in range(100):
        tree = ["node", [tree]]
    with pytest.raises(SchemaMismatchError, match="deeper"):
        decode(with_body("forest", tree), Registry(Forest))
    with pytest.raises(SchemaMismatchError, match="deeper"):
        decode(with_body("error", 1, {"x": tree}), REGISTRY)


class Picky(Message, frozen=True, tag="picky"):
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.start >= self.end:
            raise PickyError(start=self.start)


class PickyError(KVError):
    code = 990_002
    template = "{start} is late"


def test_what_a_message_refuses_itself_is_the_peers_fault() -> None:
    with pytest.raises(SchemaMismatchError, match="3 is late"):
        decode(with_body("picky", 3, 2), Registry(Picky))


class Touch:
    """A pickle of this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "made by a pickle"
    bomb = pickle.dumps(Touch(target), protocol)
    for data in (bomb, with_body("ping", 9, bomb)[:-1], with_body("ping", bomb), with_body(bomb)):
        with pytest.raises(WireError):
            decode(data, REGISTRY)
    assert decode(with_body("ping", 9, bomb), REGISTRY).body == Ping(9, bomb)
    assert not target.exists()


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    decode_or_refuse(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(limits.MIN_INT64, limits.MAX_UINT64)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from(["ping", 7, "error", "forest", 1, "node-a"]),
    lambda inner: (
        st.lists(inner, max_size=10) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(st.lists(values, max_size=10), st.integers(0, 10))
def test_random_values_in_the_form_of_an_envelope_never_raise_anything_else(parts: list[object], keep: int) -> None:
    decode_or_refuse(packed([*GOOD[:keep], *parts]))


@settings(max_examples=40)
@given(st.lists(values, max_size=17), st.sampled_from(["ping", 7, "error", "forest"]))
def test_random_bodies_of_known_types_never_raise_anything_else(fields: list[object], tag: str | int) -> None:
    decode_or_refuse(with_body(tag, *fields))


@given(st.data(), everything)
def test_damaged_messages_never_raise_anything_else(data: st.DataObject, body: Everything) -> None:
    raw = bytearray(encode(envelope(body), REGISTRY))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    decode_or_refuse(bytes(raw))


def test_twenty_thousand_damaged_messages_never_raise_anything_else() -> None:
    """Quick and crude beside the properties: flips, cuts, repeats and splices of real messages, by a fixed seed."""
    stream = random.Random("wire/damage")
    seeds = [packed(GOOD), with_body("error", 5, {"a": [1, 2.5, "x", b"y", None]}), with_body("forest", ["a", [["b"]]])]
    for _ in range(20_000):
        raw = bytearray(stream.choice(seeds))
        for _ in range(stream.randrange(1, 5)):
            at, kind = stream.randrange(len(raw) + 1), stream.randrange(4)
            if kind == 0 and at < len(raw):
                raw[at] = stream.randrange(256)
            elif kind == 1:
                del raw[at : at + stream.randrange(4)]
            elif kind == 2:
                raw[at:at] = raw[at : at + 8]
            else:
                raw[at:at] = stream.choice(seeds)[stream.randrange(20) :][: stream.randrange(12)]
        decode_or_refuse(bytes(raw))


EVERY = Registry(Ping, Everything, Forest)


def decode_or_refuse(data: bytes) -> None:
    registry = EVERY
    try:
        got = decode(data, registry)
    except WireError as error:
        assert isinstance(error, RemoteProtocolError)
        assert len(str(error)) < 2000
    else:
        assert type(got) is Envelope
        assert decode(encode(got, registry), registry) == got


def test_a_header_that_promises_more_than_there_is_takes_no_memory() -> None:
    promises = [b"\xdc\xff\xff", struct.pack(">BI", 0xDD, limits.MAX_ARRAY_LENGTH), struct.pack(">BI", 0xC6, 1 << 22)]
    for promise in promises:
        with pytest.raises(MalformedMessageError):
            decode(promise, REGISTRY)
