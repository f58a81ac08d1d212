"""Revisions of the wire: messages only grow, and each revision is told from the last."""

from typing import Any

import msgspec
import pytest
from msgspec import inspect as mi

from kv_core.compatibility import Compatibility, ServedModel
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import WIRE_REVISION, Envelope, Message, UnknownMessageTypeError
from kv_services.messages import Heartbeat, Load
from tests.services.old_wire_process import cut, known_to, old_form
from tests.services.wire_surface import Surface, first, not_growth, registry, surface


def test_messages_have_only_grown_since_the_first_revision() -> None:
    assert not_growth(first(), surface(registry())) == []


def test_a_surface_that_differs_from_the_first_has_a_later_revision() -> None:
    assert surface(registry()) != first()
    assert WIRE_REVISION > 0


OLD = Surface(1, {"ping": "Ping"}, {"Ping": [("nonce", "int", False), ("note", "str", True)]})


@pytest.mark.parametrize(
    ("types", "fields", "words"),
    [
        ({}, OLD.structs["Ping"], "type 'ping' is gone"),
        ({"ping": "Pong"}, OLD.structs["Ping"], "type 'ping' is Pong"),
        (OLD.types, [("nonce", "int", False)], "Ping[1]"),
        (OLD.types, [("note", "str", True), ("nonce", "int", False)], "Ping[0]"),
        (OLD.types, [("nonce", "bytes", False), ("note", "str", True)], "Ping[0]"),
        (OLD.types, [*OLD.structs["Ping"], ("more", "int", False)], "Ping.more is new"),
    ],
    ids=["gone", "reused tag", "removed", "reordered", "retyped", "no default"],
)
def test_what_is_no_growth_is_found(types: dict[str, str], fields: list[Any], words: str) -> None:
    assert any(words in fault for fault in not_growth(OLD, Surface(1, types, {"Ping": fields})))


def test_the_first_revision_sees_a_heartbeat_without_what_came_later() -> None:
    compatibility = Compatibility((ServedModel("m", "w", 16),), wire_revision=WIRE_REVISION)
    beat = Heartbeat("n", "decode", "serving", Load(running=3), compatibility)
    envelope = Envelope(NodeId("n"), Incarnation(1), Incarnation(0), 1, 0, 0, 0, beat)
    seen = old_form(envelope, first()).body
    assert isinstance(seen, Heartbeat)
    assert seen == msgspec.structs.replace(beat, compatibility=Compatibility(compatibility.models))
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(beat))
    assert len(raw[-1]) == 4
    assert len(cut(raw, mi.type_info(Heartbeat), first())[-1]) == 3  # type: ignore[index]  # a heartbeat is an array


class Later(Message, frozen=True, tag="a_type_of_later"):
    """A type that no first revision had."""


def test_the_first_revision_does_not_know_types_that_came_later() -> None:
    with pytest.raises(UnknownMessageTypeError):
        known_to(first(), Later)
    known_to(first(), Heartbeat)
