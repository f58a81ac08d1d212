"""Messages cross the wire unchanged, and what does not fit is refused and changes nothing."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_consistency.errors import ConsistencyError, MalformedUpdateError
from kv_consistency.events import Received
from kv_consistency.messages import (
    MESSAGES,
    ClaimPage,
    Digest,
    EntryRow,
    RangeReply,
    RangeRequest,
    ReplicaMessage,
    SyncPage,
    SyncRequest,
    UpdateBatch,
)
from kv_consistency.update import (
    UNOWNED,
    BlocksRemoved,
    BlocksStored,
    EntryWritten,
    HolderCleared,
    NamespaceRef,
    OwnerEpoch,
    RaiseCount,
    ScopesRaised,
    ScopesRestored,
    Tier,
    Update,
    scope_id,
)
from kv_consistency.version_vector import Dot, Origin, Reach
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.wire import Envelope, Registry, WireError, decode, encode
from tests.consistency.helpers_consistency import NAMESPACE, Cluster, life, node, readable_state

REGISTRY = Registry(*MESSAGES)

counts = st.integers(0, (1 << 63) - 1)
origins = st.builds(Origin, st.text(min_size=1, max_size=8).map(NodeId), st.integers(0, 1 << 40).map(Incarnation))
ns = st.integers(1, (1 << 48) - 1)
dots = st.builds(Dot, origins, ns)
reaches = st.lists(st.builds(Reach, origins, st.integers(0, (1 << 48) - 1)), max_size=4).map(tuple)
scopes = st.binary(min_size=8, max_size=16)
namespaces = st.builds(
    NamespaceRef, st.binary(min_size=16, max_size=16), st.integers(1, 4096), st.lists(scopes, max_size=3).map(tuple)
)
tiers = st.sampled_from(Tier)
shapes = st.binary(max_size=32)


@st.composite
def stored(draw: st.DrawFn) -> BlocksStored:
    k = draw(st.integers(1, 5))
    return BlocksStored(
        draw(namespaces),
        draw(st.integers(0, 1 << 40)),
        draw(tiers),
        draw(st.integers(0, 1 << 20)),
        draw(st.binary(min_size=16 * k, max_size=16 * k)),
        draw(st.binary(min_size=4 * k, max_size=4 * k)),
        draw(shapes),
    )


removed = st.builds(
    BlocksRemoved,
    st.binary(min_size=16, max_size=16),
    tiers,
    st.integers(1, 4).flatmap(lambda k: st.binary(min_size=16 * k, max_size=16 * k)),
    shapes,
)
epochs = st.one_of(st.just(UNOWNED), st.builds(OwnerEpoch, st.integers(1, 1 << 20), origins))


@st.composite
def entries(draw: st.DrawFn) -> EntryWritten:
    length = draw(st.integers(0, 1 << 20))
    return EntryWritten(
        RequestId(draw(st.text(min_size=1, max_size=12))),
        draw(epochs),
        draw(st.integers(0, length)),
        length,
        draw(st.integers(0, (1 << 64) - 1)),
        tuple(draw(st.lists(origins, max_size=3))),
        draw(st.one_of(st.none(), namespaces)),
        draw(st.integers(0, 1 << 30)),
        draw(st.booleans()),
    )


cleared = st.builds(HolderCleared, st.one_of(st.none(), tiers))
raised = st.builds(ScopesRaised, st.lists(scopes, min_size=1, max_size=3).map(tuple))


@st.composite
def raise_counts(draw: st.DrawFn) -> RaiseCount:
    last = draw(ns)
    return RaiseCount(draw(scopes), draw(origins), draw(st.integers(1, last)), last, draw(st.none() | dots))


restored = st.builds(ScopesRestored, st.lists(raise_counts(), min_size=1, max_size=3).map(tuple))
ops = st.one_of(stored(), removed, entries(), cleared, raised, restored)
updates = st.builds(
    Update,
    ns,
    counts,
    st.integers(0, (1 << 32) - 1),
    st.lists(ops, max_size=3).map(tuple),
    st.lists(dots, max_size=3).map(tuple),
)
batches = st.lists(updates, max_size=3).map(tuple)


@st.composite
def pages(draw: st.DrawFn) -> ClaimPage:
    k = draw(st.integers(0, 4))
    return ClaimPage(
        draw(origins),
        draw(namespaces),
        draw(counts),
        draw(tiers),
        draw(shapes),
        draw(st.integers(-1, 255)),
        draw(st.binary(min_size=16 * k, max_size=16 * k)),
        draw(st.binary(min_size=16 * k, max_size=16 * k)),
    )


cursors = st.binary(max_size=40)
messages = st.one_of(
    st.builds(UpdateBatch, origins, counts, batches),
    st.builds(Digest, counts, counts, reaches, counts, counts, st.booleans(), st.lists(origins, max_size=3).map(tuple)),
    st.builds(RangeRequest, origins, ns, ns),
    st.builds(RangeReply, origins, ns, counts, counts, batches),
    st.builds(SyncRequest, counts, reaches, st.lists(origins, max_size=3).map(tuple), cursors),
    st.builds(
        SyncPage,
        counts,
        cursors,
        cursors,
        counts,
        counts,
        reaches,
        reaches,
        raises=st.lists(raise_counts(), max_size=2).map(tuple),
        entries=st.lists(st.builds(EntryRow, dots, counts, counts, entries()), max_size=2).map(tuple),
        claims=st.lists(pages(), max_size=2).map(tuple),
        ready=st.booleans(),
        collected=reaches,
    ),
)


def envelope(message: ReplicaMessage) -> Envelope:
    return Envelope(NodeId("a"), Incarnation(1), Incarnation(1), 0, 0, 0, 0, message)


@settings(deadline=None)
@given(messages)
def test_every_message_survives_the_wire(message: ReplicaMessage) -> None:
    assert decode(encode(envelope(message), REGISTRY), REGISTRY).body == message


@settings(deadline=None, max_examples=200)
@given(messages, st.data())
def test_a_damaged_message_is_refused_or_is_another_valid_one(message: ReplicaMessage, data: st.DataObject) -> None:
    raw = bytearray(encode(envelope(message), REGISTRY))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        body = decode(bytes(raw), REGISTRY).body
    except WireError:
        return
    assert isinstance(body, ReplicaMessage)


@settings(deadline=None, max_examples=200)
@given(messages)
def test_whatever_a_peer_says_a_replica_takes_it_or_raises_a_typed_error(message: ReplicaMessage) -> None:
    cluster = Cluster("x", "y")
    cluster.store("x", range(4))
    cluster.deliver_all()
    before = readable_state(cluster.members[node("x")])
    try:
        cluster.step("x", Received(cluster.at(node("x")), NodeId("y"), message))
    except ConsistencyError:
        assert readable_state(cluster.members[node("x")]) == before
    cluster.check()


def stored_body(**changes: object) -> list[object]:
    fields: dict[str, object] = {
        "tag": 0,
        "namespace": [b"d" * 16, 16, []],
        "epoch": 0,
        "tier": 1,
        "start": 0,
        "hashes": b"h" * 16,
        "checks": b"c" * 4,
        "shape": b"",
    }
    return list((fields | changes).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"hashes": b""},
        {"hashes": b"h" * 15},
        {"checks": b"c" * 8},
        {"hashes": "h" * 16},
        {"tier": 9},
        {"tag": 77},
        {"start": -1},
        {"start": 1 << 24},
        {"epoch": 1 << 63},
        {"epoch": 1.0},
        {"namespace": [b"d" * 15, 16, []]},
        {"namespace": [b"d" * 16, 0, []]},
        {"namespace": [b"d" * 16, 16, [b"short"]]},
        {"hashes": b"h" * 16 * 5000, "checks": b"c" * 4 * 5000},
        {"shape": b"s" * 33},
    ],
)
def test_updates_that_cannot_be_do_not_pass_the_wire(changes: dict[str, object]) -> None:
    good = encode(envelope(UpdateBatch(life("a"), 1, ())), REGISTRY)
    outer = msgpack.unpackb(good)
    outer[-1] = ["consistency.updates", ["a", 1], 1, [[1, 5, 0, [stored_body()], []]]]
    assert isinstance(decode(msgpack.packb(outer), REGISTRY).body, UpdateBatch)
    outer[-1][-1][0][3] = [stored_body(**changes)]
    with pytest.raises(WireError):
        decode(msgpack.packb(outer), REGISTRY)


def test_a_pickle_is_not_a_message() -> None:
    with pytest.raises(WireError):
        decode(b"\x80\x04cos\nsystem\n(S'touch x'\ntR.", REGISTRY)


def test_only_an_origin_publishes_its_updates() -> None:
    cluster = Cluster("a", "b", "c")
    forged = UpdateBatch(life("c"), 1, (Update(1, 5, 0, (HolderCleared(None),)),))
    with pytest.raises(MalformedUpdateError):
        cluster.step("a", Received(cluster.at(node("a")), NodeId("b"), forged))
    assert not cluster.manager("a").vector().covers(Dot(life("c"), 1))


@pytest.mark.parametrize(
    "cursor",
    [
        b"\xc1",
        [4],
        [-1],
        [1, -1],
        [2, 256],
        [2, -1],
        [3, 1],
        [3, -1],
        [3, 0, "", b"d" * 17],
        [3, 0, "", "text"],
        [3, 0, "", b"", 9],
        [3, 0, "", b"", 1, b"s" * 33],
        [3, 0, "", b"", 1, b"", -2],
        [3, 0, "", b"", 1, b"", 256],
        [3, 0, "", b"", 1, b"", 0, 0],
    ],
)
def test_a_cursor_that_is_not_ours_is_refused(cursor: bytes | list[object]) -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(3))
    raw = cursor if isinstance(cursor, bytes) else msgpack.packb(cursor)
    request = SyncRequest(1, (), (life("a"),), raw)
    with pytest.raises(MalformedUpdateError):
        cluster.step("a", Received(cluster.at(node("a")), NodeId("b"), request))
    cluster.check()


def test_a_purge_that_cannot_be_counted_is_none() -> None:
    with pytest.raises(ValueError, match="3 purges"):
        RaiseCount(b"namespace-digest", life("a"), 3, 2)


def test_scope_names_are_length_prefixed_and_fixed() -> None:
    assert scope_id("tenant", "x") != scope_id("model", "x")
    assert scope_id("ab", "c") != scope_id("a", "bc")
    assert scope_id("tenant", "x") == bytes.fromhex(SCOPE_VECTOR)
    assert NAMESPACE.scopes[0] == scope_id("tenant", "t")


SCOPE_VECTOR = "d17b9034aef41deb"
"""Kept for ever: purges on disk name scopes by it."""
