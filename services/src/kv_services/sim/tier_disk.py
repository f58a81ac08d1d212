"""The disk tier of a simulated node: the production `DiskStore` over real files, whose faults are made in those files.

What it is told to do, it does at one instant; how long that takes is for the loop's executors (sim.loop). What a life
does after its crash never happened, and its files are let go at once, for the next life to open.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_prefix.tiers.errors import TierFullError, TierIOError
from kv_prefix.tiers.store import Cells
from kv_services.sim.disk import Mount, SimDisk


class SimTierStore:
    """A `kv_prefix.tiers.store.TierStore` that one life of a node has open."""

    def __init__(self, disk: SimDisk, mount: Mount, store: DiskStore, block_nbytes: int) -> None:
        self._disk = disk
        self._mount = mount
        self._store = store
        self._block_nbytes = block_nbytes
        self._where = str(disk.tier_folder)
        mount.on_crash(store.close)

    @classmethod
    def open(
        cls, disk: SimDisk, mount: Mount, folder: Path, shape: DiskShape, size_bytes: int
    ) -> tuple["SimTierStore", list[PlacedBlock]]:
        """As `DiskStore.open`; a short read of the manifest finds the rest of its records gone.

        Raises:
            TierError: as `DiskStore.open`.
        """
        manifest = folder / "manifest"
        if disk.takes_short_block_read() and manifest.exists():
            os.truncate(manifest, disk.random.randrange(1 + manifest.stat().st_size))
        store, held = DiskStore.open(folder, shape, size_bytes)
        return cls(disk, mount, store, shape.block_nbytes), held

    @property
    def num_places(self) -> int:
        return self._store.num_places

    def write(self, items: Sequence[tuple[PlacedBlock, Cells]], forget: Sequence[int] = ()) -> None:
        self._refuse_the_dead()
        if self._disk.full:
            # There may be room for the record of what is forgotten, and for half a block, and no more.
            if self._disk.random.random() < 0.5:
                self._store.forget(forget)
                self._write_half(items)
            raise self._no_room()
        self._store.write(items, forget)
        self._disk.counts["stored"] += len(items)

    def forget(self, places: Sequence[int]) -> None:
        self._refuse_the_dead()
        if self._disk.full:
            raise self._no_room()
        self._store.forget(places)

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        if self._mount.crashed:
            return [False] * len(items)
        sound = self._read_short(items) if self._disk.takes_short_block_read() else self._store.read(items)
        self._disk.counts["loaded"] += sum(sound)
        self._disk.counts["spoiled"] += len(sound) - sum(sound)
        return sound

    def clear(self) -> None:
        self._refuse_the_dead()
        self._store.clear()

    def used_bytes(self) -> int:
        return 0 if self._mount.crashed else self._store.used_bytes()

    def close(self) -> None:
        self._store.close()

    def _refuse_the_dead(self) -> None:
        if self._mount.crashed:
            raise TierIOError(where=self._where, reason="this life is over")

    def _no_room(self) -> TierFullError:
        return TierFullError(where=self._where, reason="No space left on device")

    def _write_half(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> None:
        item, cells = items[0]
        with _opened(self._disk.tier_folder / "blocks") as fd:
            os.pwrite(fd, bytes(cells[0])[: len(cells[0]) // 2], item.place * self._block_nbytes)

    def _read_short(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        """Read while the file ends somewhere before its end."""
        with _opened(self._disk.tier_folder / "blocks") as fd:
            size = os.fstat(fd).st_size
            end = self._disk.random.randrange(1 + size)
            rest = os.pread(fd, size - end, end)
            os.ftruncate(fd, end)
            sound = self._store.read(items)
            os.pwrite(fd, rest, end)
        return sound


class _opened:
    """A file's descriptor for a while."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
