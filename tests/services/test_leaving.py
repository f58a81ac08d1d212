"""A node that leaves: what its machines hand over, what the gateway makes of it, and who gets which blocks."""

import asyncio
import io
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError, error_from_wire
from kv_core.hashing import hash_tokens, token_bytes
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.testing import LoopClock, run_virtual
from kv_prefix.block_pool import BlockPool
from kv_prefix.tiers.blocks import TierBlock
from kv_services.errors import MoveRefusedError, NodeDrainingError
from kv_services.gateway.routing_state import DecodeFailed, Fail, NoteRetry, PauseThenRetry, Place, Placed
from kv_services.launch import PortReservation
from kv_services.membership.state import HeartbeatSeen, LeaveSeen, Liveness, MemberDied, MembershipView
from kv_services.node.decode_events import DrainBegan, DrainEnded, GiveUp, RefuseReserve
from kv_services.node.move_plan import Forest, choose_target, share_of
from kv_services.node.operations import HEAR_S, Operations
from kv_services.node.prefill_events import PrefillDrainBegan, PrefillDrainEnded, ReplyFailed, StartPrefill
from kv_services.node.store import LeaseDesk
from kv_services.side_http import BODY_BYTES_MAX, SideHttp
from kv_services.status_report import MoveCounts
from tests.services import helpers_prefill as prefill
from tests.services import test_decode_state as decode
from tests.services import test_routing_state as routing

A, B, C, D = (NodeId(name) for name in "abcd")
NS = decode.NS


def test_a_draining_decode_node_hands_over_what_it_has_and_refuses_what_comes() -> None:
    m, pool = decode.machine()
    m.step(decode.ask("r1", local=True))
    m.step(decode.ask("r2", tokens=tuple(range(100, 109)), local=True))
    effects = m.step(DrainBegan(hand_over=True))
    told = [e for e in effects if isinstance(e, GiveUp | RefuseReserve)]
    assert {e.request_id for e in told} == {"r1", "r2"}
    assert all(isinstance(e.error, NodeDrainingError) for e in told)
    (refused,) = decode.of(m.step(decode.ask("r3")), RefuseReserve)
    assert isinstance(refused.error, NodeDrainingError)
    m.step(DrainEnded())
    assert not decode.of(m.step(decode.ask("r4", tokens=(7, 8, 9))), RefuseReserve)
    m.check()
    pool.check()


def test_a_node_leaves_in_its_order_and_counts_on_nobody_who_leaves_in_the_same_moment() -> None:
    """What it says is heard, and what others say, before it asks who holds its blocks; what comes after is refused."""
    past: list[tuple[str, float]] = []

    async def main(clock: LoopClock) -> None:
        loop = asyncio.get_running_loop()

        def note(what: str) -> None:
            past.append((what, loop.time()))

        def part(**more: object) -> Any:
            machine = SimpleNamespace(num_running=0, num_waiting=0)
            return SimpleNamespace(machine=machine, complete=lambda event: None, outbox=(), **more)

        cluster = SimpleNamespace(say=note, alive=lambda *roles: [B])
        shards = SimpleNamespace(busy=False, drain=lambda hand_over: None, resume=lambda: None)
        ctx = SimpleNamespace(node_id=A, tiers=SimpleNamespace(counts=dict))
        leases, clients = LeaseDesk(cast(Any, ctx)), SimpleNamespace(leaving=False, num_puts=1)
        base = SimpleNamespace(cluster=cluster, draining=False)
        operations = Operations(
            *cast(Any, (base, ctx, part(), part(), leases, clients, shards)),
        )

        def give_away(rate: float) -> None:
            note("give away")
            operations.mover.counts = MoveCounts("drain", "done")

        cast(Any, operations.mover).give_away_all = give_away
        await operations.actions()["/drain"](b"")
        assert clients.leaving and not leases.ending
        await asyncio.sleep(5.0)
        # A client's put that had begun ends first, and is given away with the rest.
        assert [what for what, _ in past] == ["draining"]
        clients.num_puts = 0
        leases._leases[1] = cast(Any, SimpleNamespace(reader=B))
        await asyncio.sleep(1.0)
        counts = operations.moving()
        assert past[-1][0] == "give away" and leases.ending and counts is not None and not counts.safe_to_stop
        leases._leases.clear()
        await asyncio.sleep(1.0)
        counts = operations.moving()
        assert counts is not None and counts.safe_to_stop
        await operations.actions()["/resume"](b"")
        assert not leases.ending and not clients.leaving and operations.moving() is None
        await operations.actions()["/drain"](b"")
        await asyncio.sleep(5.0)
        await operations.close()

    run_virtual(main)
    (_, said), (what, gave) = past[-2:]
    assert what == "give away" and gave - said >= HEAR_S


