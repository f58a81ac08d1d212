"""Where requests go, and that they do not all go to one place."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import NodeId
from kv_prefix.errors import NoCandidateError, UnknownPolicyError
from kv_prefix.placement import POLICIES, Candidate, PlacementRequest, make_placement_policy

NODES = [NodeId(f"node-{i}") for i in range(10)]


def request(i: int, num_blocks: int = 20) -> PlacementRequest:
    return PlacementRequest(b"request-%d" % i, b"the same beginning", num_blocks)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "round_robin"])
@given(st.permutations(range(10)), st.integers(0, 1_000))
def test_gateways_with_the_same_view_choose_alike_in_whatever_order(name: str, order: list[int], seed: int) -> None:
    draw = random.Random(seed)
    candidates = [Candidate(node, draw.random() * 100, (0, draw.randrange(9), 0, 0)) for node in NODES]
    chosen = make_placement_policy(name).place(request(seed), candidates)
    assert make_placement_policy(name).place(request(seed), [candidates[i] for i in order]) == chosen


@pytest.mark.parametrize("name", ["kv_aware", "cache_aware", "power_of_two", "round_robin"])
def test_a_thousand_requests_that_share_their_beginning_spread(name: str) -> None:
    """Every node that served one holds the shared block; loads grow by what had to be computed."""
    policy = make_placement_policy(name)
    loads, held, served = dict.fromkeys(NODES, 0.0), set[NodeId](), dict.fromkeys(NODES, 0)
    for i in range(1_000):
        candidates = [Candidate(node, loads[node], (0, int(node in held), 0, 0)) for node in NODES]
        placement = policy.place(request(i), candidates)
        loads[placement.node] += placement.new_blocks
        served[placement.node] += 1
        held.add(placement.node)
    assert max(loads.values()) / (sum(loads.values()) / len(NODES)) <= 1.5
    assert max(served.values()) <= 150


@pytest.mark.parametrize("name", ["kv_aware", "power_of_two"])
def test_gateways_with_the_same_stale_view_do_not_all_choose_one_node(name: str) -> None:
    """Twenty gateways see the same idle cluster and place one request each."""
    candidates = [Candidate(node, 0.0, (0, 1, 0, 0)) for node in NODES]
    chosen = [make_placement_policy(name).place(request(i), candidates).node for i in range(20)]
    assert max(chosen.count(node) for node in NODES) <= 6


def test_kv_aware_prefers_the_holder_until_it_is_busy() -> None:
    policy = make_placement_policy("kv_aware")
    idle = Candidate(NodeId("idle"), 0.0)
    for load, expected, new_blocks in ((0.0, "holder", 5), (50.0, "holder", 5), (1_000.0, "idle", 20)):
        placement = policy.place(request(1), [Candidate(NodeId("holder"), load, (0, 15, 0, 0)), idle])
        assert (placement.node, placement.new_blocks) == (expected, new_blocks)
        assert f"{20 - new_blocks} of 20 blocks" in placement.reason


def test_kv_aware_prefers_the_faster_tier() -> None:
    candidates = [Candidate(NodeId("disk"), 0.0, (0, 0, 15, 0)), Candidate(NodeId("host"), 0.0, (0, 15, 0, 0))]
    assert make_placement_policy("kv_aware").place(request(1), candidates).node == "host"


def test_cache_aware_leaves_the_holder_when_loads_are_uneven_or_the_match_is_short() -> None:
    policy = make_placement_policy("cache_aware")
    idle = Candidate(NodeId("idle"), 0.0)
    for holder, expected in (
        (Candidate(NodeId("holder"), 60.0, (0, 15, 0, 0)), "holder"),
        (Candidate(NodeId("holder"), 90.0, (0, 15, 0, 0)), "idle"),
        (Candidate(NodeId("holder"), 60.0, (0, 2, 0, 0)), "idle"),
    ):
        assert policy.place(request(1), [holder, idle]).node == expected


def test_a_lost_node_moves_only_its_own_prefixes() -> None:
    policy = make_placement_policy("consistent_hash")
    everyone = [Candidate(node, 0.0) for node in NODES]
    requests = [PlacementRequest(b"r", b"prefix-%d" % i, 1) for i in range(500)]
    before = [policy.place(r, everyone).node for r in requests]
    after = [policy.place(r, everyone[1:]).node for r in requests]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != NODES[0])
    assert len(set(before)) == 10


def test_round_robin_takes_turns() -> None:
    policy = make_placement_policy("round_robin")
    everyone = [Candidate(node, 0.0) for node in reversed(NODES)]
    assert [policy.place(request(1), everyone).node for _ in range(11)] == [*NODES, NODES[0]]


@pytest.mark.parametrize("name", POLICIES)
def test_no_candidate_is_an_error(name: str) -> None:
    with pytest.raises(NoCandidateError):
        make_placement_policy(name).place(request(1), [])


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match="kv_aware, cache_aware"):
        make_placement_policy("least_loaded")
