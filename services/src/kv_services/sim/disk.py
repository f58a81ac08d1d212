"""The disk of one simulated node: what is on it outlives a crash; it can be full, read short, and lose bits."""

import errno
from pathlib import Path
from random import Random


class SimDisk:
    """Whole files by name.

    Attributes:
        full: nothing more can be written; what is there stays.
        short_reads: as many of the next reads stop half-way.
    """

    def __init__(self, rng: Random) -> None:
        self._random = rng
        self._files: dict[Path, bytes] = {}
        self.full = False
        self.short_reads = 0

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
            return data[: self._random.randrange(len(data))]
        return data

    def write(self, path: Path, data: bytes) -> None:
        """Replace the content, as a rename does: all of it or nothing."""
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._files[path] = data

    def flip_bit(self) -> None:
        """Damage one file."""
        if self._files:
            path = self._random.choice(sorted(self._files))
            data = bytearray(self._files[path])
            bit = self._random.randrange(8 * len(data))
            data[bit // 8] ^= 1 << (bit % 8)
            self._files[path] = bytes(data)

    def remove_all(self) -> None:
        """An operator removes what is damaged."""
        self._files.clear()


class Mount:
    """A `kv_services.life.LifeDisk` for one life: what its code still does after its crash never happened."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.crashed = False

    def crash(self) -> None:
        """The life is over."""
        self.crashed = True

    def read(self, path: Path, nbytes_max: int) -> bytes:
        return self._disk.read(path)[:nbytes_max]

    def replace(self, path: Path, data: bytes) -> None:
        if not self.crashed:
            self._disk.write(path, data)
