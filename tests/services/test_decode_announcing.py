"""What a decode node computes itself: announced from beginning to end, and waited for by who would compute the same."""

from types import SimpleNamespace
from typing import cast

import pytest

from kv_core.hashing import hash_tokens
from kv_core.ids import NodeId, RequestId
from kv_core.testing import ManualClock
from kv_core.wire import Message
from kv_prefix.block_pool import BlockPool
from kv_prefix.placement import make_placement_policy
from kv_services.gateway.placing import Placer
from kv_services.messages import Load, PrefixComputed, PrefixComputing
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.announcer import Announcer
from kv_services.node.context import NodeContext
from kv_services.node.decode_events import (
    Computed,
    DecodeEvent,
    EndAsked,
    GiveUp,
    NotePreempted,
    OpenInbound,
    PeerDied,
    StartCompute,
    StartStep,
    StepFinished,
)
from kv_services.node.decode_state import DecodeMachine
from tests.services.test_decode_state import NS, OOPS, G, ask, machine, of, outcome

SHARED = tuple(range(100, 116))
"""Four blocks."""
A, B = RequestId("a"), RequestId("b")


def local(name: str, *rest: int) -> DecodeEvent:
    return ask(name, tokens=(*SHARED, *rest), local=True, deadline_ns=10_000)


def computing() -> tuple[DecodeMachine, BlockPool]:
    """`a` computes the shared blocks and one of its own; `b` shares them."""
    m, pool = machine(num_slots=32)
    effects = m.step(local("a", 1, 2, 3, 4, 5))
    (announced,) = of(effects, AnnounceBlocks)
    assert announced.block_hashes == tuple(hash_tokens(NS, (*SHARED, 1, 2, 3, 4)))
    assert announced.num_tokens == 20 and effects.index(announced) < effects.index(of(effects, StartCompute)[0])
    held = pool.stats().pinned
    assert of(m.step(local("b", 9, 8, 7)), StartCompute) == []
    assert pool.stats().pinned == held and m.num_waiting == 1, "who waits holds nothing"
    m.check()
    return m, pool


def test_who_shares_a_beginning_waits_for_it_and_computes_only_its_own_rest() -> None:
    m, _ = computing()
    effects = m.step(Computed(A, 1))
    (compute,) = of(effects, StartCompute)
    assert (compute.request_id, compute.start, compute.stop) == (B, 16, 18)
    # The word that it is over comes after the blocks can be found, and before anything new is computed.
    assert of(effects, WithdrawBlocks) == [WithdrawBlocks(A, 1)]
    assert effects.index(WithdrawBlocks(A, 1)) < effects.index(compute)
    assert of(effects, AnnounceBlocks) == [], "less than a block is nothing to wait for"
    assert of(m.step(Computed(B, 1)), WithdrawBlocks) == []


def test_others_pass_by_whoever_waits() -> None:
    m, _ = computing()
    (opened,) = of(m.step(ask("c", deadline_ns=10_000)), OpenInbound)
    assert opened.request_id == "c"
    (other,) = of(m.step(ask("d", tokens=tuple(range(50, 59)), local=True, deadline_ns=10_000)), StartCompute)
    assert other.request_id == "d"


def test_what_fails_is_withdrawn_and_computed_by_who_waited() -> None:
    m, pool = computing()
    effects = m.step(Computed(A, 1, error=OOPS))
    assert of(effects, WithdrawBlocks) == [WithdrawBlocks(A, 1)] and len(of(effects, GiveUp)) == 1
    (compute,) = of(effects, StartCompute)
    assert (compute.request_id, compute.start) == (B, 0)
    assert [e.request_id for e in of(effects, AnnounceBlocks)] == [B]
    m.check()
    m.step(Computed(B, 1, error=OOPS))
    assert pool.stats().pinned == 0


@pytest.mark.parametrize("end", [EndAsked(A, 1, "cancelled"), PeerDied(G, "silent")])
def test_what_is_cancelled_is_waited_for_no_longer_and_withdrawn_when_it_has_ended(end: DecodeEvent) -> None:
    m, pool = computing()
    effects = m.step(end)
    # The thread still computes: others hear that it is over when its slots are quiet.
    assert of(effects, WithdrawBlocks) == []
    again = of(effects, StartCompute)
    assert [compute.request_id for compute in again] == ([B] if isinstance(end, EndAsked) else [])
    assert of(m.step(Computed(A, 1)), WithdrawBlocks) == [WithdrawBlocks(A, 1)]
    for compute in again:
        assert of(m.step(Computed(compute.request_id, 1)), WithdrawBlocks) == [WithdrawBlocks(B, 1)]
    m.check()
    assert m.num_waiting == 0 and (again or pool.stats().pinned == 0)


