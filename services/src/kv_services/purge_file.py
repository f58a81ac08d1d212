"""The purges that a node has followed, kept beside blocks that outlive a restart.

Blocks in slower tiers carry how many purges of their namespace they followed. If a whole cluster stops and forgets its
purges, that count would start anew and the next purge would pass such blocks by. So each node with such a tier keeps
what it knows; a replica begins with it and brings it to its peers.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kv_consistency.update import RaiseCount
from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_services.life import SystemDisk

PURGES_BYTES_MAX: Final = 64 << 20

_log = logging.getLogger(__name__)


class PurgeFileError(KVError):
    """The file of purges cannot be read or is not whole: remove it together with the node's tiers."""

    code = 7065
    template = "{path}: {cause}"


class _Sealed(msgspec.Struct, frozen=True):
    rows: tuple[RaiseCount, ...]
    check: int


class PurgeFile:
    """One node's file of purges."""

    def __init__(self, folder: Path, node_id: str) -> None:
        self._path = folder / f"{node_id}.purges"
        self._disk = SystemDisk()

    def load(self) -> tuple[RaiseCount, ...]:
        """What was kept; nothing when there is no file.

        Raises:
            PurgeFileError: there is one that is damaged.
        """
        try:
            raw = self._disk.read(self._path, PURGES_BYTES_MAX)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise PurgeFileError(path=str(self._path), cause=error.strerror or str(error)) from error
        try:
            sealed = msgspec.msgpack.decode(raw, type=_Sealed)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise PurgeFileError(path=str(self._path), cause=str(error)) from None
        if crc64(msgspec.msgpack.encode(sealed.rows)) != sealed.check:
            raise PurgeFileError(path=str(self._path), cause="its checksum is not that of its content")
        return sealed.rows

    def save(self, rows: tuple[RaiseCount, ...]) -> None:
        """Keep these, durably.

        Raises:
            PurgeFileError: the disk does not take them; what was kept before stands.
        """
        sealed = _Sealed(rows, crc64(msgspec.msgpack.encode(rows)))
        try:
            self._disk.replace(self._path, msgspec.msgpack.encode(sealed))
        except OSError as error:
            raise PurgeFileError(path=str(self._path), cause=error.strerror or str(error)) from error


class PurgeKeeper:
    """Keeps a node's file up to date, off the loop. `raises` gives what the replica knows now; the file has that of the
    beginning already, which was read from it."""

    def __init__(self, file: PurgeFile, raises: Callable[[], tuple[RaiseCount, ...]]) -> None:
        self._file = file
        self._raises = raises
        self._kept = raises()
        self._saving: asyncio.Future[None] | None = None

    def tick(self) -> None:
        """Put new purges on disk; a disk that does not take them is asked again the next time."""
        rows = self._raises()
        if rows == self._kept or (self._saving is not None and not self._saving.done()):
            return

        def ended(saving: "asyncio.Future[None]") -> None:
            error = None if saving.cancelled() else saving.exception()
            if error is not None:
                _log.error("purges not kept cause=%s", error)
            elif not saving.cancelled():
                self._kept = rows

        self._saving = asyncio.get_running_loop().run_in_executor(None, self._file.save, rows)
        self._saving.add_done_callback(ended)

    async def close(self) -> None:
        """Wait for what is being written. Idempotent."""
        if self._saving is not None:
            await asyncio.wait([self._saving])
