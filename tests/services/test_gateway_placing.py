"""How a gateway spreads requests: by what nodes said, and by what it gave them since."""

from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_prefix.placement import make_placement_policy
from kv_prefix.prefix_index import Holder, HolderMatch
from kv_services.gateway.placing import Placer
from kv_services.messages import Load

OLD = tuple(NodeId(f"decode-{number}") for number in (1, 2, 3))
NEW = NodeId("decode-4")


def test_a_node_that_has_just_joined_is_given_what_makes_loads_even_and_not_everything() -> None:
    placer = Placer(make_placement_policy("kv_aware"), make_placement_policy("kv_aware"), 16)
    loads = {node: Load(running=10) for node in OLD} | {NEW: Load()}
    given = dict.fromkeys(loads, 0)
    for number in range(60):
        request = RequestId(f"r{number}")
        chosen = placer.choose(request, [], 100, [], loads, {}).decode.node
        placer.assign(chosen, request, 1)
        given[chosen] += 1
    # No node has said anything since: only what was given to each tells them apart.
    totals = [max(loads[node].running, count) for node, count in given.items()]
    assert max(totals) - min(totals) <= 2, given


PREFILL = NodeId("prefill-1")
HASHES = [BlockHash(bytes([number]) * 16, number) for number in range(25)]


def computing_node(alone_ms: float, rate: float, num_held: int = 0) -> NodeId:
    """Who computes a prompt of 401 tokens of which the decode node holds so many blocks."""
    placer = Placer(make_placement_policy("kv_aware"), make_placement_policy("kv_aware"), 16, alone_ms)
    holder = Holder(OLD[0], Incarnation(1))
    holders = [HolderMatch(holder, num_held, (0, num_held, 0, 0))] if num_held else []
    prefill = {PREFILL: Load(tokens_per_second=rate)}
    choice = placer.choose(RequestId("r"), HASHES, 401, holders, {OLD[0]: Load()}, prefill)
    return (choice.prefill or choice.decode).node


def test_a_decode_node_computes_itself_what_takes_it_no_longer_than_is_allowed() -> None:
    assert computing_node(2.0, rate=401 / 0.002) == OLD[0]
    assert computing_node(2.0, rate=400 / 0.002) == PREFILL
    # What it holds it does not compute: here 81 tokens are left.
    assert computing_node(2.0, rate=81 / 0.002, num_held=20) == OLD[0]
    assert computing_node(2.0, rate=80 / 0.002, num_held=20) == PREFILL


def test_without_that_allowance_or_any_known_rate_prompts_are_handed_over() -> None:
    assert computing_node(0.0, rate=1e9) == PREFILL
    assert computing_node(1_000.0, rate=0.0) == PREFILL
