"""Joining, in virtual time over the in-memory bus: peers find each other, and one that differs is refused."""

import asyncio

import pytest

from kv_bus.interface import PeerAddress
from kv_bus.memory_bus import MemoryBus, MemoryNetwork
from kv_bus.stamps import LamportStamper
from kv_core.compatibility import Compatibility, IncompatiblePeerError, ServedModel
from kv_core.ids import Incarnation, NodeId
from kv_core.testing import LoopClock, run_virtual
from kv_core.wire import Registry
from kv_services.config import BusSection, Role
from kv_services.membership.actor import ClusterView
from kv_services.messages import ROLE_MESSAGES, Load

OLD, NEW = NodeId("decode-1"), NodeId("decode-2")
SETTINGS = BusSection(heartbeat_interval_ms=50, suspect_after_ms=200, dead_after_ms=600)
USUAL = Compatibility((ServedModel("m", "weights-1", 16),))


class Member:
    """One process, as far as membership goes."""

    def __init__(
        self, network: MemoryNetwork, clock: LoopClock, node_id: NodeId, incarnation: int, compatibility: Compatibility
    ) -> None:
        self.bus = MemoryBus(
            network,
            node_id,
            Incarnation(incarnation),
            Registry(*ROLE_MESSAGES),
            stamper=LamportStamper(node_id),
            clock=clock,
        )
        peer = NEW if node_id == OLD else OLD
        self.bus.add_peer(PeerAddress(peer, f"memory://{peer}", f"memory://{peer}"))
        self.view = ClusterView(self.bus, clock, SETTINGS, Role.DECODE, {peer: Role.DECODE}, Load)
        self.view.compatibility = compatibility
        self.life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.start()
        await self.view.start()
        self.life = asyncio.get_running_loop().create_task(self.view.run())

    async def stop(self) -> BaseException | None:
        """End it; what its life ended with, if with an error."""
        await self.view.close()
        await self.bus.close()
        assert self.life is not None
        (outcome,) = await asyncio.gather(self.life, return_exceptions=True)
        return outcome if isinstance(outcome, BaseException) else None


def meet(theirs: Compatibility) -> tuple[list[NodeId], BaseException | None, BaseException | None, dict[NodeId, str]]:
    """An old member with `USUAL` meets a newcomer: whom the old one may use, both ends, and what it refused."""

    async def scenario(
        clock: LoopClock,
    ) -> tuple[list[NodeId], BaseException | None, BaseException | None, dict[NodeId, str]]:
        network = MemoryNetwork()
        old, new = Member(network, clock, OLD, 100, USUAL), Member(network, clock, NEW, 101, theirs)
        await old.start()
        await asyncio.sleep(1)
        await new.start()
        await asyncio.sleep(0.5)
        usable = old.view.alive(Role.DECODE)
        refused = {node_id: str(error) for node_id, error in old.view.refused.items()}
        return usable, await old.stop(), await new.stop(), refused

    return run_virtual(scenario)


def test_equal_members_find_each_other() -> None:
    assert meet(USUAL) == ([NEW], None, None, {})


def test_a_process_that_serves_no_model_is_welcome() -> None:
    assert meet(Compatibility(())) == ([NEW], None, None, {})


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (Compatibility((ServedModel("m", "weights-1", 32),)), ("block size of m", "32", "16")),
        (Compatibility((ServedModel("m", "weights-2", 16),)), ("weights revision of m", "weights-2", "weights-1")),
        (Compatibility(USUAL.models, hash_scheme="sha256/1"), ("hash scheme", "sha256/1", "xxh3-128+crc32c/1")),
        (Compatibility(USUAL.models, wire_version=2), ("wire version", "2", "1")),
    ],
    ids=["block size", "weights", "hash", "wire"],
)
def test_one_that_differs_is_refused_with_both_values_and_ends_itself(
    theirs: Compatibility, words: tuple[str, ...]
) -> None:
    usable, old_end, new_end, refused = meet(theirs)
    assert usable == []
    assert old_end is None
    assert isinstance(new_end, IncompatiblePeerError)
    for word in words:
        assert word in refused[NEW]
        assert word in str(new_end)
