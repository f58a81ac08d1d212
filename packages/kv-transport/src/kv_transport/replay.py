"""Which nonces of one peer's life were used, and which of its puts were announced. Pure.

Nonces of a (peer, incarnation) grow by one per unit posted. Several streams reorder them a little, so the newest
`REPLAY_WINDOW` are told apart one by one; anything older is refused.

Attempts at one put have nonces of their own and share its number, by which its notification is known: a link may break
after the notification was given out and before the writer heard of it, and the writer then tries again.

Both are kept in bytes, which compiled code reads and marks as well (`doorbell.admit`): the newest number, 8 bytes
little-endian, and after it a byte for each of the last numbers, at its remainder: 1 for one that is marked.

R1: a nonce is accepted at most once. R2: a put is announced at most once; of one that is too old to know, nothing is
said but that.
"""

from typing import Final

from kv_transport import limits
from kv_transport.errors import ForgottenPut, FrameRefused, ReplayedNonce

MARKS_AT: Final = 8
"""Where the bytes of the numbers begin."""


def new_marks(window: int) -> bytearray:
    """Nothing is marked; 0 is the newest number."""
    return bytearray(MARKS_AT + window)


def newest_of(marks: bytearray) -> int:
    """The highest number that is marked, or 0."""
    return int.from_bytes(marks[:MARKS_AT], "little")


def is_forgotten(marks: bytearray, number: int) -> bool:
    """Whether it is too old to know."""
    return number <= newest_of(marks) - (len(marks) - MARKS_AT)


def is_marked(marks: bytearray, number: int) -> bool:
    """Whether a number that is not forgotten was marked."""
    return number <= newest_of(marks) and marks[MARKS_AT + number % (len(marks) - MARKS_AT)] > 0


def mark(marks: bytearray, number: int) -> None:
    """Mark a number that is not forgotten."""
    window, newest = len(marks) - MARKS_AT, newest_of(marks)
    if number > newest:
        if number > newest + 1:
            _clear(marks, newest + 1, number, window)
        marks[:MARKS_AT] = number.to_bytes(MARKS_AT, "little")
    marks[MARKS_AT + number % window] = 1


def _clear(marks: bytearray, begin: int, end: int, window: int) -> None:
    """None of `[begin, end)` was marked; what lies in their places is too old now."""
    if end - begin >= window:
        marks[MARKS_AT:] = bytes(window)
        return
    first, last = MARKS_AT + begin % window, MARKS_AT + end % window
    if first <= last:
        marks[first:last] = bytes(last - first)
    else:
        marks[first:] = bytes(len(marks) - first)
        marks[MARKS_AT:last] = bytes(last - MARKS_AT)


class ReplayWindow:
    """The nonces of one (peer, incarnation)."""

    __slots__ = ("_peer", "marks")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.marks: Final = new_marks(limits.REPLAY_WINDOW)

    def use(self, nonce: int) -> None:
        """Accept a nonce, once.

        Raises:
            ReplayedNonce: it was used, or it is too old to know.
        """
        if is_forgotten(self.marks, nonce) or is_marked(self.marks, nonce):
            raise ReplayedNonce(nonce=nonce, peer=self._peer, newest=newest_of(self.marks))
        mark(self.marks, nonce)


class PutWindow:
    """Which puts of one (peer, incarnation) were announced: 16 KiB, made for the first one."""

    __slots__ = ("_peer", "marks")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.marks = bytearray()

    def require(self, put: int) -> None:
        """Whether `announce` would know of that put.

        Raises:
            FrameRefused: puts are numbered from 1.
            ForgottenPut: it is too old.
        """
        if put < 1:
            raise FrameRefused(peer=self._peer, reason=f"a notification of put {put}")
        if self.marks and is_forgotten(self.marks, put):
            raise ForgottenPut(put=put, peer=self._peer, newest=newest_of(self.marks))

    def announce(self, put: int) -> bool:
        """Whether the notification is to be given out: it was not yet. Raises as `require`."""
        self.require(put)
        if not self.marks:
            self.marks = new_marks(limits.PUT_WINDOW)
        if is_marked(self.marks, put):
            return False
        mark(self.marks, put)
        return True


class PeerHistory:
    """What is remembered of one (peer, incarnation)."""

    __slots__ = ("nonces", "puts")

    def __init__(self, peer: str) -> None:
        self.nonces: Final = ReplayWindow(peer)
        self.puts: Final = PutWindow(peer)
