"""The `memory` transport in virtual time: a fault ends in right bytes or a typed error, and leaves nothing behind."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine

import msgspec
import pytest

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.testing.loop import LoopClock, run_virtual
from kv_transport import TransportConfig, XferState
from kv_transport.backends.memory_network import Fate, MemoryFaults, MemoryNetwork
from kv_transport.errors import (
    BackendUnavailable,
    ChecksumMismatch,
    ConnectionLost,
    InvalidDescriptor,
    StaleGeneration,
    TransferTimeout,
)
from tests.transport.helpers_memory import MEMORY, Outcome, fetch, hand_over, memory_node
from tests.transport.helpers_transport import SMALL, Node, introduce

PREFILL, DECODE = NodeId("prefill"), NodeId("decode")
TIMEOUT_MS = 20_000
Work = Callable[[Node, Node, MemoryNetwork], Coroutine[None, None, None]]


def with_pair(network: MemoryNetwork, work: Work, settings: TransportConfig = MEMORY) -> None:
    """Run `work(sender, receiver, network)` in virtual time; nothing may be left of it."""

    async def main(clock: LoopClock) -> None:
        async with (
            memory_node(PREFILL, network, clock, settings=settings) as sender,
            memory_node(DECODE, network, clock, settings=settings) as receiver,
        ):
            introduce(sender, receiver)
            await work(sender, receiver, network)
            for one in (sender, receiver):
                assert one.agent.inventory().work == (), one.agent.name

    run_virtual(main)


def check(outcome: Outcome) -> None:
    """Right bytes if both sides say so; else both have an error, in time."""
    assert outcome.seconds <= TIMEOUT_MS / 1000
    if outcome.received is None:
        assert outcome.right
    if outcome.sent is None:
        assert outcome.received is None


def test_bytes_arrive_and_take_the_time_that_they_should() -> None:
    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        assert (await hand_over(sender, receiver, 0, 8, TIMEOUT_MS)).right
        outcome = await hand_over(sender, receiver, 1, 8, TIMEOUT_MS)
        assert outcome.right and outcome.sent is None
        carried = 8 * SMALL.block_nbytes / 1_000_000
        assert carried < outcome.seconds < carried + 0.1
        assert sender.agent.stats().peers[0].preferred == "memory"

    with_pair(MemoryNetwork(1, MemoryFaults(delay_ns=5_000_000, bytes_per_s=1_000_000)), work)


@pytest.mark.parametrize(
    ("faults", "fate"),
    [
        (MemoryFaults(loss=0.05), Fate.LOST),
        (MemoryFaults(late=0.05, late_ns=8_000_000_000), Fate.LATE),
        (MemoryFaults(missing=0.05), Fate.MISSING),
        (MemoryFaults(torn=0.2), Fate.TORN),
    ],
)
def test_no_fault_shows_a_wrong_byte_or_leaves_anything(faults: MemoryFaults, fate: Fate) -> None:
    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        good = 0
        for number in range(40):
            pushed = await hand_over(sender, receiver, number, 4, TIMEOUT_MS)
            pulled = await fetch(receiver, sender, number, 4, TIMEOUT_MS)
            for outcome in (pushed, pulled):
                check(outcome)
                good += outcome.received is None
        assert network.fates[fate] > 5
        assert good >= 40
        if fate is Fate.TORN:
            assert sender.agent.stats().checksum_failures + receiver.agent.stats().checksum_failures >= 5

    with_pair(MemoryNetwork(2, faults), work)


def test_a_slot_that_is_reused_under_its_reader_is_stale_and_never_shown() -> None:
    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        outcome = await fetch(receiver, sender, 1, 4, TIMEOUT_MS)
        assert isinstance(outcome.received, StaleGeneration)
        assert not outcome.right

    with_pair(MemoryNetwork(3, MemoryFaults(reused=1.0)), work)


def test_bytes_that_are_always_torn_fail_after_the_retries() -> None:
    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        outcome = await hand_over(sender, receiver, 1, 4, TIMEOUT_MS)
        assert isinstance(outcome.sent, ChecksumMismatch) and isinstance(outcome.received, ChecksumMismatch)
        assert sender.agent.stats().retries >= 3

    with_pair(MemoryNetwork(4, MemoryFaults(torn=1.0)), work)


def test_an_abandoned_transfer_pins_its_memory_until_the_late_unit_has_come() -> None:
    """The caller has its error long before the transport lets go of the memory, on both sides."""

    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        request, source, target = RequestId("late"), sender.filled(4, seed=1), receiver.blocks(4)
        grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=4 * SMALL.block_size)
        inbound = receiver.engine.expect(request, grant, timeout_ms=1_000)
        handover = sender.engine.open_handover(request, grant)
        handover.submit(0, source)
        with pytest.raises(TransferTimeout):
            await inbound.layer_ready(0)
        await asyncio.sleep(0.1)  # the sender has heard of the fence
        assert handover.state is XferState.ABANDONED
        assert [item.state for item in sender.agent.inventory().of("transfer")] == ["abandoned"]
        with pytest.raises(InvalidDescriptor):
            sender.agent.deregister_memory(sender.region)
        await inbound.settled()
        # It is fenced, but what was posted may still be written: nobody gets these slots.
        assert not inbound.slots_free
        await asyncio.sleep(2)
        assert receiver.agent.inventory().of("quarantine") and receiver.agent.stats().quarantined_slots == 4
        before = receiver.content(target)
        await inbound.released()
        assert receiver.content(target) != before, "the late unit did come"
        assert not any(receiver.arena.block_checks(ref.slot)[0] for ref in target), "and is visible to nobody"
        await handover.cancel()
        assert sender.agent.inventory().of("transfer") == ()
        sender.agent.deregister_memory(sender.region)

    settings = TransportConfig(transport="memory", unit_timeout_ms=60_000)
    with_pair(MemoryNetwork(5, MemoryFaults(late=1.0, late_ns=30_000_000_000)), work, settings)


def test_a_broken_link_frees_no_memory_before_its_late_units_have_come() -> None:
    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        request, target = RequestId("late"), receiver.blocks(4)
        grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=4 * SMALL.block_size)
        inbound = receiver.engine.expect(request, grant, timeout_ms=2_000)
        handover = sender.engine.open_handover(request, grant)
        handover.submit(0, sender.filled(4, seed=1))
        await asyncio.sleep(5)
        assert sender.agent.stats().peers[0].transports == (), "the deadline of units has broken the link"
        assert inbound.error is not None and not inbound.slots_free
        await handover.cancel()
        await inbound.released()
        assert asyncio.get_running_loop().time() > 30

    settings = TransportConfig(transport="memory", unit_timeout_ms=500)
    with_pair(MemoryNetwork(5, MemoryFaults(late=1.0, late_ns=30_000_000_000)), work, settings)


def test_a_cut_is_noticed_by_silence_and_a_healed_network_works_again() -> None:
    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        assert (await hand_over(sender, receiver, 0, 4, TIMEOUT_MS)).right
        network.cut(PREFILL, DECODE)
        healing = asyncio.get_running_loop().call_later(30, network.heal, PREFILL, DECODE)
        outcome = await hand_over(sender, receiver, 1, 4, TIMEOUT_MS)
        assert isinstance(outcome.sent, TransferTimeout | ConnectionLost) and outcome.received is not None
        assert outcome.seconds <= TIMEOUT_MS / 1000
        await asyncio.sleep(31)
        assert healing.when() < asyncio.get_running_loop().time()
        again = await hand_over(sender, receiver, 2, 4, TIMEOUT_MS)
        assert again.right and again.sent is None

    with_pair(MemoryNetwork(6), work)


def test_a_writer_behind_a_cut_keeps_its_slots_in_quarantine_until_it_is_known_to_rest() -> None:
    async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
        request, target = RequestId("cut"), receiver.blocks(4)
        grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=4 * SMALL.block_size)
        inbound = receiver.engine.expect(request, grant, timeout_ms=60_000)
        handover = sender.engine.open_handover(request, grant)
        handover.submit(0, sender.filled(4, seed=1))
        await inbound.layer_ready(0)
        for source, there in ((PREFILL, DECODE), (DECODE, PREFILL)):
            network.cut(source, there)
        await asyncio.sleep(20)
        assert inbound.error is not None and not inbound.slots_free
        assert receiver.agent.stats().quarantined_slots == 4
        for source, there in ((PREFILL, DECODE), (DECODE, PREFILL)):
            network.heal(source, there)
        await asyncio.wait_for(inbound.released(), 5)
        await handover.cancel()

    with_pair(MemoryNetwork(7), work)


@pytest.mark.parametrize("who", [PREFILL, DECODE])
def test_a_crash_ends_what_the_node_did_and_another_life_may_join(who: NodeId) -> None:
    async def main(clock: LoopClock) -> None:
        network = MemoryNetwork(8)
        async with memory_node("prefill", network, clock) as sender:
            async with memory_node("decode", network, clock) as receiver:
                introduce(sender, receiver)
                survivor = receiver if who == PREFILL else sender
                loop = asyncio.get_running_loop()
                loop.call_later(0.0001, network.crash, who)
                outcome = await hand_over(sender, receiver, 1, 8, TIMEOUT_MS)
                assert isinstance(outcome.sent or outcome.received, KVError)
                await asyncio.sleep(1)
                assert survivor.agent.inventory().work == ()
            if who == DECODE:
                async with memory_node("decode", network, clock, incarnation=2) as receiver:
                    introduce(sender, receiver)
                    assert (await hand_over(sender, receiver, 2, 8, TIMEOUT_MS)).right

    run_virtual(main)


def test_a_node_that_crashes_after_its_link_broke_comes_to_rest() -> None:
    async def main(clock: LoopClock) -> None:
        network = MemoryNetwork(8, MemoryFaults(late=1.0, late_ns=3_000_000_000))
        async with (
            memory_node("prefill", network, clock) as sender,
            memory_node("decode", network, clock) as receiver,
        ):
            introduce(sender, receiver)
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, network.crash, DECODE)
            loop.call_later(0.5, network.crash, PREFILL)  # units of the broken link are still under way
            outcome = await hand_over(sender, receiver, 1, 8, TIMEOUT_MS)
            assert isinstance(outcome.sent, KVError)
        assert clock.monotonic_ns() < 60 * 10**9

    run_virtual(main)


def test_a_run_is_a_function_of_its_seed() -> None:
    faults = MemoryFaults(delay_ns=1_000_000, jitter_ns=500_000, loss=0.02, late=0.02, missing=0.02, torn=0.05)

    def digest(seed: int) -> str:
        trace = hashlib.blake2b(digest_size=16)

        async def work(sender: Node, receiver: Node, network: MemoryNetwork) -> None:
            for number in range(15):
                outcome = await hand_over(sender, receiver, number, 6, TIMEOUT_MS)
                trace.update(f"{outcome.seconds:.9f} {type(outcome.sent).__name__} {outcome.right}".encode())
            trace.update(repr(sorted((fate.value, count) for fate, count in network.fates.items())).encode())

        with_pair(MemoryNetwork(seed, faults), work)
        return trace.hexdigest()

    assert digest(9) == digest(9) != digest(10)


def test_it_needs_a_network_and_chances_between_0_and_1() -> None:
    async def main(clock: Clock) -> None:
        with pytest.raises(BackendUnavailable, match="MemoryNetwork"):
            async with memory_node("alone", None, clock):  # type: ignore[arg-type]
                pass

    run_virtual(main)
    with pytest.raises(InvalidDescriptor):
        MemoryFaults(loss=1.5)
    with pytest.raises(InvalidDescriptor):
        MemoryFaults(delay_ns=-1)


@pytest.mark.parametrize("how", ["removed", "restarted"])
def test_an_agent_closes_only_when_peers_that_left_touch_its_memory_no_more(how: str) -> None:
    """Whoever waited for the removal may be gone: the unit that is still on its way reads our memory all the same."""

    async def main(clock: LoopClock) -> None:
        network = MemoryNetwork(9, MemoryFaults(late=1.0, late_ns=3_000_000_000))
        async with memory_node(DECODE, network, clock) as receiver:
            async with memory_node(PREFILL, network, clock) as sender:
                introduce(sender, receiver)
                source, target = sender.filled(2, seed=1), receiver.blocks(2)
                grant = receiver.engine.grant_writes(RequestId("r"), target, seq_start=0, seq_end=2 * SMALL.block_size)
                handover = sender.engine.open_handover(RequestId("r"), grant)
                handover.submit(0, source)
                await asyncio.sleep(0.5)
                if how == "removed":
                    removal = asyncio.ensure_future(sender.agent.remove_remote_agent(DECODE))
                    await asyncio.sleep(0.5)
                    removal.cancel()
                    await asyncio.gather(removal, return_exceptions=True)
                else:
                    metadata = receiver.agent.get_agent_metadata(PREFILL, Incarnation(1))
                    sender.agent.add_remote_agent(msgspec.structs.replace(metadata, incarnation=2))
                closing_s = clock.monotonic_ns() / 1e9
            assert closing_s < 2 and clock.monotonic_ns() / 1e9 > 3
            # The arena is closed by now; a unit that came later would fail the run.
            await asyncio.sleep(10)

    run_virtual(main)