def test_what_is_computed_again_after_a_preemption_is_announced_too() -> None:
    # Both grow until there is no slot left: the younger gives way, and is computed again when there is room.
    m, _ = machine(num_slots=6)
    m.step(ask("old", tokens=tuple(range(8)), local=True, max_tokens=16))
    m.step(ask("young", tokens=tuple(range(50, 58)), local=True, max_tokens=16))
    effects = [*m.step(Computed(RequestId("old"), 1)), *m.step(Computed(RequestId("young"), 1))]
    seen = []
    while not of(effects, AnnounceBlocks):
        (step,) = of(effects, StartStep)[-1:]
        effects = m.step(StepFinished(tuple(outcome(item, 7) for item in step.items)))
        seen += of(effects, NotePreempted)
    assert [one.request_id for one in seen] == ["young"]
    assert [one.request_id for one in of(effects, AnnounceBlocks)] == ["young"]
    assert of(m.step(Computed(RequestId("young"), 1)), WithdrawBlocks) == [WithdrawBlocks(RequestId("young"), 1)]


class Bus:
    """Takes down what is published, and whether claims were told before."""

    def __init__(self) -> None:
        self.said: list[Message | str] = []

    def publish(self, message: Message) -> None:
        self.said.append(message)


def announcer(ns_per_token: int) -> tuple[Announcer, Bus]:
    bus = Bus()
    token = SimpleNamespace(to_bytes=lambda: b"token")
    manager = SimpleNamespace(origin=None, token_of_claims=lambda _: token)
    ctx = SimpleNamespace(
        bus=bus,
        clock=ManualClock(monotonic_ns=0),
        cost=SimpleNamespace(compute_ns_per_token=ns_per_token),
        replica=SimpleNamespace(manager=manager, say=lambda: bus.said.append("said")),
        flush_pool_events=lambda: bus.said.append("claims"),
    )
    return Announcer(cast(NodeContext, ctx), "decode"), bus


def test_an_announcement_is_published_once_and_withdrawn_once_after_its_claims() -> None:
    told, bus = announcer(1_000_000)
    names = tuple(hash_tokens(NS, SHARED))
    told.announce(AnnounceBlocks(A, 1, names, 16, 10**12))
    (said,) = bus.said
    assert isinstance(said, PrefixComputing) and len(said.names) == 20 * 4
    assert (said.ready_ns, said.until_ns) == (16_000_000, 1_032_000_000) and len(told) == 1
    told.withdraw(WithdrawBlocks(A, 1))
    told.withdraw(WithdrawBlocks(A, 1))
    assert bus.said[1:] == ["claims", "said", PrefixComputed(said.computation, b"token")] and len(told) == 0


def test_what_is_sooner_computed_than_fetched_or_cannot_be_ready_in_time_is_not_announced() -> None:
    told, bus = announcer(1_000)
    told.announce(AnnounceBlocks(A, 1, tuple(hash_tokens(NS, SHARED)), 16, 10**12))
    told, late = announcer(1_000_000)
    told.announce(AnnounceBlocks(A, 1, tuple(hash_tokens(NS, SHARED)), 16, 16_000_000))
    told.withdraw(WithdrawBlocks(A, 1))
    assert bus.said == late.said == []


def test_without_a_prefill_node_a_request_goes_where_its_beginning_is_being_computed() -> None:
    names = hash_tokens(NS, SHARED)
    nodes = {NodeId("d1"): Load(running=3), NodeId("d2"): Load()}
    placer = Placer(make_placement_policy("kv_aware"), make_placement_policy("kv_aware"), 4)

    def chosen(coming: dict[NodeId, int], prefill: dict[NodeId, Load]) -> str:
        return placer.choose(RequestId("r"), names, 17, [], nodes, prefill, coming).decode.node

    assert chosen({}, {}) == "d2"
    assert chosen({NodeId("d1"): 4}, {}) == "d1"
    # Where a prefill node computes, what a decode node computes for others is no reason to decode there.
    assert chosen({NodeId("d1"): 4}, {NodeId("p"): Load()}) == "d2"
