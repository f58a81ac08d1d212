"""The owner's end where the peer writes our memory itself, and it is we who verify what it has placed.

The header of a unit comes after its bytes. Nothing is believed of them before their CRC-64 was taken here; that the
peer cannot write any more is known only when it confirms a fence, is at rest, or has exited.
"""

import abc

from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_transport.backends.session import OwnerSession
from kv_transport.errors import ConnectionLost
from kv_transport.frames import Acked, Frame, FromInitiator, Placed, refusal
from kv_transport.ledger_items import Landing


class RmaSession(OwnerSession):
    """See the module."""

    one_sided = True

    def status(self) -> str:
        return "lingering: a fence is due" if self.over else super().status()

    def lose(self, cause: str) -> None:
        """The connection broke; the peer may still be able to write."""
        self._lost(cause)

    def writer_at_rest(self) -> None:
        """The peer's link is over and touches our memory no more."""
        error = ConnectionLost(peer=str(self.peer), transport=self.scheme, cause="the peer closed it")
        if self.over:
            self._around.ledger.session_lost(self, error, clean=True)
            self._gone()
        else:
            self._finish(error, clean=True)

    def writer_exited(self) -> None:
        """The peer's process is gone."""
        error = ConnectionLost(peer=str(self.peer), transport=self.scheme, cause="the process has exited")
        self._around.ledger.process_gone(self.peer, error)
        if self.over:
            self._gone()
        else:
            self._finish(error, clean=True)

    @abc.abstractmethod
    def _gone(self) -> None:
        """Nothing is left to wait for. Idempotent."""

    def _received_other(self, frame: FromInitiator) -> None:
        if isinstance(frame, Placed):
            self._placed(frame)
        else:
            super()._received_other(frame)

    def _placed(self, frame: Placed) -> None:
        try:
            landing = self._around.ledger.admit(self, frame.unit)
        except KVError as error:
            self._send(refusal(frame.seq, error))
            return
        self._verify(frame.seq, landing)

    def _verify(self, seq: int, landing: Landing) -> None:
        """Take the checksums of what lies there and answer; a backend for large units does it in a thread."""
        self._verified(seq, landing, landed_checks(landing))

    def _verified(self, seq: int, landing: Landing, checks: list[int]) -> None:
        try:
            self._around.ledger.land(landing, checks)
        except KVError as error:
            answer: Frame = refusal(seq, error)
        else:
            answer = Acked(seq)
        if not self.over:
            self._send(answer)


def landed_checks(landing: Landing) -> list[int]:
    """CRC-64 of each cell as it lies in our memory. A cell that is verified already counts as what it is."""
    view = landing.memory.data_view
    return [
        crc64(view[offset : offset + size]) if landing.writable(cell) else expected
        for cell, (offset, size, expected) in enumerate(
            zip(landing.offsets, landing.sizes, landing.expected, strict=True)
        )
    ]