def test_a_draining_decode_node_that_is_the_last_one_finishes_what_it_has() -> None:
    m, _ = decode.machine()
    m.step(decode.ask("r1", local=True))
    assert not decode.of(m.step(DrainBegan(hand_over=False)), GiveUp)
    assert m.num_running == 1


def test_a_draining_prefill_node_finishes_its_turn_and_hands_over_who_waits() -> None:
    m, pool = prefill.machine()
    m.step(prefill.ask("r1"))
    m.step(prefill.ask("r2"))
    (failed,) = prefill.of(m.step(PrefillDrainBegan()), ReplyFailed)
    assert failed.request_id == "r2" and isinstance(failed.error, NodeDrainingError)
    assert m.num_running == 1 and m.num_waiting == 0
    (failed,) = prefill.of(m.step(prefill.ask("r3")), ReplyFailed)
    assert isinstance(failed.error, NodeDrainingError)
    m.step(prefill.computed("r1"))
    m.step(prefill.sent("r1"))
    m.step(PrefillDrainEnded())
    assert prefill.of(m.step(prefill.ask("r4", tokens=tuple(range(50, 59)))), StartPrefill)
    pool.check()


def test_being_handed_over_costs_a_request_no_attempt_but_only_once_for_each_node() -> None:
    r = routing.new()
    routing.running(r)
    leaving = NodeDrainingError(node="d")
    nodes = [NodeId(f"d{i}") for i in range(10)]
    for i in range(len(nodes)):
        effects = r.step(DecodeFailed(r.epoch, leaving, may_retry=True))
        assert not any(isinstance(e, Fail | PauseThenRetry) for e in effects)
        assert isinstance(effects[-2], NoteRetry) and isinstance(effects[-1], Place)
        r.step(Placed(nodes[i + 1] if i + 1 < len(nodes) else nodes[0], None))
    # The first one again: from now on it counts, or this would never end.
    effects = r.step(DecodeFailed(r.epoch, leaving, may_retry=True))
    assert isinstance(effects[-1], PauseThenRetry)


def test_a_member_that_says_it_left_is_dead_at_once_and_only_in_that_life() -> None:
    view = MembershipView(10, 20)
    view.add(A)
    view.step(HeartbeatSeen(0, A, Incarnation(2)))
    assert view.step(LeaveSeen(A, Incarnation(1))) == []
    (died,) = view.step(LeaveSeen(A, Incarnation(2)))
    assert isinstance(died, MemberDied)
    assert view.step(HeartbeatSeen(1, A, Incarnation(2))) == []
    assert view.members[A].liveness is Liveness.DEAD
    view.step(HeartbeatSeen(2, A, Incarnation(3)))
    assert view.members[A].liveness is Liveness.ALIVE


def pool_of(*prompts: tuple[int, ...]) -> BlockPool:
    """A pool that holds the full blocks of these prompts."""
    pool = BlockPool(256, NS.block_size, region=RegionId(1))
    for number, prompt in enumerate(prompts):
        names = hash_tokens(NS, prompt)
        match = pool.match(NS.digest, names, (*prompt, 0))
        opened = pool.open(f"r{number}", match, len(names) - len(match.refs), use_partial=False)
        first = len(match.refs)
        pool.commit(opened.table, NS.digest, first, names[first:], prompt[first * 4 : len(names) * 4])
        pool.release(opened.table)
    return pool


def tier_chain(prompt: tuple[int, ...]) -> list[TierBlock]:
    """The full blocks of a prompt as a tier keeps them."""
    blocks, parent, raw = [], b"", token_bytes(prompt)
    for i, name in enumerate(hash_tokens(NS, prompt)):
        names = (NS.digest, i, name.sequence, name.check, parent, bytes(32))
        blocks.append(TierBlock(*names, raw[16 * i : 16 * i + 16], (), b""))
        parent = name.sequence
    return blocks


prompts = st.lists(st.integers(0, 2), min_size=4, max_size=24).map(tuple)


