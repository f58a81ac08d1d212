"""Which nonces of one peer's life were used, and which of its puts were announced. Pure.

Nonces of a (peer, incarnation) grow by one per unit posted. Several streams reorder them a little, so the newest
`REPLAY_WINDOW` are told apart one by one; anything older is refused.

Attempts at one put have nonces of their own and share its number, by which its notification is known: a link may break
after the notification was given out and before the writer heard of it, and the writer then tries again.

R1: a nonce is accepted at most once. R2: a put is announced at most once; of one that is too old to know, nothing is
said but that.
"""

from typing import Final

from kv_transport import limits
from kv_transport.errors import ForgottenPut, FrameRefused, ReplayedNonce

_MASK: Final = (1 << limits.REPLAY_WINDOW) - 1


class ReplayWindow:
    """The window of one (peer, incarnation)."""

    __slots__ = ("_newest", "_peer", "_seen")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._newest = -1
        self._seen = 0  # bit i: nonce `newest - i` was used

    def use(self, nonce: int) -> None:
        """Accept a nonce, once.

        Raises:
            ReplayedNonce: it was used, or it is too old to know.
        """
        ahead = nonce - self._newest
        if ahead > 0:
            self._seen = ((self._seen << ahead) | 1) & _MASK if ahead < limits.REPLAY_WINDOW else 1
            self._newest = nonce
            return
        bit = 1 << -ahead
        if -ahead >= limits.REPLAY_WINDOW or self._seen & bit:
            raise ReplayedNonce(nonce=nonce, peer=self._peer, newest=self._newest)
        self._seen |= bit


class PutWindow:
    """Which puts of one (peer, incarnation) were announced: a byte for each of the last `PUT_WINDOW` numbers."""

    __slots__ = ("_announced", "_newest", "_peer")

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._newest = 0
        self._announced = bytearray()

    def require(self, put: int) -> None:
        """Whether `announce` would know of that put.

        Raises:
            FrameRefused: puts are numbered from 1.
            ForgottenPut: it is too old.
        """
        if put < 1:
            raise FrameRefused(peer=self._peer, reason=f"a notification of put {put}")
        if put <= self._newest - limits.PUT_WINDOW:
            raise ForgottenPut(put=put, peer=self._peer, newest=self._newest)

    def announce(self, put: int) -> bool:
        """Whether the notification is to be given out: it was not yet. Raises as `require`."""
        self.require(put)
        ahead, place = put - self._newest, put % limits.PUT_WINDOW
        if ahead > 1:
            self._skip(self._newest + 1, put)
        if ahead > 0:
            self._newest = put
        elif self._announced[place]:
            return False
        if not self._announced:
            self._announced = bytearray(limits.PUT_WINDOW)
        self._announced[place] = 1
        return True

    def _skip(self, begin: int, end: int) -> None:
        """None of `[begin, end)` was announced; what lay in their places is too old now."""
        if end - begin >= limits.PUT_WINDOW:
            self._announced = bytearray(limits.PUT_WINDOW)
            return
        first, last = begin % limits.PUT_WINDOW, end % limits.PUT_WINDOW
        if not self._announced:
            return
        if first <= last:
            self._announced[first:last] = bytes(last - first)
        else:
            self._announced[first:] = bytes(limits.PUT_WINDOW - first)
            self._announced[:last] = bytes(last)


class PeerHistory:
    """What is remembered of one (peer, incarnation)."""

    __slots__ = ("nonces", "puts")

    def __init__(self, peer: str) -> None:
        self.nonces: Final = ReplayWindow(peer)
        self.puts: Final = PutWindow(peer)
