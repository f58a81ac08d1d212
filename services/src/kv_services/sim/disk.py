"""The disk of one simulated node: what is on it outlives a crash; it can be full, read short, and lose bits.

Small files are kept in memory, whole. The disk tier's are real ones, in a folder of the run's own (`sim.tier_disk`).
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

IO_MEAN_S: Final = 0.0005


class SimDisk:
    """See the module.

    Args:
        tier_folder: where the node's disk tier is.

    Attributes:
        full: nothing more can be written; what is there stays.
        slowness: by how much its calls take longer.
        short_reads, short_block_reads: as many of the next reads of whole files, or of the tier's, stop half-way.
        counts: blocks that the tier took, gave back whole, and found damaged.
    """

    def __init__(self, rng: Random, tier_folder: Path) -> None:
        self.random = rng
        self.tier_folder = tier_folder
        self._files: dict[Path, bytes] = {}
        self.full = False
        self.short_reads = self.short_block_reads = 0
        self.slowness = 1.0
        self.counts = {"stored": 0, "loaded": 0, "spoiled": 0}

    def mount(self) -> "Mount":
        """The disk as one life of the node sees it."""
        return Mount(self)

    def read(self, path: Path) -> bytes:
        """The content, or what a short read gives of it."""
        data = self._files.get(path)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        if self.short_reads:
            self.short_reads -= 1
            return data[: self.random.randrange(len(data))]
        return data

    def takes_short_block_read(self) -> bool:
        """Whether this read of the tier is one that stops half-way."""
        if not self.short_block_reads:
            return False
        self.short_block_reads -= 1
        return True

    def write(self, path: Path, data: bytes) -> None:
        """Replace the content, as a rename does: all of it or nothing."""
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._files[path] = data

    def flip_bits(self) -> None:
        """Damage one whole file in one bit, or the tier's blocks in some."""
        blocks, manifest = self.tier_folder / "blocks", self.tier_folder / "manifest"
        if self.random.random() < 0.5 and blocks.exists():
            for _ in range(self.random.randint(1, 8)):
                self._flip_where_it_lies(blocks)
            return
        whole = [*sorted(self._files), *([manifest] if manifest.exists() else [])]
        if whole:
            path = self.random.choice(whole)
            if path in self._files:
                self._files[path] = self._flipped(self._files[path])
            else:
                self._flip_where_it_lies(path)

    def _flip_where_it_lies(self, path: Path) -> None:
        # Whoever has the file open sees it.
        with path.open("r+b") as file:
            data = self._flipped(file.read())
            file.seek(0)
            file.write(data)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        if changed:
            bit = self.random.randrange(8 * len(changed))
            changed[bit // 8] ^= 1 << (bit % 8)
        return bytes(changed)

    def lose_power(self) -> None:
        """Now and then a node goes down with its machine: the end of what the tier wrote last may be gone."""
        for name in ("manifest", "blocks"):
            path = self.tier_folder / name
            if self.random.random() < 0.25 and path.exists():
                size = path.stat().st_size
                os.truncate(path, size - self.random.randrange(1 + size // 4))

    def io_takes_s(self) -> float:
        """How long the next call takes."""
        return self.random.expovariate(1 / IO_MEAN_S) * self.slowness

    def remove_all(self) -> None:
        """An operator removes what is damaged, and the tier with the purges that it followed."""
        self._files.clear()
        shutil.rmtree(self.tier_folder, ignore_errors=True)


class Mount:
    """A `kv_services.life.LifeDisk` for one life: what its code still does after its crash never happened."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._ends: list[Callable[[], None]] = []
        self.crashed = False

    def on_crash(self, end: Callable[[], None]) -> None:
        """Call `end` when the life ends without a word."""
        self._ends.append(end)

    def crash(self) -> None:
        """The life is over."""
        self.crashed = True
        for end in self._ends:
            end()

    def hold(self, path: Path) -> None:
        """A simulated node has one process at a time."""

    def read(self, path: Path, nbytes_max: int) -> bytes:
        return self._disk.read(path)[:nbytes_max]

    def replace(self, path: Path, data: bytes) -> None:
        if not self.crashed:
            self._disk.write(path, data)
