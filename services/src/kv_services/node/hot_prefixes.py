"""Which beginnings of prompts are asked for so often that losing their only holder would hurt. Pure.

Uses are counted at every eighth block of a prompt (and no deeper than `DEPTH_MAX`), and fade with a half-life. A
prompt that goes on differently after a common beginning heats the common beginning alone.

Q1: what is remembered is bounded; the coldest is forgotten first.
Q2: of the beginnings of one prompt that are hot only the deepest is named: it brings the others along.
Q3: of all nodes with the same view exactly one of the holders is to act.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.checksum import xxh3_64
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId

GRID_BLOCKS: Final = 8
DEPTH_MAX: Final = 1024
REMEMBERED_MAX: Final = 4096
HALF_LIFE_NS: Final = 60_000_000_000


@dataclass(slots=True)
class _Heat:
    uses: float
    at_ns: int
    above: BlockHash | None

    def now(self, now_ns: int) -> float:
        """Uses that have not faded yet."""
        return float(self.uses * 0.5 ** ((now_ns - self.at_ns) / HALF_LIFE_NS))


class HotPrefixes:
    """What one node was asked for lately.

    Args:
        uses: uses, faded by half each minute, from which on a beginning is hot.
    """

    def __init__(self, uses: float) -> None:
        self._uses = uses
        self._heats: dict[BlockHash, _Heat] = {}

    def __len__(self) -> int:
        """Beginnings that are remembered."""
        return len(self._heats)

    def note(self, now_ns: int, names: Sequence[BlockHash]) -> None:
        """A prompt of these blocks, from block 0 on, was asked for."""
        above: BlockHash | None = None
        for depth in range(GRID_BLOCKS, min(len(names), DEPTH_MAX) + 1, GRID_BLOCKS):
            name = names[depth - 1]
            heat = self._heats.get(name)
            if heat is None:
                self._heats[name] = _Heat(1.0, now_ns, above)
            else:
                heat.uses, heat.at_ns = heat.now(now_ns) + 1.0, now_ns
            above = name
        if len(self._heats) > REMEMBERED_MAX:
            self._forget(now_ns)

    def hot(self, now_ns: int) -> list[BlockHash]:
        """The last blocks of the hot beginnings, hottest first."""
        hot = {name: heat.now(now_ns) for name, heat in self._heats.items() if heat.now(now_ns) >= self._uses}
        covered = {self._heats[name].above for name in hot}
        deepest = [name for name in hot if name not in covered]
        return sorted(deepest, key=lambda name: (-hot[name], name.sequence))

    def _forget(self, now_ns: int) -> None:
        """Keep the hotter three quarters."""
        kept = sorted(self._heats.items(), key=lambda item: item[1].now(now_ns), reverse=True)
        self._heats = dict(kept[: REMEMBERED_MAX * 3 // 4])


def acts(own: NodeId, holders: Iterable[NodeId], name: BlockHash) -> bool:
    """Whether it is this holder that makes the next copy (rendezvous hashing)."""
    return own == max(holders, key=lambda node: (xxh3_64(name.sequence + node.encode()), node), default=None)
