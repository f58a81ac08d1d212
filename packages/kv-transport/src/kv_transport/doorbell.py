"""A put of one run over shared memory: the message that tells of it, and its answer.

A small one is the copy, both checksums, the message and its sending in one call; a larger one is copied by threads, and
the same message tells of it.

Compiled, with plain twins (`plain_...`) that are the definition, as in `kernels`. The message, little-endian, begins
with a byte that begins no MessagePack frame:

    offset  size  field
    0       8     0xC1
    8       8     seq, as in every frame
    16      8     put: the number by which its attempts are known
    24      24    region, offset, nbytes: one run of the owner's memory
    48      128   the unit's header, whose checksum is that of the piece
    176           the notification, to the end

**Answers.** That a put was accepted is written to a page that the writer gave the owner: `place[seq % PLACES] = seq`.
Nobody is woken for that, unless the writer says in the page's first word that it waits. The writer says so and then
looks; the owner writes and then looks whether somebody waits: at least one of them sees the other, for each access is
sequentially consistent. Plain Python has no such access, so without compiled code every answer is a frame.

DB1: a message leaves only after the destination's checksum was found to be the source's. DB2: a place says `seq` only
after the put of that `seq` was accepted, and no two puts without an answer share a place. DB3: `admit` marks all that a
put uses up, or changes nothing.
"""

import os
import struct
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kv_core.errors import KVError
from kv_core.header import read_stamps
from kv_core.ids import Incarnation, NodeId
from kv_transport import kernels, replay
from kv_transport.errors import FrameRefused, MemoryUnavailable
from kv_transport.memory_budget import MemoryBudget
from kv_transport.regions import MappedBuffer, SharedBuffer
from kv_transport.types import PeerName
from kv_transport.unit_header import check_header, plain_header

try:
    # It copies with the function that `kernels` has loaded.
    from kv_transport import _doorbell as _compiled
except ImportError:  # built without a compiler
    _compiled = None  # type: ignore[assignment]

COMPILED: Final = kernels.COMPILED and _compiled is not None

MARK: Final = 0xC1
"""The first byte of a message; MessagePack never uses it."""

SENT: Final = 0
WAITS: Final = 1
"""The message is complete, and the socket takes nothing now."""

DAMAGED: Final = 2
"""What arrived is not what was read; there is no message."""

HEAD_NBYTES: Final = 176
PLACES: Final = 64
"""Puts that may be without an answer before some are answered by frames; more than the usual window."""

_FIXED: Final = struct.Struct("<6Q")
_FIXED_HEAD: Final = struct.Struct("<3Q")
_HEADER_AT: Final = _FIXED.size
_FLAG: Final = 64
_PAGE_NBYTES: Final = _FLAG + 8 * PLACES
_NO_RESERVE: Final = MemoryBudget(reserve_nbytes=0)
_HEADER: Final = plain_header(1)
HEADER_BYTES: Final = _HEADER.attempt(0, 0)
"""What `admit` is to find in every message, but for its stamps."""

_ANYBODY: Final = PeerName(NodeId("anybody"), Incarnation(0))

Putting = Callable[[int, memoryview, memoryview, int, bytearray, int, int, int], int]

Put = tuple[int, int, int, int, int, int, bytes]
"""seq, put, region, offset, nbytes, nonce, notification."""

Admitted = tuple[int, bytes, bool]
"""seq, the notification if it is to be given out now, whether the writer waits for a frame although it is answered."""

Text = memoryview | bytes
Admitting = Callable[[Text, bytes, bytearray, bytearray, int, int, int, memoryview | None], Admitted | None]


def message(region: int, offset: int, nbytes: int, notif: bytes) -> bytearray:
    """A message that `put` completes, again and again."""
    return bytearray(_FIXED.pack(MARK, 0, 0, region, offset, nbytes) + HEADER_BYTES + notif)


def complete(text: bytearray, seq: int, number: int, nonce: int, checksum: int) -> bytes:
    """The message of a piece that is in place, with that CRC-64 there."""
    _FIXED_HEAD.pack_into(text, 0, MARK, seq, number)
    text[_HEADER_AT:HEAD_NBYTES] = _HEADER.attempt(nonce, checksum)
    return bytes(text)


def plain_put(
    fd: int,
    to: memoryview,
    source: memoryview,
    source_offset: int,
    text: bytearray,
    seq: int,
    number: int,
    nonce: int,
) -> int:
    """Copy the piece that a message is about, complete the message, and send it without waiting.

    Args:
        fd: a connected socket of packets; -1 to send nothing.
        to: the region's memory; `source` and `source_offset` say where the piece is here.
        text: from `message`; completed in place.

    Returns:
        `SENT`, `WAITS` or `DAMAGED`.

    Raises:
        IndexError: the piece lies outside; nothing was copied.
        OSError: the socket is broken.
    """
    _, _, _, region, offset, nbytes = _FIXED.unpack_from(text)
    cell = np.array([[offset, source_offset, nbytes]], np.int64)
    if nbytes < 1:
        raise IndexError("an empty piece")
    (arrived,), (read,) = kernels.copy_unsealed_cells(to, source, cell)
    if arrived != read:
        return DAMAGED
    text[:HEAD_NBYTES] = _FIXED.pack(MARK, seq, number, region, offset, nbytes) + _HEADER.attempt(nonce, arrived)
    if fd < 0:
        return WAITS
    try:
        os.write(fd, text)
    except (BlockingIOError, InterruptedError):
        return WAITS
    return SENT


