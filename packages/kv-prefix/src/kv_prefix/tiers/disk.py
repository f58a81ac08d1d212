"""The disk tier's IO: blocks in one file of equal places, and a manifest that says which block lies where.

Blocking; its owner calls it off the event loop, writes from one thread, reads from any. Everything is under one folder:

    lock        held (flock) while a process uses the folder
    manifest    a journal, see `manifest`; made anew beside it and renamed when it has grown to twice its need
    blocks      place i at i * block_nbytes, layers one after the other

K1: a block is acknowledged when its bytes and then its record were written. What was acknowledged survives the death of
    the process at any instant. After a loss of power it may be gone, never wrong.
K2: a place's old record is revoked before its bytes are overwritten.
K3: bytes that are not those that were sealed (CRC-64 of each layer), or are not all there, are absent.
K4: blocks, manifest and its successor together never exceed `size_bytes`.
K5: a full disk keeps no folder from opening: the manifest that is there is used as it is, up to its last sound record,
    and made anew when there is room.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_core.namespace import HASH_SCHEME
from kv_prefix.tiers import manifest
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.cell_io import cells_of, make_cell_reader, move_rest
from kv_prefix.tiers.errors import TierConfigError, TierFullError, TierInUseError, TierIOError
from kv_prefix.tiers.store import Cells

WRITE_PIECE_BYTES: Final = 1 << 20
"""Bytes of one call."""
READ_CELLS: Final = 4096
"""Layers that one call reads: a bound on the buffers that are held meanwhile."""
RECORD_RESERVE: Final = 3
"""Records that room is kept for per block: the manifest grows to twice its need and is then copied."""
SPARE_RECORDS: Final = 64
"""Records by which a manifest may exceed twice its need, so that a nearly empty one is not copied at each write."""

_Item = tuple[PlacedBlock, Cells]

_log = logging.getLogger(__name__)

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class DiskShape:
    """What a folder's blocks look like; a folder of another shape begins anew.

    Args:
        layer_nbytes: bytes of one layer of one block.
        num_layers: layers of one block.
        block_size: tokens of one block.
        name: what else must agree (dtype, heads, planes), as text.
    """

    layer_nbytes: int
    num_layers: int
    block_size: int
    name: str

    @property
    def block_nbytes(self) -> int:
        return self.layer_nbytes * self.num_layers

    @property
    def record_nbytes(self) -> int:
        """About what one record takes: names, digests, tokens and checks."""
        return 256 + 4 * self.block_size + 8 * self.num_layers


class DiskStore:
    """One folder, open. `open` makes it; end it with `close`."""

    def __init__(self, folder: Path, shape: DiskShape, num_places: int, lock: int) -> None:
        self._folder = folder
        self._shape = shape
        self._lock = lock
        self._num_places = num_places
        self._reader = make_cell_reader(shape.layer_nbytes)
        self._read_blocks = max(1, READ_CELLS // shape.num_layers)
        self.discarded = 0
        """Manifest bytes that were not whole and sound, or files of another shape, at opening."""
        self._live: dict[int, bytes] = {}
        self._num_records = 0
        self._compact_after = 0
        """Records before the manifest is made anew again, after there was no room for that."""
        self._blocks = self._manifest = -1
        self._manifest_end = 0

    @classmethod
    def open(cls, folder: Path, shape: DiskShape, size_bytes: int) -> tuple["DiskStore", list[PlacedBlock]]:
        """Open or make a folder; returns what it holds, oldest first.

        Raises:
            TierInUseError: another process has it.
            TierConfigError: `size_bytes` holds no block, or the folder cannot be used.
        """
        spare = SPARE_RECORDS * shape.record_nbytes
        num_places = max(0, size_bytes - spare) // (shape.block_nbytes + RECORD_RESERVE * shape.record_nbytes)
        if num_places < 1:
            raise TierConfigError(where=str(folder), reason=f"{size_bytes} bytes hold no block of {shape.block_nbytes}")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierConfigError(where=str(folder), reason=error.strerror or str(error)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise TierInUseError(where=str(folder)) from None
        store = cls(folder, shape, num_places, lock)
        try:
            return store, store._recover()
        except OSError as error:
            store.close()
            raise TierConfigError(where=str(folder), reason=error.strerror or str(error)) from error

    @property
    def num_places(self) -> int:
        return self._num_places

    def write(self, items: Sequence[tuple[PlacedBlock, Cells]], forget: Sequence[int] = ()) -> None:
        """Revoke `forget`, write blocks, then their records; returns when they are acknowledged.

        Raises:
            TierFullError, TierIOError: none of them is stored; what was revoked stays revoked.
        """
        self.forget(forget)
        try:
            for offset, run in self._runs(items):
                for at, buffers in self._pieces(run):
                    _write_all(self._blocks, buffers, offset + at * self._shape.layer_nbytes)
        except OSError as error:
            raise self._translate("blocks", error) from error
        records = [(item.place, manifest.frame(manifest.Stored(item.place, item.block))) for item, _ in items]
        self._append(b"".join(record for _, record in records), len(records))
        self._live.update(records)
        self._compact_if_due()

    def forget(self, places: Sequence[int]) -> None:
        """Revoke the records of places, so that no restart finds them.

        Raises:
            TierFullError, TierIOError: they stand.
        """
        known = tuple(place for place in places if place in self._live)
        if known:
            self._append(manifest.frame(manifest.Forgotten(known)), 1)
            for place in known:
                del self._live[place]

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        """Read blocks into their buffers; per block, whether all its bytes are there and are what was sealed."""
        sound: dict[int, bool] = {}
        num_layers = self._shape.num_layers
        runs = list(self._runs(items))
        for offset, run in runs:
            self._read_ahead(offset, len(run) * self._shape.block_nbytes)
        for offset, run in runs:
            # A bound on the buffers that one call holds.
            for at in range(0, len(run), self._read_blocks):
                part = run[at : at + self._read_blocks]
                checks = b"".join([item.block.checks for item, _ in part])
                cells = [cell for _, cells in part for cell in cells]
                found = self._reader.read(self._blocks, offset, cells, checks)
                for i, (item, _) in enumerate(part):
                    sound[item.place] = 0 not in found[i * num_layers : (i + 1) * num_layers]
                offset += len(part) * self._shape.block_nbytes
        return [sound[item.place] for item, _ in items]

    def clear(self) -> None:
        """Forget everything and give the disk its room back.

        Raises:
            TierIOError: the folder cannot be written.
        """
        self._live.clear()
        try:
            # A manifest that is cut needs no room; a new one might not get any.
            os.ftruncate(self._manifest, 0)
            self._manifest_end = self._num_records = self._compact_after = 0
            os.ftruncate(self._blocks, 0)
        except OSError as error:
            raise self._translate("folder", error) from error

    def used_bytes(self) -> int:
        """Bytes that the disk really gives to blocks and manifest."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in (self._blocks, self._manifest))

    def close(self) -> None:
        """Give the folder up. Idempotent."""
        for fd in (self._blocks, self._manifest, self._lock):
            if fd >= 0:
                os.close(fd)
        self._blocks = self._manifest = self._lock = -1

    def _recover(self) -> list[PlacedBlock]:
        path = self._folder / "manifest"
        raw = path.read_bytes() if path.exists() else b""
        (self._folder / "manifest.new").unlink(missing_ok=True)
        records = manifest.read_frames(raw)
        first, end = next(records, (None, 0))
        placed: dict[int, PlacedBlock] = {}
        num_records = 0
        if first == self._header():
            for record, position in records:
                end = position
                num_records += 1
                match record:
                    case manifest.Stored(place, block):
                        # Pop first: the order of a dict is then the order of writing.
                        placed.pop(place, None)
                        placed[place] = PlacedBlock(place, block)
                    case manifest.Forgotten(places):
                        for place in places:
                            placed.pop(place, None)
                    case manifest.Header():
                        break
        else:
            end = 0
        self.discarded = len(raw) - end
        checks_nbytes = 8 * self._shape.num_layers
        kept = [
            item
            for item in placed.values()
            if item.place < self._num_places and len(item.block.checks) == checks_nbytes
        ]
        self._live = {item.place: manifest.frame(manifest.Stored(item.place, item.block)) for item in kept}
        self._blocks = os.open(self._folder / "blocks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # The limit may be lower than it was: what lies beyond it goes.
        limit = self._num_places * self._shape.block_nbytes if kept else 0
        if os.fstat(self._blocks).st_size > limit:
            os.ftruncate(self._blocks, limit)
        try:
            self._rewrite()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._go_on_with(end, num_records)
            _log.warning("manifest used as it is folder=%s blocks=%d cause=%s", self._folder, len(kept), error.strerror)
        return kept

    def _go_on_with(self, end: int, num_records: int) -> None:
        """Use the manifest that is there up to `end`; what lies behind goes, lest it follow a later record."""
        fd = os.open(self._folder / "manifest", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, end)
        except OSError:
            os.close(fd)
            raise
        self._manifest, self._manifest_end, self._num_records = fd, end, num_records

    def _header(self) -> manifest.Header:
        shape = self._shape
        name = f"{shape.name}, {shape.block_size} tokens"
        return manifest.Header(manifest.VERSION, HASH_SCHEME, shape.block_nbytes, shape.num_layers, name)

    def _rewrite(self) -> None:
        """Begin the manifest anew with what is live: written beside the old one, then renamed over it."""
        path = self._folder / "manifest.new"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            frames = b"".join((manifest.frame(self._header()), *self._live.values()))
            _write_all(fd, [memoryview(frames)], 0)
            os.fdatasync(fd)
            os.rename(path, self._folder / "manifest")
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        if self._manifest >= 0:
            os.close(self._manifest)
        self._manifest, self._manifest_end, self._num_records = fd, len(frames), len(self._live)
        self._compact_after = 0

    def _append(self, frames: bytes, num_records: int) -> None:
        if not self._manifest_end:
            frames = manifest.frame(self._header()) + frames
        try:
            _write_all(self._manifest, [memoryview(frames)], self._manifest_end)
        except OSError as error:
            # Half a frame may lie there now: the next one is written over it.
            raise self._translate("manifest", error) from error
        self._manifest_end += len(frames)
        self._num_records += num_records

    def _compact_if_due(self) -> None:
        if self._num_records > max(2 * len(self._live) + SPARE_RECORDS, self._compact_after):
            try:
                self._rewrite()
            except OSError as error:
                if error.errno not in _FULL:
                    raise self._translate("manifest", error) from error
                # What was written is acknowledged by the manifest that is there: it is tried again some records later.
                self._compact_after = self._num_records + SPARE_RECORDS

    def _runs(self, items: Sequence[_Item]) -> Iterator[tuple[int, list[_Item]]]:
        """Blocks whose places follow one another, in order of place, each run with where it begins in the file."""
        run: list[_Item] = []
        for item in sorted(items, key=_place_of):
            if run and item[0].place != run[-1][0].place + 1:
                yield run[0][0].place * self._shape.block_nbytes, run
                run = []
            run.append(item)
        if run:
            yield run[0][0].place * self._shape.block_nbytes, run

    def _pieces(self, run: Sequence[_Item]) -> Iterator[tuple[int, list[memoryview]]]:
        """The layers of a run, cut into calls; each with the number of its first layer, counted over the run."""
        most = cells_of(WRITE_PIECE_BYTES, self._shape.layer_nbytes)
        layers = [cell for _, cells in run for cell in cells]
        for at in range(0, len(layers), most):
            yield at, layers[at : at + most]

    def _read_ahead(self, offset: int, nbytes: int) -> None:
        """Have the device begin with all of a run that is not in memory, while its beginning is copied and checked."""
        try:
            os.preadv(self._blocks, [bytearray(1)], offset + nbytes - 1, os.RWF_NOWAIT)
        except BlockingIOError:
            os.posix_fadvise(self._blocks, offset, nbytes, os.POSIX_FADV_WILLNEED)
        except OSError:
            # A file system that cannot say: the kernel reads ahead by itself where it sees a sequence.
            return

    def _translate(self, what: str, error: OSError) -> TierFullError | TierIOError:
        where = str(self._folder / what)
        kind = TierFullError if error.errno in _FULL else TierIOError
        return kind(where=where, reason=error.strerror or str(error))


def _place_of(item: _Item) -> int:
    return item[0].place


def _write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    nbytes = sum([buffer.nbytes for buffer in buffers])
    moved = os.pwritev(fd, buffers, offset)
    if moved < nbytes:
        move_rest(os.pwritev, fd, buffers, offset, moved)
