"""What one process keeps on disk between its lives: its incarnation and the bound of its clock.

A life file is written to a temporary name, synced and renamed, so that it is whole at any instant, and carries its own
checksum: a bound that a flipped bit made lower would let stamps go back. Losing it costs a higher jump of the
incarnation, which then starts from the wall clock, and where that was set back meanwhile the order of the former life's
stamps and the first ones of the next.

L1: a file belongs to one process at a time, which holds a lock beside it until it ends.
L2: what a former life of that process still writes, late, changes nothing once the next has begun.
"""

import errno
import fcntl
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from kv_core.checksum import crc64
from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import Incarnation

LIFE_BYTES_MAX: Final = 4096


class LifeFileError(KVError):
    """The life file cannot be read or written."""

    code = 7040
    template = "{path}: {cause}"


class Life(msgspec.Struct, frozen=True):
    """What is kept."""

    incarnation: int = 0
    clock_bound_ns: int = 0


class _Sealed(msgspec.Struct, frozen=True):
    """The file's content: the checksum is the CRC-64 of the life's own JSON."""

    life: Life
    check: int


class LifeDisk(Protocol):
    """Where life files lie; raises `OSError` as the system does."""

    def hold(self, path: Path) -> None:
        """Be the one process that writes this file, from now on; again is once.

        Raises:
            BlockingIOError: another process is.
        """
        ...

    def read(self, path: Path, nbytes_max: int) -> bytes:
        """At most that much of the file's content."""
        ...

    def replace(self, path: Path, data: bytes) -> None:
        """Make `data` the file's content, durably; on an error the former content stays."""
        ...


_REPLACING: Final = threading.Lock()
"""Threads of two lives may replace one file at once, and its temporary name is one."""


class SystemDisk:
    """The machine's file system."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}

    def hold(self, path: Path) -> None:
        if path in self._held:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        self._held[path] = lock

    def release(self) -> None:
        """Hold nothing any more; the end of the process does the same."""
        while self._held:
            os.close(self._held.popitem()[1])

    def read(self, path: Path, nbytes_max: int) -> bytes:
        with path.open("rb") as stream:
            return stream.read(nbytes_max)

    def replace(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _REPLACING:
            self._replace(path, data)

    def _replace(self, path: Path, data: bytes) -> None:
        new = path.with_suffix(".new")
        with new.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
        # A name is durable only with its folder: without this a loss of power may bring the former content back.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class LifeFile:
    """The file of one process, for all of its lives."""

    def __init__(self, folder: Path, node_id: str, disk: LifeDisk | None = None) -> None:
        self._path = folder / f"{node_id}.life.json"
        self._disk: LifeDisk = disk or SystemDisk()
        self._lock = threading.Lock()
        self._now = Life()

    def begin(self, clock: Clock) -> "OneLife":
        """Start a life: an incarnation above every one before, on disk before it is used.

        Raises:
            LifeFileError: it is damaged, cannot be written, or another process lives by it.
        """
        with self._lock:
            try:
                self._disk.hold(self._path)
            except OSError as error:
                taken = error.errno == errno.EWOULDBLOCK
                cause = "another process runs this node" if taken else error.strerror or str(error)
                raise LifeFileError(path=str(self._path), cause=cause) from error
            before = self._read()
            # Seconds of the epoch: above what peers saw even if the folder was lost.
            incarnation = max(before.incarnation + 1, clock.wall_ns() // 1_000_000_000)
            self._write(Life(Incarnation(incarnation), before.clock_bound_ns))
            return OneLife(self, self._now)

    def keep_clock_bound(self, incarnation: int, bound_ns: int) -> None:
        """Put that life's bound on disk; a lower one, or one of a life that another has followed, changes nothing.
        Thread-safe.

        Raises:
            LifeFileError: it cannot be written.
        """
        with self._lock:
            if incarnation == self._now.incarnation and bound_ns > self._now.clock_bound_ns:
                self._write(Life(incarnation, bound_ns))

    def _read(self) -> Life:
        try:
            sealed = msgspec.json.decode(self._disk.read(self._path, LIFE_BYTES_MAX), type=_Sealed)
        except FileNotFoundError:
            return Life()
        except OSError as error:
            raise LifeFileError(path=str(self._path), cause=error.strerror or str(error)) from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LifeFileError(path=str(self._path), cause=f"damaged ({error}); remove it") from error
        if sealed.check != _check(sealed.life):
            raise LifeFileError(path=str(self._path), cause="damaged (its checksum differs); remove it")
        return sealed.life

    def _write(self, life: Life) -> None:
        try:
            self._disk.replace(self._path, msgspec.json.encode(_Sealed(life, _check(life))))
        except OSError as error:
            raise LifeFileError(path=str(self._path), cause=error.strerror or str(error)) from error
        self._now = life


@dataclass(frozen=True, slots=True)
class OneLife:
    """One life by a file: what it began with, and where its clock's bound is kept."""

    file: LifeFile
    began: Life

    @property
    def incarnation(self) -> Incarnation:
        """Above that of every life before."""
        return Incarnation(self.began.incarnation)

    @property
    def clock_bound_ns(self) -> int:
        """The bound of the lives before: no stamp of theirs is above."""
        return self.began.clock_bound_ns

    def keep_clock_bound(self, bound_ns: int) -> None:
        """As `LifeFile.keep_clock_bound`, of this life."""
        self.file.keep_clock_bound(self.began.incarnation, bound_ns)


def _check(life: Life) -> int:
    return crc64(msgspec.json.encode(life))
