"""Prefixes that are being computed right now, and whether to wait for one or to compute it again.

Whoever computes blocks announces them with the time at which it expects each to be ready. A second request for the same
prefix asks before it begins. Pure: time comes in with the calls, names propose, and what is waited for is matched by
tokens when it is there, like anything else.

F1: waiting is proposed only where it is expected to end sooner than computing everything that is missing.
F2: an announcement ends: by its blocks' becoming ready, by being withdrawn, with its owner, or by its time. Nobody
    waits beyond `until_ns`.
F3: a lookup changes nothing.
F4: a block has one announcement: who announced first keeps it, and whoever comes second should have asked.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.hashing import BlockHash
from kv_prefix import limits
from kv_prefix.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for another request's blocks rather than compute them.

    Attributes:
        owner: whose blocks they are.
        num_blocks: blocks from the prompt's block 0 that will be there then.
        ready_ns: when, as announced.
        until_ns: when to give up and compute.
        saved_ns: how much sooner the prompt is expected to be done than by computing all that is missing.
    """

    owner: str
    num_blocks: int
    ready_ns: int
    until_ns: int
    saved_ns: int


@dataclass(frozen=True, slots=True)
class _Announced:
    """One block: who computes it, and when it will be there. Replaced, never changed."""

    owner: str
    check: int
    ready_ns: int
    until_ns: int


class InFlight:
    """What is being computed, by whoever this node or gateway hears of."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Announced] = {}
        self._of_owner: dict[str, set[bytes]] = {}
        self._ends: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def announce(
        self, owner: str, block_hashes: Sequence[BlockHash], *, start_ns: int, ns_per_block: int, until_ns: int
    ) -> int:
        """`owner` computes these consecutive blocks from `start_ns` on; returns how many of them were taken up.

        Blocks that another announced are left with it, and so is what goes beyond `MAX_IN_FLIGHT_BLOCKS`.

        Args:
            owner: names one computation; announced again, it replaces what it said before.
            until_ns: the announcement ends then, whatever happens.

        Raises:
            InvalidRequestError: a time that is negative, or an end before the beginning.
        """
        if ns_per_block < 0 or until_ns <= start_ns:
            raise InvalidRequestError(name="until_ns", value=until_ns, rule=f"blocks begin at {start_ns}")
        self.withdraw(owner)
        mine: set[bytes] = set()
        for i, name in enumerate(block_hashes):
            if name.sequence in self._blocks:
                continue
            if len(self._blocks) >= limits.MAX_IN_FLIGHT_BLOCKS:
                break
            self._blocks[name.sequence] = _Announced(owner, name.check, start_ns + (i + 1) * ns_per_block, until_ns)
            mine.add(name.sequence)
        if mine:
            self._of_owner[owner] = mine
            heapq.heappush(self._ends, (until_ns, owner))
        return len(mine)

    def ready(self, owner: str, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks are there now, and found where blocks are found."""
        mine = self._of_owner.get(owner, set())
        for name in block_hashes:
            if name.sequence in mine:
                mine.remove(name.sequence)
                del self._blocks[name.sequence]
        if not mine:
            self._of_owner.pop(owner, None)

    def withdraw(self, owner: str) -> None:
        """The computation ended, was cancelled, or its node died: what is left of it will not come."""
        for sequence in self._of_owner.pop(owner, ()):
            del self._blocks[sequence]

    def expire(self, now_ns: int) -> list[str]:
        """End what has run out of time; returns whose."""
        ended: list[str] = []
        while self._ends and self._ends[0][0] <= now_ns:
            until_ns, owner = heapq.heappop(self._ends)
            mine = self._of_owner.get(owner)
            if mine and self._blocks[next(iter(mine))].until_ns == until_ns:
                self.withdraw(owner)
                ended.append(owner)
        return ended

    def ask(
        self, block_hashes: Sequence[BlockHash], num_held: int, *, now_ns: int, ns_per_block: int, fetch_ns: int = 0
    ) -> Wait | None:
        """Whether to wait before computing a prompt; None: begin now. Changes nothing.

        Args:
            block_hashes: of the prompt, from block 0.
            num_held: blocks from block 0 that are held already.
            ns_per_block: what computing a block takes here.
            fetch_ns: what reading the announced blocks takes here once they are ready.
        """
        missing = len(block_hashes) - num_held
        best: Wait | None = None
        owner = ""
        for done, name in enumerate(block_hashes[num_held:], 1):
            block = self._blocks.get(name.sequence)
            # Of equal savings the longer wait is taken: what another computes need not be computed here.
            if block is None or block.check != name.check or block.until_ns <= now_ns or owner not in ("", block.owner):
                break
            owner = block.owner
            takes = max(block.ready_ns - now_ns, 0) + fetch_ns + (missing - done) * ns_per_block
            saved = missing * ns_per_block - takes
            if block.ready_ns < block.until_ns and saved >= (best.saved_ns if best else 1):
                best = Wait(owner, num_held + done, block.ready_ns, block.until_ns, saved)
        return best

    def owners(self, block_hashes: Sequence[BlockHash]) -> list[str]:
        """Who computes each of these blocks; empty where nobody does. Changes nothing."""
        blocks = (self._blocks.get(name.sequence) for name in block_hashes)
        return [
            block.owner if block is not None and block.check == name.check else ""
            for block, name in zip(blocks, block_hashes, strict=True)
        ]

    def check(self) -> None:
        """Assert that blocks and owners name each other, and that every owner has an end."""
        assert {name: block.owner for name, block in self._blocks.items()} == {
            name: owner for owner, names in self._of_owner.items() for name in names
        }
        armed = set(self._ends)
        assert all(
            (self._blocks[next(iter(names))].until_ns, owner) in armed for owner, names in self._of_owner.items()
        )
