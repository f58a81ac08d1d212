"""How a gateway spreads requests: by what nodes said, and by what it gave them since."""

from kv_core.ids import NodeId, RequestId
from kv_prefix.placement import make_placement_policy
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
