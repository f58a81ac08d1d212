"""Waiting for UCX's news, and putting what is summed on the way: compiled and plain, against a UCX that is made up."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_core.checksum import crc64
from kv_transport.arena_layout import IntArray
from kv_transport.backends import ucx_io
from kv_transport.backends.ucx_io import PIECE, Target, UcxCalls

WORKER, TAG, ENDPOINT, KEY, REMOTE, PARAMETERS = 11, 22, 33, 44, 1 << 40, 55
MEMORY = 3 * PIECE
OVER, IN_PROGRESS = 0, 1
Poll = Callable[[UcxCalls, int, Sequence[int], c_int, int], bool]
Put = Callable[[UcxCalls, Target, memoryview, IntArray], tuple[list[int], list[int], int]]

needs_compiled = pytest.mark.skipif(not ucx_io.COMPILED, reason="installed without a compiler")
both_poll = pytest.mark.parametrize("poll", [pytest.param(ucx_io.poll, marks=needs_compiled), ucx_io.plain_poll])
both_put = pytest.mark.parametrize(
    "put", [pytest.param(ucx_io.put_summed, marks=needs_compiled), ucx_io.plain_put_summed]
)


class MadeUp:
    """A UCX of four functions; `calls` is what the code under test is given."""

    def __init__(self) -> None:
        self.turns = 0
        self.moves: dict[int, Callable[[], None]] = {}
        """What happens in which turn of progress."""
        self.message = False
        self.statuses: dict[int, int] = {}
        self.over_after: int | None = None
        self.puts: list[tuple[int, int, int]] = []
        self.answers: dict[int, int] = {}
        """What the n-th put gives; nothing, which is done at once, where it is not said."""
        self.arrived = bytearray()
        library = SimpleNamespace(
            ucp_worker_progress=ctypes.CFUNCTYPE(c_uint, c_void_p)(self._progress),
            ucp_tag_probe_nb=ctypes.CFUNCTYPE(c_void_p, c_void_p, c_uint64, c_uint64, c_int, c_void_p)(self._probe),
            ucp_request_check_status=ctypes.CFUNCTYPE(c_int, c_void_p)(self._status),
            ucp_put_nbx=ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, c_void_p)(
                self._put
            ),
        )
        self.calls = UcxCalls(library, WORKER)

    def _progress(self, worker: int) -> int:
        assert worker == WORKER
        self.turns += 1
        happens = self.moves.get(self.turns)
        if happens is not None:
            happens()
        return happens is not None

    def _probe(self, worker: int, tag: int, mask: int, remove: int, info: int) -> int:
        assert (worker, tag, mask, remove) == (WORKER, TAG, (1 << 64) - 1, 0) and info
        return 66 if self.message else 0

    def _status(self, request: int) -> int:
        return OVER if self.over_after is not None and self.turns > self.over_after else self.statuses[request]

    def _put(self, endpoint: int, local: int, nbytes: int, remote: int, key: int, parameters: int) -> int:
        assert (endpoint, key, parameters) == (ENDPOINT, KEY, PARAMETERS)
        self.puts.append((local, nbytes, remote - REMOTE))
        self.arrived += ctypes.string_at(local, nbytes)
        return self.answers.get(len(self.puts), 0)


@both_poll
def test_polling_ends_with_a_message(poll: Poll) -> None:
    ucx = MadeUp()
    ucx.moves = {5: lambda: setattr(ucx, "message", True)}
    assert poll(ucx.calls, TAG, [], c_int(0), 100)
    assert ucx.turns == 5


@both_poll
@pytest.mark.parametrize("status", [OVER, -25])
def test_polling_ends_with_a_request_that_is_over_well_or_badly(poll: Poll, status: int) -> None:
    ucx = MadeUp()
    ucx.statuses = {7: IN_PROGRESS, (1 << 63) + 8: IN_PROGRESS}
    ucx.moves = {3: lambda: None, 9: lambda: ucx.statuses.update({(1 << 63) + 8: status})}
    assert poll(ucx.calls, TAG, list(ucx.statuses), c_int(0), 100)
    assert ucx.turns == 9


@both_poll
def test_what_is_there_already_needs_no_turn(poll: Poll) -> None:
    ucx = MadeUp()
    ucx.statuses = {7: OVER}
    assert poll(ucx.calls, TAG, [7], c_int(0), 1)
    assert ucx.turns == 0


@both_poll
def test_polling_goes_on_for_so_many_turns_after_the_last_that_brought_something(poll: Poll) -> None:
    ucx = MadeUp()
    ucx.moves = {20: lambda: None, 49: lambda: None}
    assert not poll(ucx.calls, TAG, [], c_int(0), 30)
    assert ucx.turns == 49 + 30


@both_poll
def test_what_comes_without_a_move_is_seen_before_polling_ends(poll: Poll) -> None:
    ucx = MadeUp()
    ucx.statuses = {7: IN_PROGRESS}
    ucx.over_after = 10
    assert poll(ucx.calls, TAG, [7], c_int(0), 100)
    assert 10 < ucx.turns < 30


@both_poll
def test_another_thread_ends_polling_at_once(poll: Poll) -> None:
    ucx, wanted = MadeUp(), c_int(0)
    ends = list[bool]()
    polling = threading.Thread(target=lambda: ends.append(poll(ucx.calls, TAG, [], wanted, 1 << 31)))
    polling.start()
    while not ucx.turns:
        pass
    wanted.value = 1
    polling.join(60)
    assert ends == [True]


@st.composite
def cells_of_memory(draw: st.DrawFn) -> IntArray:
    """Pieces of memory, many of them neighbours at one end or at both."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 300), st.integers(1, PIECE)), min_size=1, max_size=20))
    rows, local, remote = list[tuple[int, int, int]](), 0, 0
    for size in sizes:
        local += draw(st.sampled_from([0, 0, 0, 17]))
        remote += draw(st.sampled_from([0, 0, 0, 5]))
        if local + size > MEMORY:
            break
        rows.append((local, remote, size))
        local, remote = local + size, remote + size
    rows = rows or [(0, 0, MEMORY)]
    return np.array(rows, np.int64)


