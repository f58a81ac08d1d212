"""What both processes of a benchmark agree on: memory, shapes, and how its pieces lie."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_transport.config import TransportConfig, TransportName
from kv_transport.memory_budget import MemoryBudget
from kv_transport.regions import SharedBuffer

ROOT: Final = Path(__file__).resolve().parents[2]
MIB: Final = 1 << 20
KIB: Final = 1 << 10
BUFFER_NBYTES: Final = 128 * MIB
GEOMETRY: Final = BlockGeometry(num_layers=4, num_kv_heads=8, head_dim=128, dtype=DType.BF16, block_size=64)
"""256 KiB per (slot, layer)."""
NUM_SLOTS: Final = 64
"""64 MiB of KV in `GEOMETRY`."""
UCX_OPTIONS: Final = {"TLS": "tcp,self", "NET_DEVICES": "lo", "TCP_CM_REUSEADDR": "y"}
NO_RESERVE: Final = MemoryBudget(reserve_nbytes=0)


@dataclass(frozen=True, slots=True)
class Pattern:
    """`count` pieces of `piece` bytes each, in the same buffer on both sides.

    `order` of more than one piece is a fixed shuffle: blocks that the two sides hold in different places.
    """

    name: str
    piece: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.piece * self.count

    def offsets(self) -> list[tuple[int, int]]:
        """`(ours, theirs)` of each piece."""
        theirs = list(range(self.count))
        random.Random(f"pieces/{self.name}").shuffle(theirs)
        return [(index * self.piece, other * self.piece) for index, other in enumerate(theirs)]


LARGE: Final = Pattern("64MiB", 64 * MIB, 1)
MEDIUM: Final = Pattern("16MiB", 16 * MIB, 1)
BLOCKS: Final = Pattern("512x256KiB", 256 * KIB, 512)
SMALL_BLOCKS: Final = Pattern("2048x32KiB", 32 * KIB, 2048)
PATTERNS: Final[Sequence[Pattern]] = (LARGE, MEDIUM, BLOCKS, SMALL_BLOCKS)


def buffer(nbytes: int, seed: int) -> SharedBuffer:
    """Memory with every page touched, so that no measurement pays for its first use."""
    made = SharedBuffer.create(nbytes, name=f"bench-{seed}", budget=NO_RESERVE)
    made.data[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return made


def config(transport: TransportName, folder: Path, host: str = "127.0.0.1") -> TransportConfig:
    """Defaults but for the addresses."""
    return TransportConfig(
        transport=transport,
        socket_folder=folder / "sockets" if transport in ("shm", "auto") else None,
        tcp_host=host if transport in ("tcp", "ucx", "auto") else None,
    )