@given(st.lists(prompts, max_size=8), st.lists(prompts, max_size=8), st.randoms(use_true_random=False))
def test_chains_cover_every_block_once_and_name_the_tokens_they_were_made_of(
    texts: list[tuple[int, ...]], below: list[tuple[int, ...]], draw: Random
) -> None:
    """Of memory and, in whatever order they lie there, of the tiers below."""
    pool = pool_of(*texts)
    in_memory = {name for run in pool.snapshot() for name in run.block_hashes}
    kept = {block.sequence: block for text in below for block in tier_chain(text)}
    everything = in_memory | {block.block_hash for block in kept.values()}
    forest = Forest.of(pool.snapshot())
    forest.add_below(draw.sample(list(kept.values()), len(kept)))
    assert forest.num_blocks == len(everything)
    texts = texts + below
    are_there = [leaf in in_memory for leaf in forest.leaves()]
    assert are_there == sorted(are_there, reverse=True), "memory first"
    seen = []
    for leaf in forest.leaves():
        chain = forest.chain(leaf)
        assert chain is not None and chain.names[-1] == leaf
        assert tuple(hash_tokens(NS, chain.tokens)) == chain.names
        assert any(token_bytes(text).startswith(chain.tokens) for text in texts)
        own = list(forest.only_here(leaf))
        assert own == list(reversed(chain.names))[: len(own)]
        seen += own
    assert len(seen) == len(set(seen)) and set(seen) == everything


def test_a_block_below_without_its_beginning_is_left_out() -> None:
    forest = Forest.of(pool_of((1,) * 8).snapshot())
    blocks = tier_chain((1,) * 4 + (2,) * 8)
    forest.add_below([blocks[0], blocks[2]])
    assert forest.num_blocks == 2
    forest.add_below([blocks[1], blocks[2]])
    assert forest.num_blocks == 4


def test_a_chain_goes_to_whoever_lacks_least_of_it_and_never_where_there_is_no_room() -> None:
    assert choose_target(10, {A: 4, B: 2}, {A: 6, B: 100, C: 100}) == (A, 4)
    assert choose_target(10, {A: 4}, {A: 5, B: 10, C: 11}) == (C, 0)
    assert choose_target(10, {A: 4}, {A: 5, B: 9}) is None
    assert choose_target(10, {A: 10}, {A: 0}) == (A, 10)


counts = st.dictionaries(st.sampled_from((A, B, C, D)), st.integers(0, 50), min_size=1)


@given(counts, st.dictionaries(st.sampled_from((A, B, C, D)), st.integers(1, 5), min_size=1))
def test_shares_are_by_capacity_with_the_fewest_blocks_moved(
    held: dict[NodeId, int], weights: dict[NodeId, int]
) -> None:
    given = {source: share_of(source, held, weights) for source in held}
    after = dict.fromkeys(weights, 0) | dict(held)
    for source, shares in given.items():
        for target, number in shares.items():
            after[source] -= number
            after[target] += number
    total, capacity = sum(held.values()), sum(weights.values())
    assert sum(after.values()) == total
    for node, number in after.items():
        ideal = total * weights.get(node, 0) / capacity
        assert abs(number - ideal) < 1
    for node in weights:
        # Nobody both gives and takes: that would be bytes moved for nothing.
        takes = sum(shares.get(node, 0) for shares in given.values())
        assert not (takes and given.get(node))


KEY = "an operator's key"


async def act(body: bytes) -> bytes:
    if body == b"bad":
        raise MoveRefusedError(node="a", reason="told to")
    return b'{"done": true}'


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("keys", "sent", "body", "status"),
    [
        ([KEY], KEY, b"", 200),
        ([KEY], KEY, b"bad", 409),
        ([KEY], "another key of somebody", b"", 401),
        ([KEY], "", b"", 401),
        ([], "", b"", 403),
        ([], KEY, b"", 403),
        ([KEY], KEY, b"a prompt of many tokens " * 1_000, 200),
        ([KEY], KEY, b"x" * (BODY_BYTES_MAX + 1), 413),
    ],
)
async def test_what_changes_something_needs_an_operators_key(
    keys: list[str], sent: str, body: bytes, status: int
) -> None:
    calls = 0

    async def counted(given: bytes) -> bytes:
        nonlocal calls
        calls += 1
        return await act(given)

    with PortReservation() as ports:
        port = ports.take()
        side = SideHttp(
            "127.0.0.1",
            port,
            operator_keys=keys,
            unready=str,
            metrics=bytes,
            status=bytes,
            actions={"/drain": counted},
        )
        await side.start()
        try:
            headers = {"Authorization": f"Bearer {sent}"} if sent else {}
            async with aiohttp.ClientSession(headers=headers) as http:
                url = f"http://127.0.0.1:{port}/drain"
                async with http.post(url, data=io.BytesIO(body)) as response:
                    assert response.status == status
                async with http.get(url) as response:
                    assert response.status == 405
        finally:
            await side.close()
    assert calls == (1 if status in (200, 409) else 0)


def test_the_errors_of_leaving_cross_the_wire() -> None:
    for error in (NodeDrainingError(node="a"), MoveRefusedError(node="a", reason="full")):
        again = error_from_wire(*error.to_wire())
        assert type(again) is type(error) and str(again) == str(error)
        assert isinstance(again, KVError)