@pytest.fixture(scope="module")
def memory() -> memoryview:
    return memoryview(bytearray(np.random.default_rng(1).integers(0, 256, MEMORY, np.uint8)))


@both_put
@given(cells=cells_of_memory())
@example(cells=np.array([(0, 0, 100), (100, 100, MEMORY - 100)], np.int64))
def test_every_byte_is_put_once_in_order_and_summed(put: Put, cells: IntArray, memory: memoryview) -> None:
    ucx = MadeUp()
    checks, requests, status = put(ucx.calls, Target(ENDPOINT, REMOTE, KEY, PARAMETERS), memory, cells)
    rows = cells.tolist()
    assert checks == [crc64(memory[local : local + size]) for local, _, size in rows]
    assert bytes(ucx.arrived) == b"".join(memory[local : local + size] for local, _, size in rows)
    assert (requests, status) == ([], 0)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    # Where each byte went, by the pieces and by the cells.
    of_puts = [(local - base, nbytes, remote) for local, nbytes, remote in ucx.puts]
    assert merged(of_puts) == merged([(local, size, remote) for local, remote, size in rows])
    assert max(nbytes for _, nbytes, _ in of_puts) <= PIECE
    apart = len(merged(of_puts))
    assert len(of_puts) <= sum(size for _, _, size in rows) // PIECE + apart, "neighbours are put together"


def merged(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Pieces that meet at both ends as one."""
    found: list[tuple[int, int, int]] = []
    for local, nbytes, remote in pieces:
        if found and (local, remote) == (found[-1][0] + found[-1][1], found[-1][2] + found[-1][1]):
            found[-1] = found[-1][0], found[-1][1] + nbytes, found[-1][2]
        else:
            found.append((local, nbytes, remote))
    return found


@both_put
def test_requests_are_handed_on_and_a_refusal_ends_it(put: Put, memory: memoryview) -> None:
    cells = np.array([[0, 0, 2 * PIECE], [2 * PIECE + 1, 2 * PIECE + 1, 100]], np.int64)
    target = Target(ENDPOINT, REMOTE, KEY, PARAMETERS)
    ucx = MadeUp()
    ucx.answers = {1: 0x7000, 3: (1 << 63) + 0x100}
    assert put(ucx.calls, target, memory, cells)[1:] == ([0x7000, (1 << 63) + 0x100], 0)
    ucx = MadeUp()
    ucx.answers = {1: 0x7000, 2: (1 << 64) - 25}
    assert put(ucx.calls, target, memory, cells)[1:] == ([0x7000], -25)
    assert len(ucx.puts) == 2


@both_put
@pytest.mark.parametrize("cell", [(-1, 0, 5), (0, -1, 5), (0, 0, 0), (MEMORY - 4, 0, 5)])
def test_a_cell_outside_the_memory_is_refused_before_anything_is_put(
    put: Put, cell: tuple[int, int, int], memory: memoryview
) -> None:
    ucx = MadeUp()
    with pytest.raises(IndexError, match="cell 1"):
        put(ucx.calls, Target(ENDPOINT, REMOTE, KEY, PARAMETERS), memory, np.array([(0, 0, 5), cell], np.int64))
    assert not ucx.puts


@pytest.mark.parametrize("missing", ["_kernels", "_ucx_io"])
def test_without_a_compiled_part_the_twins_stand_in(missing: str) -> None:
    """In a process where an extension cannot be imported, the same transfer arrives."""
    pytest.importorskip("ucxx")
    program = f"""
import asyncio, sys, tempfile
from pathlib import Path
sys.modules["kv_transport.{missing}"] = None
from kv_transport.backends import ucx_io
from kv_transport import Access, XferDesc, XferOp
from tests.transport.helpers_transport import NO_RESERVE, introduce, pair
from kv_transport.regions import SharedBuffer
assert not ucx_io.COMPILED

async def main(folder: Path) -> None:
    with SharedBuffer.create(1 << 20, budget=NO_RESERVE) as one, SharedBuffer.create(1 << 20, budget=NO_RESERVE) as two:
        one.data[:] = 7
        async with pair("ucx", folder) as (left, right):
            ours, theirs = (
                XferDesc(end.agent.register_memory(memory, Access.WRITE).region, 0, 1 << 20)
                for end, memory in ((left, one), (right, two))
            )
            introduce(left, right)
            xfer = left.agent.initialize_xfer(XferOp.WRITE, [ours], [theirs], right.agent.name.node)
            left.agent.transfer(xfer)
            await xfer.done(20_000)
            print(int((two.data == 7).sum()))

with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{1 << 20}\n", done.stderr
