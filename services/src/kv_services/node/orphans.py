"""Takes over what nodes that are gone left in the remote tier, so that it is found and loaded as before.

R1: of the nodes that live, one takes a prefix over: the one that a hash of both names chooses. While two disagree on
    who lives, both may; that costs objects, never bytes that are wrong, since every load is checked.
R2: only what may be served is taken: of weights and tenants that there are, and that no purge came after.
R3: a node that is back has its prefix back at once; none of it was deleted unless it was gone for long.
R4: once it was gone for `abandoned_after_s`, what is outdated or finds no room is deleted, so that all objects together
    keep to what the nodes that live may store.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from kv_core.clock import Clock
from kv_core.ids import NodeId
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock
from kv_prefix.tiers.errors import TierError
from kv_prefix.tiers.remote import RemoteStore, Sibling
from kv_services.membership.state import Liveness
from kv_services.node.tier import SLICE_BLOCKS, NodeTier

LOOK_AGAIN_S: Final = 60.0
LOOKS_PER_ABSENCE: Final = 4
"""A node says at least so often that it lives before others take it for gone for good."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peers:
    """What is known of the other nodes.

    Attributes:
        living: those that have such a tier too and may be given work.
        liveness: of a member; None when it is none.
        gone: members that are dead or left.
    """

    living: Callable[[], Sequence[NodeId]]
    liveness: Callable[[NodeId], Liveness | None]
    gone: Callable[[], frozenset[NodeId]]

    def is_here(self, node_id: NodeId) -> bool:
        """Whether it lives, as far as anybody can say."""
        return self.liveness(node_id) in (Liveness.ALIVE, Liveness.SUSPECT)


class Orphans:
    """See the module. On the loop, but for one thread that asks the store.

    Args:
        own: this node.
        wanted: whether a block may be served.
        abandoned_after_s: as the store was opened with.
    """

    def __init__(
        self,
        own: NodeId,
        store: RemoteStore,
        tier: NodeTier,
        peers: Peers,
        clock: Clock,
        wanted: Callable[[TierBlock], bool],
        abandoned_after_s: float,
    ) -> None:
        self._own = own
        self._store = store
        self._tier = tier
        self._peers = peers
        self._clock = clock
        self._wanted = wanted
        self._again_ns = int(min(LOOK_AGAIN_S, abandoned_after_s / LOOKS_PER_ABSENCE) * 1e9)
        self._next_ns = 0
        self._gone: frozenset[NodeId] = frozenset()
        self._adopted: dict[str, dict[bytes, TierBlock]] = {}
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote-orphans")

    def tick(self) -> None:
        """Give back what belongs to who is here again; look around when it is time, or somebody went."""
        for folder in [folder for folder in self._adopted if self._peers.is_here(NodeId(folder))]:
            self._give_back(folder)
        now_ns, gone = self._clock.monotonic_ns(), self._peers.gone()
        self._gone &= gone
        if self._task is None and (now_ns >= self._next_ns or gone - self._gone):
            self._gone, self._next_ns = gone, now_ns + self._again_ns
            self._task = asyncio.get_running_loop().create_task(self._look_around(), name="orphans")
            self._task.add_done_callback(self._looked)

    async def close(self) -> None:
        """Take nothing more over. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _looked(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, TierError):
            _log.warning("not looked for what others left cause=%s", error)
        elif error is not None:
            _log.error("looking for what others left failed cause=%r", error)

    async def _look_around(self) -> None:
        await self._ask(self._store.say_alive)
        for sibling in await self._ask(self._store.siblings):
            node_id = NodeId(sibling.folder)
            is_gone = sibling.abandoned or node_id in self._gone
            if is_gone and not self._peers.is_here(node_id) and self._is_mine(sibling.folder):
                # What was taken over before needs no second look until it may be deleted.
                if sibling.abandoned or sibling.folder not in self._adopted:
                    await self._take_over(sibling)

    async def _take_over(self, sibling: Sibling) -> None:
        folder = sibling.folder
        records = await self._ask(lambda: self._store.records_of(folder))
        # Beginnings of prompts first: nothing is found without them, if there is not room for all.
        records.sort(key=lambda item: item.block.block_idx)
        adopted = self._adopted.setdefault(folder, {})
        left: list[int] = []
        taken = 0
        for at in range(0, len(records), SLICE_BLOCKS):
            if self._peers.is_here(NodeId(folder)):
                return
            now_ours = self._take(folder, [item for item in records[at : at + SLICE_BLOCKS]], adopted)
            taken += len(now_ours)
            left += [item.place for item in records[at : at + SLICE_BLOCKS] if item.block.sequence not in adopted]
            await asyncio.sleep(0)
        if taken or (left and sibling.abandoned):
            _log.info(
                "took over what is left of a node node=%s blocks=%d refused=%d deleted=%s",
                *(folder, taken, len(left), sibling.abandoned),
            )
        await self._ask(lambda: self._store.discard(folder, left))

    def _take(
        self, folder: str, records: Sequence[PlacedBlock], adopted: dict[bytes, TierBlock]
    ) -> tuple[PlacedBlock, ...]:
        theirs = {item.block.sequence: item.place for item in records}
        blocks = [item.block for item in records if self._wanted(item.block)]
        for block in blocks:
            # Taken over by an earlier look, and evicted or purged since.
            if block.sequence in adopted and self._tier.catalog.get(block.block_hash) is not adopted[block.sequence]:
                del adopted[block.sequence]
        placed = self._tier.adopt(
            blocks,
            lambda items: self._store.bind(folder, [(item.place, theirs[item.block.sequence]) for item in items]),
        )
        adopted.update((item.block.sequence, item.block) for item in placed)
        return placed

    def _give_back(self, folder: str) -> None:
        adopted = self._adopted.pop(folder)
        self._store.release(folder)
        self._tier.purge(lambda block: adopted.get(block.sequence) is block)
        _log.info("gave back what was left of a node node=%s blocks=%d", folder, len(adopted))

    def _is_mine(self, folder: str) -> bool:
        def weight(node_id: NodeId) -> bytes:
            return hashlib.blake2b(f"{folder}/{node_id}".encode(), digest_size=8).digest()

        return max({self._own, *self._peers.living()}, key=weight) == self._own

    async def _ask(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
