"""What peers are handed of an arena or a buffer: a sealed memfd, which nobody writes to who may only read."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_core.ids import RequestId
from kv_transport import Arena, SharedBuffer
from kv_transport.arena import SEALS, ArenaView, map_arena
from kv_transport.backends import shm_link
from kv_transport.errors import InvalidDescriptor
from kv_transport.regions import MappedBuffer
from tests.transport.helpers_transport import NO_RESERVE, SMALL, pair

REQUEST = RequestId("request-1")
BLOCKS = 2
TOKENS = BLOCKS * SMALL.block_size


@pytest.fixture
def memfd() -> Iterator[int]:
    """Two pages that nothing seals."""
    fd = os.memfd_create("plain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    yield fd
    os.close(fd)


def test_shared_memory_can_be_neither_shrunk_nor_grown() -> None:
    """Whoever maps it would be killed by its own access behind the end."""
    with (
        Arena.create(SMALL, 4, budget=NO_RESERVE) as arena,
        SharedBuffer.create(3 * mmap.PAGESIZE, budget=NO_RESERVE) as buffer,
    ):
        for memory in (arena, buffer):
            size = os.fstat(memory.fileno()).st_size
            for other in (0, size - mmap.PAGESIZE, size + mmap.PAGESIZE):
                with pytest.raises(PermissionError):
                    os.ftruncate(memory.fileno(), other)
            assert os.fstat(memory.fileno()).st_size == size


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_what_is_not_sealed_on_both_sides_is_not_mapped(memfd: int, seals: int) -> None:
    if seals:
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, seals)
    for take in (map_arena, MappedBuffer):
        offered = os.dup(memfd)
        with pytest.raises(InvalidDescriptor, match="not sealed"):
            take(offered, 2 * mmap.PAGESIZE, writable=False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(offered)  # it was taken over, and is closed


def test_what_is_sealed_and_not_what_was_said_is_not_mapped(memfd: int) -> None:
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(InvalidDescriptor, match="of another size"):
        MappedBuffer(os.dup(memfd), 3 * mmap.PAGESIZE, writable=False)
    with pytest.raises(InvalidDescriptor):
        map_arena(os.dup(memfd), 2 * mmap.PAGESIZE, writable=False)  # zeros are no arena's header
    with Arena.create(SMALL, 4, budget=NO_RESERVE) as arena, pytest.raises(InvalidDescriptor, match="its header says"):
        map_arena(os.dup(arena.fileno()), arena.nbytes + 1, writable=False)


async def test_a_reader_is_handed_a_descriptor_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant brings a writable one; a lease never does, whatever its holder tries with it."""
    handed: list[tuple[bool, int]] = []

    def keep(fd: int, nbytes: int, *, writable: bool) -> ArenaView:
        handed.append((writable, os.dup(fd)))
        return map_arena(fd, nbytes, writable=writable)

    monkeypatch.setattr(shm_link, "map_arena", keep)
    async with pair("shm", tmp_path) as (one, other):
        lease = one.engine.lease_reads(REQUEST, one.filled(BLOCKS, 1), seq_start=0, seq_end=TOKENS, lease_ms=60_000)
        await other.engine.fetch(lease, other.blocks(BLOCKS)).wait(10_000)
        one.engine.release_lease(lease.ticket)
        target = other.blocks(BLOCKS)
        grant = other.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=TOKENS)
        handover, source = one.engine.open_handover(REQUEST, grant), one.filled(BLOCKS, 2)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(10_000)
        assert other.content(target) == one.content(source)
    (may_write, read_only), (may_write_too, writable) = handed
    assert (may_write, may_write_too) == (False, True)
    assert fcntl.fcntl(read_only, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(writable, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    with pytest.raises(PermissionError):
        mmap.mmap(read_only, mmap.PAGESIZE, access=mmap.ACCESS_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(read_only, b"x", 0)
    os.close(read_only)
    os.close(writable)
