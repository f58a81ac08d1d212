"""The remote tier's IO: blocks as objects in S3, GCS, Azure or a shared folder, through `obstore` (extra `remote`).

Blocking; its owner calls it off the event loop. Everything of one node lies under one prefix of its own:

    header       what the blocks look like
    PLACE.kv     a block's bytes, layers one after the other
    PLACE.meta   its record; a block exists when this does

The guarantees are the disk tier's (`disk` K1-K4): bytes before their record, the old record revoked before its bytes
are replaced, every byte checked when it is read, never more than `size_bytes`. Credentials come from the environment,
as each cloud's own tools take them (AWS_*, GOOGLE_*, AZURE_*), or from the machine's identity.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, TypeVar

from kv_core.checksum import crc64
from kv_core.errors import MissingExtraError
from kv_core.namespace import HASH_SCHEME
from kv_prefix.tiers import manifest
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.disk import DiskShape
from kv_prefix.tiers.errors import TierConfigError, TierIOError
from kv_prefix.tiers.store import Cells

REQUEST_TIMEOUT: Final = timedelta(seconds=10)
CONNECT_TIMEOUT: Final = timedelta(seconds=3)
RETRIES_MAX: Final = 2
PARALLEL: Final = 8
"""Requests under way at once: an object store answers late and in parallel."""
LISTED_MAX: Final = 1 << 22
"""Objects that are looked at when a prefix is opened."""

T = TypeVar("T")
R = TypeVar("R")


class RemoteStore:
    """One node's prefix in one object store. `open` makes it; end it with `close`."""

    def __init__(self, store: Any, where: str, shape: DiskShape, num_places: int) -> None:
        # The library ships no types for its stores' common surface.
        self._store = store
        self._where = where
        self._shape = shape
        self._num_places = num_places
        self._live: set[int] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="remote")

    @classmethod
    def open(
        cls, url: str, folder: str, shape: DiskShape, size_bytes: int, endpoint: str = ""
    ) -> tuple["RemoteStore", list[PlacedBlock]]:
        """Open or begin a prefix; returns what it holds.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://account/container/prefix`, or `file:///folder`.
            folder: this node's part of it.
            endpoint: of an S3-compatible store that is not Amazon's.

        Raises:
            MissingExtraError: obstore is not installed.
            TierConfigError: `url` names no store, or `size_bytes` holds no block.
            TierIOError: the store does not answer, or refuses.
        """
        num_places = size_bytes // (shape.block_nbytes + shape.record_nbytes)
        if num_places < 1:
            raise TierConfigError(where=url, reason=f"{size_bytes} bytes hold no block of {shape.block_nbytes}")
        remote = cls(_connect(url.rstrip("/") + "/" + folder, endpoint), url, shape, num_places)
        try:
            return remote, remote._recover()
        except BaseException:
            remote.close()
            raise

    @property
    def num_places(self) -> int:
        return self._num_places

    def write(self, items: Sequence[tuple[PlacedBlock, Cells]], forget: Sequence[int] = ()) -> None:
        """As `TierStore.write`; a record that was there for a place is revoked first."""
        places = {item.place for item, _ in items}
        self.forget([*forget, *(place for place in places if place in self._live)])
        self._each(items, lambda it: self._put(f"{it[0].place:08x}.kv", b"".join(it[1])))
        self._each(items, lambda it: self._put(f"{it[0].place:08x}.meta", _record(it[0])))
        with self._lock:
            self._live |= places

    def forget(self, places: Sequence[int]) -> None:
        """As `TierStore.forget`."""
        known = [place for place in dict.fromkeys(places) if place in self._live]
        self._each(known, lambda place: self._delete(f"{place:08x}.meta"))
        with self._lock:
            self._live.difference_update(known)

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        """As `TierStore.read`."""
        return list(self._pool.map(self._read_one, items))

    def clear(self) -> None:
        """As `TierStore.clear`: every object of this node's prefix goes."""
        names = [name for name in self._list() if name != "header"]
        self._each(sorted(names, key=lambda name: not name.endswith(".meta")), self._delete)
        with self._lock:
            self._live.clear()

    def used_bytes(self) -> int:
        """Bytes of the blocks that exist."""
        return len(self._live) * self._shape.block_nbytes

    def close(self) -> None:
        """Give it up. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _recover(self) -> list[PlacedBlock]:
        header = manifest.frame(
            manifest.Header(
                manifest.VERSION,
                HASH_SCHEME,
                self._shape.block_nbytes,
                self._shape.num_layers,
                f"{self._shape.name}, {self._shape.block_size} tokens",
            )
        )
        names = self._list()
        found = self._get("header") if "header" in names else None
        if found != header:
            if names:
                self.clear()
            self._put("header", header)
            return []
        metas = sorted(name for name in names if name.endswith(".meta"))
        found_there = dict(zip(metas, self._each(metas, self._recover_one), strict=True))
        placed = [item for item in found_there.values() if isinstance(item, PlacedBlock)]
        self._live = {item.place for item in placed}
        # Bytes without a record: their process ended before it acknowledged them, or the limit was lowered.
        kept = {name.partition(".")[0] for name, item in found_there.items() if item is not None}
        self._each([name for name in names if name != "header" and name.partition(".")[0] not in kept], self._delete)
        return placed

    def _recover_one(self, name: str) -> PlacedBlock | TierIOError | None:
        """The block of a record; None when it is no record, an error when it cannot be read just now."""
        try:
            raw = self._get(name)
        except TierIOError as error:
            return error
        record, _ = next(manifest.read_frames(raw or b""), (None, 0))
        if not isinstance(record, manifest.Stored) or f"{record.place:08x}.meta" != name:
            return None
        sound = record.place < self._num_places and len(record.block.checks) == 8 * self._shape.num_layers
        return PlacedBlock(record.place, record.block) if sound else None

    def _read_one(self, item: tuple[PlacedBlock, Cells]) -> bool:
        placed, cells = item
        try:
            data = self._get(f"{placed.place:08x}.kv")
        except TierIOError:
            return False
        if data is None or len(data) != self._shape.block_nbytes:
            return False
        view, size = memoryview(data), self._shape.layer_nbytes
        for layer, (cell, check) in enumerate(zip(cells, placed.block.layer_checks(), strict=True)):
            cell[:] = view[layer * size : (layer + 1) * size]
            if crc64(cell) != check:
                return False
        return True

    def _each(self, items: Iterable[T], work: Callable[[T], R]) -> list[R]:
        """Do it for all, several at a time; the first failure is raised when all have ended."""
        futures = [self._pool.submit(work, item) for item in items]
        failed: BaseException | None = None
        results = []
        for future in futures:
            error = future.exception()
            if error is None:
                results.append(future.result())
            failed = failed or error
        if failed is not None:
            raise failed
        return results

    def _put(self, name: str, data: bytes) -> None:
        self._call(lambda obstore: obstore.put(self._store, name, data))

    def _get(self, name: str) -> bytes | None:
        """The whole object; None when there is none."""
        try:
            return self._call(lambda obstore: bytes(obstore.get(self._store, name).bytes()))
        except FileNotFoundError:
            return None

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda obstore: obstore.delete(self._store, name))

    def _list(self) -> set[str]:
        def listed(obstore: Any) -> set[str]:
            names: set[str] = set()
            for batch in obstore.list(self._store):
                names.update(meta["path"].rpartition("/")[2] for meta in batch)
                if len(names) > LISTED_MAX:
                    raise TierIOError(where=self._where, reason=f"more than {LISTED_MAX} objects")
            return names

        return self._call(listed)

    def _call(self, work: Callable[[Any], R]) -> R:
        """One request; the library's errors become ours, but for a missing object."""
        obstore = _library()
        try:
            return work(obstore)
        except FileNotFoundError:
            raise
        except (obstore.exceptions.BaseError, OSError) as error:
            raise TierIOError(where=self._where, reason=str(error).partition("\n")[0][:400]) from None


def _record(item: PlacedBlock) -> bytes:
    return manifest.frame(manifest.Stored(item.place, item.block))


def _connect(url: str, endpoint: str) -> Any:
    obstore = _library()
    options: dict[str, Any] = {"timeout": REQUEST_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT}
    config: dict[str, Any] = {}
    if endpoint:
        options["allow_http"] = endpoint.startswith("http://")
        config = {"endpoint": endpoint, "virtual_hosted_style_request": False}
    retry = {"max_retries": RETRIES_MAX, "retry_timeout": REQUEST_TIMEOUT}
    try:
        if url.startswith("file://"):
            return obstore.store.LocalStore(url.removeprefix("file://"), mkdir=True)
        return obstore.store.from_url(url, config=config or None, client_options=options, retry_config=retry)
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise TierConfigError(where=url, reason=str(error).partition("\n")[0][:400]) from None


def require_library() -> None:
    """See at once whether a remote tier can be opened at all.

    Raises:
        MissingExtraError: obstore is not installed.
    """
    _library()


def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise MissingExtraError(
            feature="the remote tier", module="obstore", package="kv-prefix", extra="remote"
        ) from None
    return obstore
