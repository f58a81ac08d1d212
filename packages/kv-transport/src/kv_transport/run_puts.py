"""The owner's side of puts of one run over shared memory, on one connection: what the ledger is for other units.

A put in which nothing is wrong, of the region that the last one went to, is admitted by one call (`doorbell.admit`).
Any other is looked at step by step, which also says what is wrong with it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from kv_core.errors import KVError
from kv_core.ids import NodeId
from kv_transport import doorbell, limits
from kv_transport.doorbell import AnswersGiven
from kv_transport.errors import FrameRefused
from kv_transport.regions import MemoryRegion, RegionTable
from kv_transport.replay import PeerHistory
from kv_transport.ticket_checks import refuse_piece
from kv_transport.types import Access, PeerName

_LONGEST: Final = doorbell.HEAD_NBYTES + limits.NOTIF_BYTES_MAX


class RunPuts:
    """See the module. Made by `Ledger`; on the loop."""

    __slots__ = ("_history", "_lock", "_nbytes", "_nonces", "_on_notif", "_peer", "_refused", "_region", "_regions")

    def __init__(
        self,
        peer: PeerName,
        history: PeerHistory,
        lock: AbstractContextManager[object],
        regions: RegionTable,
        on_notif: Callable[[NodeId, bytes], None],
        refused: Callable[[], None],
    ) -> None:
        """`lock` guards the history; `refused` counts."""
        self._peer = peer
        self._history = history
        self._nonces = history.nonces.marks
        self._lock = lock
        self._regions = regions
        self._on_notif = on_notif
        self._refused = refused
        self._region: MemoryRegion | None = None
        self._nbytes = 0

    def take(self, text: memoryview, page: AnswersGiven | None) -> tuple[int, bool]:
        """Admit a put, give its notification out, answer it in the page.

        Returns:
            Which message it is, and whether a frame must say that it was accepted.

        Raises:
            GrantRefused, ReplayedNonce, ForgottenPut, FrameRefused, UnknownRegion, InvalidDescriptor: it is refused.
            CorruptHeaderError, UnsupportedHeaderVersionError: it is none.
        """
        if len(text) > _LONGEST:
            self._refused()
            raise FrameRefused(peer=str(self._peer), reason=f"a put with a message of {len(text)} bytes")
        region = self._region
        if region is not None and self._regions.stands(region):
            with self._lock:
                admitted = doorbell.admit(
                    text,
                    doorbell.HEADER_BYTES,
                    self._nonces,
                    self._history.puts.marks,
                    region.region,
                    self._nbytes,
                    limits.UNIT_BYTES_MAX,
                    page.view if page is not None else None,
                )
            if admitted is not None:
                seq, notif, awaited = admitted
                if notif:
                    self._on_notif(self._peer.node, notif)
                return seq, awaited or page is None
        return self._step_by_step(text, page)

    def _step_by_step(self, text: memoryview, page: AnswersGiven | None) -> tuple[int, bool]:
        try:
            seq, put, region, offset, nbytes, nonce, notif = doorbell.read(text, self._peer)
            with self._lock:
                self._history.nonces.use(nonce)
                found = self._regions.get(region)
                inside = 1 <= nbytes <= limits.UNIT_BYTES_MAX and 0 <= offset <= found.nbytes - nbytes
                if not inside or found.access is not Access.WRITE:
                    refuse_piece(found, offset, nbytes, self._peer)
                fresh = notif and self._history.puts.announce(put)
        except KVError:
            self._refused()
            raise
        self._region, self._nbytes = found, found.nbytes
        if fresh:
            self._on_notif(self._peer.node, notif)
        return seq, page is None or page.give(seq)