put: Putting = plain_put
"""The same, compiled where it can be."""
if _compiled is not None:
    put = _compiled.put


def read(text: Text, peer: PeerName) -> Put:
    """What a message says.

    Raises:
        FrameRefused: it is none, or its header is about something else.
        CorruptHeaderError, UnsupportedHeaderVersionError: its header is none, or damaged.
    """
    if _compiled is None:
        return plain_read(text, peer)
    # None: something is wrong with it.
    return _compiled.read(text, HEADER_BYTES) or plain_read(text, peer)


def plain_read(text: Text, peer: PeerName) -> Put:
    """The same without compiled code; it also says what is wrong."""
    if len(text) < HEAD_NBYTES:
        raise FrameRefused(peer=str(peer), reason=f"a put of {len(text)} bytes")
    mark, seq, number, region, offset, nbytes = _FIXED.unpack_from(text)
    if mark != MARK:
        raise FrameRefused(peer=str(peer), reason=f"a put of the form {mark:#x}")
    header = bytes(text[_HEADER_AT:HEAD_NBYTES])
    nonce, checksum = read_stamps(header)
    check_header(header, checksum, _HEADER, checksum, peer=peer, transport="shm", cells=1)
    return seq, number, region, offset, nbytes, nonce, bytes(text[HEAD_NBYTES:])


def plain_admit(
    text: Text,
    header: bytes,
    nonces: bytearray,
    puts: bytearray,
    region: int,
    region_nbytes: int,
    nbytes_max: int,
    page: memoryview | None,
) -> Admitted | None:
    """Admit a put of one region, that peers may write, if nothing is wrong with it, and answer it.

    Args:
        header: `HEADER_BYTES`.
        nonces, puts: what the peer has used up, as `replay` keeps it; marked. No puts: as if all were forgotten.
        nbytes_max: of one put.
        page: where it is answered, or None.

    Returns:
        None where it is not for that region, or anything is wrong with it, and then nothing has changed.
    """
    try:
        seq, put, found, offset, nbytes, nonce, notif = plain_read(text, _ANYBODY)
    except KVError:
        return None
    inside = 1 <= nbytes <= min(nbytes_max, region_nbytes) and offset <= region_nbytes - nbytes
    if found != region or not inside or replay.is_forgotten(nonces, nonce) or replay.is_marked(nonces, nonce):
        return None
    if notif and (put < 1 or not puts or replay.is_forgotten(puts, put)):
        return None
    replay.mark(nonces, nonce)
    if notif:
        if replay.is_marked(puts, put):
            notif = b""
        else:
            replay.mark(puts, put)
    return seq, notif, page is not None and _compiled.answer(page, seq)


admit: Admitting = plain_admit
"""The same, compiled where it can be."""
if _compiled is not None:
    admit = _compiled.admit


def seq_of(text: Text, peer: PeerName) -> int:
    """Which message it is, so that it can be refused. Raises `FrameRefused` for one that is too short to say."""
    if len(text) < HEAD_NBYTES:
        raise FrameRefused(peer=str(peer), reason=f"a put of {len(text)} bytes")
    return int(_FIXED.unpack_from(text)[1])


class AnswersWanted:
    """The writer's side of a page of answers."""

    __slots__ = ("_buffer", "_view", "answered", "waits")

    def __init__(self, buffer: SharedBuffer) -> None:
        self._buffer = buffer
        self._view = buffer.data_view
        self.answered: Callable[[int], bool] = partial(_compiled.answered, self._view)
        """Whether that put was accepted."""

        self.waits = False
        """What `wait` said last."""

    @classmethod
    def create(cls) -> "AnswersWanted | None":
        """A page, or None where there can be none: then answers are frames."""
        if not COMPILED:
            return None
        try:
            return cls(SharedBuffer.create(_PAGE_NBYTES, "kv-answers", budget=_NO_RESERVE))
        except (MemoryUnavailable, OSError):
            return None

    def fileno(self) -> int:
        """What to give the owner."""
        return self._buffer.fileno()

    def wait(self, on: bool) -> None:
        """Whether the owner is to send a frame with each answer from now on; look for answers after asking for it."""
        if on is not self.waits:
            self.waits = on
            _compiled.await_answers(self._view, int(on))

    def close(self) -> None:
        """Idempotent; the owner keeps its own mapping."""
        self._view = memoryview(b"")
        self.answered = _nothing_is_answered
        self._buffer.close()


def _nothing_is_answered(seq: int) -> bool:
    return False


class AnswersGiven:
    """The owner's side."""

    __slots__ = ("_mapped", "view")

    def __init__(self, fd: int) -> None:
        """Takes over `fd`. Raises `InvalidDescriptor` for what is no such page."""
        self._mapped = MappedBuffer(fd, _PAGE_NBYTES, writable=True)
        self.view = self._mapped.data_view
        """For `admit`."""

    @classmethod
    def of(cls, fd: int) -> "AnswersGiven | None":
        """The same, or None where answers are frames."""
        if not COMPILED:
            os.close(fd)
            return None
        return cls(fd)

    def give(self, seq: int) -> bool:
        """That put is accepted. Returns whether a frame must say so, too: the writer waits."""
        return _compiled.answer(self.view, seq)

    def close(self) -> None:
        """End the mapping."""
        self.view = memoryview(b"")
        self._mapped.unmap()
