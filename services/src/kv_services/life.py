"""What one process keeps on disk between its lives: its incarnation and the bound of its clock.

A life file is written to a temporary name, synced and renamed, so that it is whole at any instant, and carries its own
checksum: a bound that a flipped bit made lower would let stamps go back. Losing it costs a higher jump of the
incarnation, which then starts from the wall clock, and where that was set back meanwhile the order of the former life's
stamps and the first ones of the next.
"""

import os
import threading
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

    def read(self, path: Path, nbytes_max: int) -> bytes:
        """At most that much of the file's content."""
        ...

    def replace(self, path: Path, data: bytes) -> None:
        """Make `data` the file's content, durably; on an error the former content stays."""
        ...


class SystemDisk:
    """The machine's file system."""

    __slots__ = ()

    def read(self, path: Path, nbytes_max: int) -> bytes:
        with path.open("rb") as stream:
            return stream.read(nbytes_max)

    def replace(self, path: Path, data: bytes) -> None:
        new = path.with_suffix(".new")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    """One process's life file; `begin` first."""

    def __init__(self, folder: Path, node_id: str, disk: LifeDisk | None = None) -> None:
        self._path = folder / f"{node_id}.life.json"
        self._disk: LifeDisk = disk or SystemDisk()
        self._lock = threading.Lock()
        self.life = Life()

    def begin(self, clock: Clock) -> Life:
        """Start a life: an incarnation above every one before, on disk before it is used.

        Raises:
            LifeFileError: it is damaged, or cannot be written.
        """
        before = self._read()
        # Seconds of the epoch: above what peers saw even if the folder was lost.
        incarnation = max(before.incarnation + 1, clock.wall_ns() // 1_000_000_000)
        self._write(Life(Incarnation(incarnation), before.clock_bound_ns))
        return self.life

    def keep_clock_bound(self, bound_ns: int) -> None:
        """Put the bound on disk; a lower one changes nothing. Thread-safe."""
        with self._lock:
            if bound_ns > self.life.clock_bound_ns:
                self._write(Life(self.life.incarnation, bound_ns))

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
        self.life = life


def _check(life: Life) -> int:
    return crc64(msgspec.json.encode(life))
