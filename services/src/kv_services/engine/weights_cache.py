"""Weights unpacked to fp32 once per machine, and the folder they lie in.

One folder per weights file and format: `weights.f32` (all matrices, each at a 64-byte border), `tokenizer.json`,
`index.json` (where is what, and the digests of both), `index.xxh3` (the index's own digest). It is written under a
temporary name and renamed, under a file lock, so that processes that start together unpack once. W1: what was opened
has the digests that were written with it; a folder that does not (half written, another format, a bad disk) is built
again. The lock ends with its holder.
"""

import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kv_core.checksum import xxh3_128
from kv_core.clock import Clock
from kv_services.engine import limits
from kv_services.engine.errors import WeightsCacheError
from kv_services.engine.gguf_file import LlamaShape
from kv_services.engine.interface import FloatArray

FORMAT: Final = 1
_ALIGNMENT: Final = 64
_WEIGHTS, _TOKENIZER, _INDEX, _INDEX_DIGEST = "weights.f32", "tokenizer.json", "index.json", "index.xxh3"


class TextInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of the text metadata is not in `tokenizer.json`.

    Attributes:
        control_ids: special tokens without text.
        literal_ids: special tokens that are text and never cut.
    """

    control_ids: tuple[int, ...]
    literal_ids: tuple[int, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    chat_template: str


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where a matrix lies in `weights.f32`, offset in bytes."""

    offset: int
    shape: tuple[int, ...]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`index.json`."""

    format: int
    revision: str
    model: LlamaShape
    text: TextInfo
    tensors: dict[str, Place]
    weights_nbytes: int
    weights_xxh3: str
    tokenizer_xxh3: str


class Unpacked(msgspec.Struct, frozen=True):
    """An opened folder; `matrices` are read-only views of the mapped file, shared by all processes."""

    index: Index
    tokenizer_json: bytes
    matrices: dict[str, FloatArray]


class UnpackSource(msgspec.Struct, frozen=True):
    """What a folder is built from; called at most once."""

    model: LlamaShape
    text: TextInfo
    tokenizer_json: bytes
    matrices: Iterator[tuple[str, FloatArray]]


def default_cache_root() -> Path:
    """`$XDG_CACHE_HOME` or `~/.cache`, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")  # noqa: TID251 - a per-user folder, not a setting of the cluster
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kv-fabric" / "weights"


def open_or_build(root: Path, revision: str, source: Callable[[], UnpackSource], clock: Clock) -> Unpacked:
    """Open the folder of that weights revision, building it when it is missing or not whole.

    Args:
        root: folder of all unpacked weights.
        revision: digest of the weights file.
        source: reads the weights file; called only when the folder must be built.
        clock: for the deadline on another process's unpacking.

    Raises:
        WeightsCacheError: the folder cannot be made, written or read, or another process held it for too long.
        Whatever `source` raises.
    """
    folder = root / f"{revision}-v{FORMAT}"
    if (found := _open(folder, revision)) is not None:
        return found
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{folder.name}.lock", clock):
            if (found := _open(folder, revision)) is not None:
                return found
            for stale in root.glob(f"{folder.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            work = root / f"{folder.name}.tmp-{os.getpid()}"
            try:
                _build(work, revision, source())
                shutil.rmtree(folder, ignore_errors=True)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise WeightsCacheError(path=str(folder), detail=error.strerror or str(error)) from error
    found = _open(folder, revision)
    if found is None:
        raise WeightsCacheError(path=str(folder), detail="what was just written cannot be read back")
    return found


def _build(work: Path, revision: str, source: UnpackSource) -> None:
    work.mkdir()
    offset, tensors = 0, dict[str, Place]()
    with open(work / _WEIGHTS, "w+b") as file:
        for name, matrix in source.matrices:
            data = np.ascontiguousarray(matrix, dtype="<f4").tobytes()
            data += bytes(-len(data) % _ALIGNMENT)
            file.write(data)
            tensors[name] = Place(offset, matrix.shape)
            offset += len(data)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            weights_xxh3 = xxh3_128(mapped).hex()
    (work / _TOKENIZER).write_bytes(source.tokenizer_json)
    index = Index(
        format=FORMAT,
        revision=revision,
        model=source.model,
        text=source.text,
        tensors=tensors,
        weights_nbytes=offset,
        weights_xxh3=weights_xxh3,
        tokenizer_xxh3=xxh3_128(source.tokenizer_json).hex(),
    )
    encoded = msgspec.json.format(msgspec.json.encode(index))
    (work / _INDEX).write_bytes(encoded)
    (work / _INDEX_DIGEST).write_text(xxh3_128(encoded).hex())


def _open(folder: Path, revision: str) -> Unpacked | None:
    """The folder's content, or None when it is not whole."""
    try:
        encoded = (folder / _INDEX).read_bytes()
        if (folder / _INDEX_DIGEST).read_text() != xxh3_128(encoded).hex():
            return None
        index = msgspec.json.decode(encoded, type=Index)
        tokenizer_json = (folder / _TOKENIZER).read_bytes()
        with open(folder / _WEIGHTS, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # of msgspec: its errors are ValueErrors; of mmap: an empty file
        return None
    whole = (
        index.format == FORMAT
        and index.revision == revision
        and index.weights_nbytes == len(mapped)
        and index.tokenizer_xxh3 == xxh3_128(tokenizer_json).hex()
        and index.weights_xxh3 == xxh3_128(mapped).hex()
    )
    if not whole:
        return None
    return Unpacked(index, tokenizer_json, {name: _view(mapped, place) for name, place in index.tensors.items()})


def _view(mapped: mmap.mmap, place: Place) -> FloatArray:
    count = int(np.prod(place.shape))
    return np.frombuffer(mapped, dtype="<f4", count=count, offset=place.offset).reshape(place.shape)


@contextmanager
def _locked(path: Path, clock: Clock) -> Iterator[None]:
    """Hold the file's lock. The kernel drops it when the holder dies, so a stale file is harmless."""
    deadline = clock.monotonic_ns() + limits.CACHE_LOCK_TIMEOUT_NS
    with open(path, "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic_ns() >= deadline:
                    raise WeightsCacheError(path=str(path), detail="another process still unpacks") from None
                time.sleep(0.05)
        yield
