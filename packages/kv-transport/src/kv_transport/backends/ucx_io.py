"""What the thread that a UCX worker lives in does most: waiting for news, and putting memory whose sums nobody knows.

Compiled, with plain twins (`plain_...`) that are the definition, as in `kernels`. UCX's functions are those of the
library that the binding has opened. The compiled ones release the GIL: with an interpreted turn for each segment that
comes, the thread would wait for it, too.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from typing import Final

import numpy as np

from kv_core.checksum import crc64
from kv_transport import kernels
from kv_transport.arena_layout import IntArray

try:
    # It sums with the function that `kernels` has loaded.
    from kv_transport import _ucx_io as _compiled
except ImportError:  # built without a compiler
    _compiled = None  # type: ignore[assignment]

COMPILED: Final = kernels.COMPILED and _compiled is not None

PIECE: Final = 2 * 254 * 1024
"""What is summed and then put, in bytes: it stays in the second-level cache, and fits two segments with their heads."""
STATUS_LAST: Final = -200
"""What UCX answers instead of a request lies above this when it is an error; as an unsigned number, at the very end."""
_IN_PROGRESS: Final = 1
_LOOK_TURNS: Final = 16
"""One of so many turns of polling in which nothing moved asks after messages and requests all the same."""


class UcxCalls:
    """UCX's functions, and the worker that they are called for.

    Args:
        library: has them by their names, as ctypes functions with their types set.
    """

    def __init__(self, library: object, worker: int) -> None:
        names = ("ucp_worker_progress", "ucp_tag_probe_nb", "ucp_request_check_status", "ucp_put_nbx")
        found: list[Callable[..., int | None]] = [getattr(library, name) for name in names]
        self.progress, self.probe, self.status, self.put = found
        self.worker: Final = worker
        addresses = [ctypes.cast(one, c_void_p).value or 0 for one in found]  # type: ignore[arg-type]
        self.of_poll: Final = addresses[0], addresses[1], addresses[2]
        self.of_put: Final = addresses[3]


def poll(calls: UcxCalls, tag: int, requests: Sequence[int], wanted: c_int, turns: int) -> bool:
    """Progress until there is something to do; whether there is: a message with that tag, a request that is over.

    Args:
        requests: as UCX gave them, none of them freed.
        wanted: the thread is wanted elsewhere as soon as it is not 0. Others may set it meanwhile.
        turns: progress that brings nothing so many times in a row is the end of it.
    """
    if not COMPILED:
        return plain_poll(calls, tag, requests, wanted, turns)
    return _compiled.poll(*calls.of_poll, calls.worker, tag, wanted, array("Q", requests), turns)


def plain_poll(calls: UcxCalls, tag: int, requests: Sequence[int], wanted: c_int, turns: int) -> bool:
    """The same without compiled code."""
    if _has_news(calls, tag, requests):
        return True
    quiet = 0
    while quiet < turns:
        if wanted.value:
            return True
        moved = calls.progress(calls.worker) != 0
        if (moved or quiet % _LOOK_TURNS == 0) and _has_news(calls, tag, requests):
            return True
        quiet = 0 if moved else quiet + 1
    return False


def _has_news(calls: UcxCalls, tag: int, requests: Sequence[int]) -> bool:
    info = (ctypes.c_uint64 * 8)()
    if calls.probe(calls.worker, tag, (1 << 64) - 1, 0, ctypes.addressof(info)):
        return True
    return any(calls.status(request) != _IN_PROGRESS for request in requests)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a put goes: an endpoint, and a remote address with its key; `parameters` is the address of UCX's own."""

    endpoint: int
    remote: int
    key: int
    parameters: int


def put_summed(
    calls: UcxCalls, target: Target, memory: memoryview, cells: IntArray
) -> tuple[list[int], list[int], int]:
    """Put cells, each piece right after it was summed: UCX then copies it from the cache.

    Args:
        cells: `(n, 3)`: offset in the memory, offset at the peer, bytes. Neighbours at both ends are put together.

    Returns:
        The CRC-64 of each cell, the requests, and 0 or the status with which UCX refused: then only the
        requests count.

    Raises:
        IndexError: a cell lies outside the memory; nothing was put.
    """
    if not COMPILED:
        return plain_put_summed(calls, target, memory, cells)
    checks = np.zeros(len(cells), np.uint64)
    requests = np.empty(int(((cells[:, 2] - 1) // PIECE + 2).sum()), np.uint64)
    status, count = _compiled.put(
        calls.of_put,
        target.endpoint,
        target.key,
        target.parameters,
        memory,
        target.remote,
        np.ascontiguousarray(cells, np.int64),
        checks,
        requests,
    )
    return checks.tolist(), requests[:count].tolist(), status


def plain_put_summed(
    calls: UcxCalls, target: Target, memory: memoryview, cells: IntArray
) -> tuple[list[int], list[int], int]:
    """The same without compiled code."""
    table: list[list[int]] = cells.tolist()
    for index, (local, remote, nbytes) in enumerate(table):
        if min(local, remote) < 0 or nbytes < 1 or local + nbytes > len(memory):
            raise IndexError(f"cell {index} lies outside its memory")
    base = np.frombuffer(memory, np.uint8).ctypes.data if len(memory) else 0
    checks, requests = [0] * len(table), list[int]()
    for local, remote, nbytes, parts in _pieces(table):
        for index, offset, size in parts:
            checks[index] = crc64(memory[offset : offset + size], checks[index])
        request = calls.put(
            target.endpoint, base + local, nbytes, target.remote + remote, target.key, target.parameters
        )
        status = as_status(request)
        if status:
            return checks, requests, status
        if request:
            requests.append(request)
    return checks, requests, 0


def _pieces(table: list[list[int]]) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
    """What is put at once: offsets at both ends, bytes, and which part of which cell that is."""
    found: list[tuple[int, int, int, list[tuple[int, int, int]]]] = []
    for index, (local, remote, left) in enumerate(table):
        while left:
            if found:
                begin, far, filled, parts = found[-1]
                if filled < PIECE and (local, remote) == (begin + filled, far + filled):
                    here = min(left, PIECE - filled)
                    found[-1] = begin, far, filled + here, [*parts, (index, local, here)]
                    local, remote, left = local + here, remote + here, left - here
                    continue
            found.append((local, remote, 0, []))
    return found


def as_status(pointer: int | None) -> int:
    """The error in what UCX gives instead of a request; 0 for a request, and for None, which is done at once."""
    signed = (pointer or 0) - (1 << 64) if (pointer or 0) >= 1 << 63 else 0
    return signed if signed > STATUS_LAST else 0
