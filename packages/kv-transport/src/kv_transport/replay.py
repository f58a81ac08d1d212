"""Which nonces of one peer's life were used. Pure.

Nonces of a (peer, incarnation) grow by one per unit posted. Several streams reorder them a little, so the newest
`REPLAY_WINDOW` are told apart one by one; anything older is refused.

R1: a nonce is accepted at most once.
"""

from typing import Final

from kv_transport import limits
from kv_transport.errors import ReplayedNonce

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
