"""The remote tier's IO: blocks as objects in S3, GCS, Azure or a shared folder, through `obstore` (extra `remote`).

Blocking; its owner calls it off the event loop. Everything of one node lies under one prefix of its own:

    alive        written again and again while the node lives: its age says since when it does not
    header       what the blocks look like
    PLACE.kv     a block's bytes, layers one after the other
    PLACE.meta   its record; a block exists when this does

What a node left behind when it went, another can read under places of its own (`records_of`, `bind`). It deletes none
of it as long as the node may come back: only what lies under a prefix whose `alive` is older than `abandoned_after_s`.
Two nodes that do the same at once, or one that comes back meanwhile, find objects gone or replaced: absent, by K3.

The guarantees are the disk tier's (`disk` K1-K4): bytes before their record, the old record revoked before its bytes
are replaced, every byte checked when it is read, never more than `size_bytes`. Credentials come from the environment,
as each cloud's own tools take them (AWS_*, GOOGLE_*, AZURE_*), from a profile of Amazon's (`aws_profile`), or from the
machine's identity.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from kv_core.checksum import crc64
from kv_core.errors import MissingExtraError
from kv_core.namespace import HASH_SCHEME
from kv_prefix.tiers import manifest
from kv_prefix.tiers.aws_profile import ProfileKeys, find_profile
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
ABANDONED_AFTER_S: Final = 600.0
ALIVE: Final = "alive"
HEADER: Final = "header"

_REGIONS: Final = frozenset({"AWS_REGION", "AWS_DEFAULT_REGION"})
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another node's prefix in the same store.

    Attributes:
        folder: the node's id.
        abandoned: it was silent for so long, and we were there to see it, that what it left is others' to delete.
    """

    folder: str
    abandoned: bool


