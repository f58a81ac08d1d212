"""Which requests are cut, over which nodes, and what a gateway makes of a lost or refused piece."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError, RemoteProtocolError
from kv_core.ids import NodeId, RequestId, TenantId
from kv_core.sharding import Placement
from kv_core.wire import WIRE_REVISION
from kv_services.config import Role
from kv_services.config_errors import ConfigError
from kv_services.config_file import parse_config
from kv_services.engine.shard_math import Partials
from kv_services.gateway.completer import GenerationRequest, KVOptions, SamplingParams
from kv_services.gateway.oversize import Nodes, Oversize, oversize_rule
from kv_services.gateway.piece_placing import place_in_pieces, sizes_of
from kv_services.gateway.routing_state import (
    ROOM_PAUSE_DELAYS,
    DecodeFailed,
    EndAt,
    Fail,
    NoteRetry,
    PauseThenRetry,
    Place,
    Placed,
    PlacementFailed,
    RequestRoute,
    Reserved,
    ReserveFailed,
    RetryDue,
    SendReserve,
    Started,
)
from kv_services.messages import Load
from kv_services.sharded.errors import ClusterFullError, ClusterTooSmallError, ShardLostError, ShardRefusedError
from kv_services.sharded.rows import pack, unpack, unpack_partials

R = RequestId("r")
A, B, C, P = (NodeId(name) for name in ("a", "b", "c", "p"))


def load(total: int, pinned: int = 0) -> Load:
    return Load(slots_total=total, slots_free=total - pinned, slots_pinned=pinned)


def nodes(
    decode: dict[NodeId, Load], prefill: dict[NodeId, Load] | None = None, dead: dict[NodeId, Load] | None = None
) -> Nodes:
    prefill = prefill or {}
    return Nodes(decode, prefill, decode | prefill, decode | prefill | (dead or {}))


def rule(mode: str = "auto", above_tokens: int = 0) -> Oversize:
    return oversize_rule(mode, above_tokens, [], num_layers=4, block_size=4)


def test_what_a_decode_and_a_prefill_node_hold_is_not_cut() -> None:
    cluster = nodes({A: load(10), B: load(20)}, {P: load(12)})
    assert rule().pieces(R, 40, 80, cluster, ()) == ()
    assert rule("none").pieces(R, 400, 800, cluster, ()) == ()
    # The prompt is too long for the prefill node, though a decode node holds it.
    assert {p.node for p in rule().pieces(R, 60, 72, cluster, ())} == {B, P}
    # Nodes that have not reported yet may hold anything.
    assert rule().pieces(R, 400, 800, nodes({A: Load()}), ()) == ()
    assert rule().roomy(cluster.decode, cluster.prefill, 40, 80) == ({B: load(20)}, {P: load(12)})
    assert rule().roomy(cluster.decode, cluster.prefill, 400, 800) == (cluster.decode, cluster.prefill)


def test_from_a_length_on_a_request_is_cut_though_a_node_could_hold_it() -> None:
    cluster = nodes({A: load(20), B: load(20)})
    assert rule(above_tokens=41).pieces(R, 20, 40, cluster, ()) == ()
    assert len(rule(above_tokens=40).pieces(R, 20, 40, cluster, ())) == 2
    # Alone it still holds it.
    assert rule(above_tokens=40).pieces(R, 20, 40, nodes({A: load(20)}), ()) == ()


def test_nodes_of_failed_attempts_are_left_out_while_the_others_can_hold_it() -> None:
    cluster = nodes({A: load(10), B: load(10), C: load(10)})
    assert {p.node for p in rule().pieces(R, 60, 72, cluster, (A,))} == {B, C}
    assert {p.node for p in rule().pieces(R, 100, 112, cluster, (A,))} == {A, B, C}


def test_no_room_now_may_come_again_and_no_room_ever_may_not() -> None:
    busy = nodes({A: load(10, pinned=6), B: load(10)})
    with pytest.raises(ClusterFullError):
        rule().pieces(R, 60, 72, busy, ())
    with pytest.raises(ClusterTooSmallError):
        rule().pieces(R, 90, 92, busy, ())
    # With the node that is dead just now it would fit; and one that has begun just now may bring anything.
    with pytest.raises(ClusterFullError):
        rule().pieces(R, 90, 92, nodes({A: load(10), B: load(10)}, dead={C: load(10)}), ())
    with pytest.raises(ClusterFullError):
        rule().pieces(R, 90, 92, nodes({A: load(10), B: load(10)}, dead={C: Load()}), ())


class Seen:
    """Two decode nodes that were heard of, one that is dead, and a gateway."""

    def __init__(self, revisions: dict[NodeId, int]) -> None:
        self.revisions = revisions
        self.roles = {A: Role.DECODE, B: Role.PREFILL, C: Role.DECODE, P: Role.GATEWAY}

    def certain(self, *roles: Role) -> list[NodeId]:
        return [node for node in (A, B) if self.roles[node] in roles]

    def load_of(self, node_id: NodeId) -> Load:
        return load(10)

    def wire_revision(self, node_id: NodeId) -> int:
        return self.revisions[node_id]


def test_a_node_that_does_not_know_the_messages_yet_gets_no_piece() -> None:
    sampling = SamplingParams(max_tokens=13)
    request = GenerationRequest(R, TenantId("t"), "m", (1,) * 60, sampling, (), 0, 0, KVOptions(""))
    assert sizes_of(request) == (59, 72)
    decode, prefill = {A: load(10)}, {B: load(10)}
    seen = Seen({A: WIRE_REVISION, B: WIRE_REVISION})
    assert {p.node for p in place_in_pieces(rule(), seen, request, (), decode, prefill)} == {A, B}
    with pytest.raises(ClusterFullError):
        place_in_pieces(rule(), Seen({A: WIRE_REVISION, B: 0}), request, (), decode, prefill)


PIECES = (Placement(0, 2, 0, 40, A), Placement(2, 4, 0, 40, B))


def placed() -> RequestRoute:
    route = RequestRoute(max_attempts=3, retry_delay_ns=10, room_wait_ns=8 * 10 * ROOM_PAUSE_DELAYS)
    route.step(Started())
    assert route.step(Placed(A, None, PIECES)) == [SendReserve(A, None, 1, 0, PIECES)]
    return route


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("running", [True, False])
def test_the_next_attempt_leaves_out_the_holder_that_is_to_blame_not_the_coordinator(lost: bool, running: bool) -> None:
    error: KVError = (ShardLostError if lost else ShardRefusedError)(request_id=R, node=B, cause="it died")
    route = placed()
    if running:
        route.step(Reserved(1, needs_prefill=False))
        effects = route.step(DecodeFailed(1, error, may_retry=True))
    else:
        effects = route.step(ReserveFailed(1, error, may_retry=True))
    assert effects == [EndAt(A, 1, "attempt failed"), NoteRetry(1, error), PauseThenRetry(10)]
    assert route.step(RetryDue()) == [Place((B,))]
    assert route.step(Placed(A, None, ())) == [SendReserve(A, None, 2, 0, ())]


def test_a_cluster_that_is_too_small_fails_the_request_at_once_and_a_full_one_is_tried_again() -> None:
    route = RequestRoute(max_attempts=3, retry_delay_ns=10)
    route.step(Started())
    full = ClusterFullError(request_id=R, need=9, nodes=2, free=3)
    assert route.step(PlacementFailed(full)) == [NoteRetry(1, full), PauseThenRetry(10)]
    route.step(RetryDue())
    small = ClusterTooSmallError(request_id=R, need=9, mode="auto", nodes=2, total=8)
    assert route.step(PlacementFailed(small)) == [Fail(small)]


def test_a_request_that_lost_its_place_waits_for_room_without_using_up_its_attempts_but_not_for_ever() -> None:
    route = placed()
    route.step(Reserved(1, needs_prefill=False))
    lost = ShardLostError(request_id=R, node=B, cause="it died")
    route.step(DecodeFailed(1, lost, may_retry=True))
    full = ClusterFullError(request_id=R, need=9, nodes=1, free=3)
    for _ in range(8):
        assert route.step(RetryDue()) == [Place((B,))]
        assert route.step(PlacementFailed(full)) == [PauseThenRetry(10 * ROOM_PAUSE_DELAYS)]
        assert route.attempt == 1
    assert route.step(RetryDue()) == [Place((B,))]
    # From here on it is an attempt like any other.
    assert route.step(PlacementFailed(full)) == [NoteRetry(2, full), PauseThenRetry(20)]
    route.step(RetryDue())
    assert route.step(PlacementFailed(full)) == [Fail(full)]


FILE = """
[sharding]
{sharding}
[[node]]
id = "gateway"
role = "gateway"
bus_port = 1
events_port = 2
http_port = 3
[[node]]
id = "a"
role = "decode"
bus_port = 4
events_port = 5
http_port = 6
data_port = 7
slots = 8
[[node]]
id = "b"
role = "prefill"
bus_port = 14
events_port = 15
http_port = 16
data_port = 17
slots = 8
"""


@pytest.mark.parametrize(
    ("sharding", "path"),
    [
        ('mode = "hybrid"', "$.sharding.groups"),
        ('groups = [["a", "b"]]', "$.sharding.groups"),
        ('mode = "hybrid"\ngroups = [["a"]]', "$.sharding.groups[0]"),
        ('mode = "hybrid"\ngroups = [["a", "gateway"]]', "$.sharding.groups[0][1]"),
        ('mode = "hybrid"\ngroups = [["a", "b"], ["b", "a"]]', "$.sharding.groups[1][0]"),
        ('mode = "none"\nabove_tokens = 5', "$.sharding.above_tokens"),
        ('mode = "both"', "$.sharding.mode"),
        ('mode = "layer"\n[model]\nengine = "stub"', "$.sharding.mode"),
        ('above_tokens = 5\n[model]\nengine = "stub"', "$.sharding.above_tokens"),
    ],
)
def test_a_section_that_contradicts_itself_is_refused_by_its_path(sharding: str, path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(FILE.format(sharding=sharding))
    assert refused.value.fields["path"] == path


def test_a_section_that_does_not_is_read() -> None:
    section = parse_config(FILE.format(sharding='mode = "hybrid"\ngroups = [["a", "b"]]')).sharding
    assert (section.mode, section.groups, section.above_tokens) == ("hybrid", [["a", "b"]], 0)
    assert parse_config(FILE.format(sharding="")).sharding.mode == "auto"


@given(rows=st.integers(1, 5), width=st.integers(1, 7), seed=st.integers(0, 999))
def test_rows_come_back_as_they_were(rows: int, width: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, width, 2)).astype(np.float32)
    assert np.array_equal(unpack(pack(values), width, 2), values)
    assert np.array_equal(unpack(pack(values[::-1]), width, 2), values[::-1])


def test_rows_and_partials_of_other_shapes_or_of_no_numbers_are_the_peers_fault() -> None:
    for data in (b"", b"\0" * 7, b"\0" * 12):
        with pytest.raises(RemoteProtocolError):
            unpack(data, 2, 2)
    good = Partials.empty(2, 3, 4)

    def read(maxima: object, sums: object, outputs: object, rows: int = 2) -> Partials:
        return unpack_partials(pack(np.asarray(maxima)), pack(np.asarray(sums)), pack(np.asarray(outputs)), rows, 3, 4)

    assert np.array_equal(read(good.maxima, good.sums, good.outputs).maxima, good.maxima)
    for bad in (
        (good.maxima[:1], good.sums, good.outputs, 2),
        (good.maxima, good.sums, good.outputs, 3),
        (good.maxima * np.float32(np.nan), good.sums, good.outputs, 2),
        (good.maxima, good.sums - 1, good.outputs, 2),
        (good.maxima, good.sums * np.float32(np.nan), good.outputs, 2),
        (good.maxima, good.sums, good.outputs + np.float32(np.nan), 2),
    ):
        with pytest.raises(RemoteProtocolError):
            read(*bad)