class RemoteStore:
    """One node's prefix in one object store. `open` makes it; end it with `close`."""

    def __init__(
        self, store: Any, where: str, folder: str, shape: DiskShape, num_places: int, abandoned_after_s: float
    ) -> None:
        # The library ships no types for its stores' common surface.
        self._store = store
        self._where = where
        self._folder = folder
        self._shape = shape
        self._num_places = num_places
        self._abandoned_after_s = abandoned_after_s
        self._live: set[int] = set()
        self._bound: dict[int, tuple[str, int]] = {}
        self._abandoned: set[str] = set()
        self._since: datetime | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="remote")

    @classmethod
    def open(
        cls,
        url: str,
        folder: str,
        shape: DiskShape,
        size_bytes: int,
        endpoint: str = "",
        abandoned_after_s: float = ABANDONED_AFTER_S,
    ) -> tuple["RemoteStore", list[PlacedBlock]]:
        """Open or begin a prefix; returns what it holds.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://account/container/prefix`, or `file:///folder`.
            folder: this node's part of it.
            endpoint: of an S3-compatible store that is not Amazon's.
            abandoned_after_s: how long another node must have been silent before what it left may be deleted.

        Raises:
            MissingExtraError: obstore is not installed.
            TierConfigError: `url` names no store, or `size_bytes` holds no block.
            AwsProfileError: the profile that the environment means cannot be used.
            TierIOError: the store does not answer, or refuses.
        """
        num_places = size_bytes // (shape.block_nbytes + shape.record_nbytes)
        if num_places < 1:
            raise TierConfigError(where=url, reason=f"{size_bytes} bytes hold no block of {shape.block_nbytes}")
        remote = cls(_connect(url.rstrip("/"), endpoint), url, folder, shape, num_places, abandoned_after_s)
        try:
            remote.say_alive()
            remote._since = remote._age_mark(folder)
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
        self.forget([*forget, *places])
        self._each(items, lambda it: self._put(self._own(it[0].place, "kv"), b"".join(it[1])))
        self._each(items, lambda it: self._put(self._own(it[0].place, "meta"), _record(it[0])))
        with self._lock:
            self._live |= places

    def forget(self, places: Sequence[int]) -> None:
        """As `TierStore.forget`. Another node's object goes too if that node is not expected back."""
        known = [place for place in dict.fromkeys(places) if place in self._live]
        with self._lock:
            bound = [found for place in dict.fromkeys(places) if (found := self._bound.pop(place, None))]
            lost = [(folder, place) for folder, place in bound if folder in self._abandoned]
        self._each(known, lambda place: self._delete(self._own(place, "meta")))
        with self._lock:
            self._live.difference_update(known)
        # What is not deleted now is found, and looked at, when its prefix is read the next time.
        with contextlib.suppress(TierIOError):
            self._each(lost, lambda it: self._discard_one(*it))

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        """As `TierStore.read`."""
        return list(self._pool.map(self._read_one, items))

    def clear(self) -> None:
        """As `TierStore.clear`: every object of this node's prefix goes."""
        with self._lock:
            self._bound.clear()
        names = [name for name in self._list(self._folder) if name not in (HEADER, ALIVE)]
        self._each(sorted(names, key=lambda name: not name.endswith(".meta")), self._delete_own)
        with self._lock:
            self._live.clear()

    def used_bytes(self) -> int:
        """Bytes of the blocks that exist, those that were taken over included."""
        return (len(self._live) + len(self._bound)) * self._shape.block_nbytes

    def say_alive(self) -> None:
        """Tell the others that this prefix is in use.

        Raises:
            TierIOError: the store does not answer.
        """
        self._put(f"{self._folder}/{ALIVE}", b"alive")

    def siblings(self) -> list[Sibling]:
        """The other nodes' prefixes of blocks that look like ours.

        Raises:
            TierIOError: the store does not answer.
        """
        now = self._age_mark(self._folder)
        found = []
        for folder in self._folders():
            if folder != self._folder and self._get(f"{folder}/{HEADER}") == self._header():
                # A cluster that was down comes back one node after the other: who was not looked for in vain for so
                # long is not given up, whatever the age of what it left.
                seen = [mark for mark in (self._age_mark(folder), self._since) if mark is not None]
                silent_s = (now - max(seen)).total_seconds() if now and seen else 0.0
                found.append(Sibling(folder, silent_s > self._abandoned_after_s))
        with self._lock:
            self._abandoned = {sibling.folder for sibling in found if sibling.abandoned}
        return found

    def records_of(self, folder: str) -> list[PlacedBlock]:
        """What lies under another node's prefix, by its places there.

        Raises:
            TierIOError: the store does not answer.
        """
        return [item for item in self._records(folder).values() if isinstance(item, PlacedBlock)]

    def bind(self, folder: str, places: Iterable[tuple[int, int]]) -> None:
        """Read another node's objects as our places: (ours, theirs). Ours are free ones."""
        with self._lock:
            self._bound.update((ours, (folder, theirs)) for ours, theirs in places)

    def release(self, folder: str) -> None:
        """Have nothing more to do with another node's objects: it is back. They stay."""
        with self._lock:
            self._abandoned.discard(folder)
            self._bound = {ours: found for ours, found in self._bound.items() if found[0] != folder}

    def discard(self, folder: str, places: Sequence[int]) -> None:
        """Delete objects of a node that is not expected back; of one that is, none.

        Raises:
            TierIOError: some may be left.
        """
        if folder in self._abandoned:
            self._each(places, lambda place: self._discard_one(folder, place))
            if not any(name.endswith((".kv", ".meta")) for name in self._list(folder)):
                self._each((HEADER, ALIVE), lambda name: self._delete(f"{folder}/{name}"))

    def close(self) -> None:
        """Give it up. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _recover(self) -> list[PlacedBlock]:
        names = self._list(self._folder) - {ALIVE}
        found = self._get(f"{self._folder}/{HEADER}") if HEADER in names else None
        if found != self._header():
            if names:
                self.clear()
            self._put(f"{self._folder}/{HEADER}", self._header())
            return []
        found_there = self._records(self._folder, names)
        placed = [item for item in found_there.values() if isinstance(item, PlacedBlock)]
        self._live = {item.place for item in placed}
        # Bytes without a record: their process ended before it acknowledged them, or the limit was lowered.
        kept = {name.partition(".")[0] for name, item in found_there.items() if item is not None}
        self._each([name for name in names if name != HEADER and name.partition(".")[0] not in kept], self._delete_own)
        return placed

    def _header(self) -> bytes:
        shape = self._shape
        name = f"{shape.name}, {shape.block_size} tokens"
        header = manifest.Header(manifest.VERSION, HASH_SCHEME, shape.block_nbytes, shape.num_layers, name)
        return manifest.frame(header)

    def _records(self, folder: str, names: Iterable[str] | None = None) -> dict[str, PlacedBlock | TierIOError | None]:
        """What each record under a prefix says, as `_record_of` tells it."""
        metas = sorted(name for name in (self._list(folder) if names is None else names) if name.endswith(".meta"))
        return dict(zip(metas, self._each(metas, lambda name: self._record_of(folder, name)), strict=True))

    def _record_of(self, folder: str, name: str) -> PlacedBlock | TierIOError | None:
        """The block of a record; None when it is no record, an error when it cannot be read just now."""
        try:
            raw = self._get(f"{folder}/{name}")
        except TierIOError as error:
            return error
        record, _ = next(manifest.read_frames(raw or b""), (None, 0))
        if not isinstance(record, manifest.Stored) or f"{record.place:08x}.meta" != name:
            return None
        fits = folder != self._folder or record.place < self._num_places
        sound = fits and len(record.block.checks) == 8 * self._shape.num_layers
        return PlacedBlock(record.place, record.block) if sound else None

    def _own(self, place: int, kind: str) -> str:
        return f"{self._folder}/{place:08x}.{kind}"

    def _read_one(self, item: tuple[PlacedBlock, Cells]) -> bool:
        placed, cells = item
        try:
            folder, place = self._bound.get(placed.place, (self._folder, placed.place))
            data = self._get(f"{folder}/{place:08x}.kv")
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

    def _delete_own(self, name: str) -> None:
        self._delete(f"{self._folder}/{name}")

    def _discard_one(self, folder: str, place: int) -> None:
        # The record first: bytes without one are nobody's.
        self._delete(f"{folder}/{place:08x}.meta")
        self._delete(f"{folder}/{place:08x}.kv")

    def _age_mark(self, folder: str) -> datetime | None:
        """When a node last said that it lives, by the store's clock; None when it never did."""
        try:
            last: datetime = self._call(lambda obstore: obstore.head(self._store, f"{folder}/{ALIVE}"))["last_modified"]
        except FileNotFoundError:
            return None
        return last

    def _folders(self) -> list[str]:
        def listed(obstore: Any) -> list[str]:
            prefixes = obstore.list_with_delimiter(self._store)["common_prefixes"]
            return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes)

        return self._call(listed)

    def _list(self, folder: str) -> set[str]:
        """Names of the objects under a node's prefix."""

        def listed(obstore: Any) -> set[str]:
            names: set[str] = set()
            for batch in obstore.list(self._store, folder):
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
    keys: dict[str, Any] = {}
    if url.startswith("s3://"):
        environ = os.environ  # noqa: TID251 - credentials are where Amazon's tools look, never in a cluster file
        profile = find_profile(environ)
        if profile is not None and profile.keys is not None:
            keys["credential_provider"] = ProfileKeys(environ)
        if profile is not None and profile.region and not (_REGIONS & environ.keys()):
            config["region"] = profile.region
        given = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "")
        endpoint = endpoint or given or (profile.endpoint_url if profile is not None else "")
    if endpoint:
        options["allow_http"] = endpoint.startswith("http://")
        config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    retry = {"max_retries": RETRIES_MAX, "retry_timeout": REQUEST_TIMEOUT}
    try:
        if url.startswith("file://"):
            return obstore.store.LocalStore(url.removeprefix("file://"), mkdir=True)
        return obstore.store.from_url(url, config=config or None, client_options=options, retry_config=retry, **keys)
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise TierConfigError(where=url, reason=str(error).partition("\n")[0][:400]) from None


def require_usable(url: str) -> None:
    """See at once whether a remote tier can be opened at all, without asking its store.

    Raises:
        MissingExtraError: obstore is not installed.
        AwsProfileError: the profile that the environment means cannot be used.
    """
    _library()
    if url.startswith("s3://"):
        find_profile(os.environ)  # noqa: TID251 - as above


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
