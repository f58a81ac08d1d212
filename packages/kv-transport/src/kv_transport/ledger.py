"""What peers may do with our memory right now: open grants, live leases, and what they have done so far.

Every byte that a peer writes passes `admit` and `land` here; what it reads passes the table of leases (`reads`). IO
threads and the loop both come here, so one lock guards everything; it is held for table look-ups only, never for a
copy.

L1: a unit lands only under an open grant, from the writer that opened it, in the generation that was granted, with a
fresh nonce. L2: bytes become visible (checksum table, layer readiness) only after they were verified. L3: a revoked
grant is clear once no unit is landing and no one-sided writer can still reach the slots; only then `fenced` is called.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kv_core.errors import KVError
from kv_core.header import read_stamps
from kv_core.ids import NodeId
from kv_core.namespace import EXACT, Fidelity
from kv_transport import limits
from kv_transport.arena import Arena
from kv_transport.codecs import Codec, encoded_cell_nbytes
from kv_transport.errors import (
    ChecksumMismatch,
    GrantBusy,
    GrantRefused,
    QuarantineFull,
    TransferTooLarge,
)
from kv_transport.frames import UnitHead
from kv_transport.lease_table import LeaseTable
from kv_transport.ledger_items import DoneGrant, GrantEntry, Landing, Session
from kv_transport.poster import LoopPoster
from kv_transport.progress import GrantProgress, span_mask
from kv_transport.regions import RegionTable, SharedBuffer
from kv_transport.replay import PeerHistory
from kv_transport.run_puts import RunPuts
from kv_transport.ticket_checks import check_plain_unit, codec_of, require_generations, unpack_checks
from kv_transport.tickets import WriteGrant
from kv_transport.types import Access, PeerName
from kv_transport.unit_header import check_header, combined, ticket_header


class Ledger:
    """See the module."""

    def __init__(self, regions: RegionTable, poster: LoopPoster, on_notif: Callable[[NodeId, bytes], None]) -> None:
        self.reads: Final = LeaseTable(regions)
        self._regions: Final = regions
        self._poster = poster
        self._on_notif = on_notif
        self._lock = threading.RLock()
        self._grants: dict[int, GrantEntry] = {}
        self._done: OrderedDict[int, DoneGrant] = OrderedDict()
        self._histories: dict[PeerName, PeerHistory] = {}
        self._quarantined: dict[int, GrantEntry] = {}
        self._received: dict[str, int] = {}
        self.quarantine_max = limits.QUARANTINE_SLOTS_MAX
        self.checksum_failures = 0
        self.refusals = 0

    # Grants, from the owner's side.

    def issue(self, grant: WriteGrant, arena: Arena) -> GrantEntry:
        """Open a grant; its region stays registered until `settle` or `fenced`.

        Raises:
            TransferTooLarge: `GRANTS_MAX` are open.
            StaleGeneration: the arena has moved on.
        """
        slots = np.array(grant.slots, np.int64)
        require_generations(arena, grant)
        progress = GrantProgress(grant.layer_start, grant.layer_end, grant.num_positions)
        entry = GrantEntry(grant, arena, slots, progress)
        with self._lock:
            if len(self._grants) >= limits.GRANTS_MAX:
                raise TransferTooLarge(what="list of grants", size=len(self._grants) + 1, limit=limits.GRANTS_MAX)
            self._regions.use(grant.region)
            self._grants[grant.ticket] = entry
        return entry

    def entry(self, ticket: int) -> GrantEntry:
        """Raises `GrantRefused` when there is no such grant."""
        with self._lock:
            entry = self._grants.get(ticket)
        if entry is None:
            raise GrantRefused(ticket=ticket, reason="no such grant is open")
        return entry

    def revoke(self, ticket: int) -> bool:
        """End a grant that is not complete: nothing more lands. `fenced` is called when nothing more can.

        Returns:
            Whether there was something to end. If not, the grant is complete, though its listener may not have been
            told yet: nobody can write, and `fenced` is not called.
        """
        with self._lock:
            entry = self._grants.get(ticket)
            if entry is None:
                return False
            if entry.revoked:
                return True
            entry.revoked = True
            session = entry.session if entry.one_sided_writer else None
        if session is not None:
            session.send_fence(ticket)
        self._clear_if_possible(entry)
        return True

    def quarantine(self, ticket: int) -> None:
        """List a revoked grant's slots as unusable."""
        with self._lock:
            entry = self._grants.get(ticket)
            if entry is not None:
                self._quarantined[ticket] = entry

    def quarantined_slots(self, node: NodeId | None) -> int:
        """Slots that wait for a fence on that node, or on any."""
        with self._lock:
            return sum(
                entry.grant.num_positions
                for entry in self._quarantined.values()
                if node is None or (entry.writer is not None and entry.writer.node == node)
            )

    # Grants, from the writer's side.

    def open(self, session: Session, ticket: int, attempt: int, fidelity: Fidelity = EXACT) -> tuple[list[int], int]:
        """A writer announces itself and what it has: the verified bits per layer, and the number of positions.

        `attempt` grows: a link that broke may deliver its question after the next link's, and must not take over.

        Raises:
            GrantRefused, QuarantineFull: with the reason.
        """
        with self._lock:
            if ticket in self._done:
                return self._open_done(session, ticket)
            entry = self._grants.get(ticket)
            if entry is None or entry.revoked:
                raise GrantRefused(ticket=ticket, reason="no such grant is open")
            self._may_open(session, entry, fidelity)
            if attempt <= entry.attempt:
                raise GrantRefused(ticket=ticket, reason="its writer has come back by another link")
            former = entry.session
            if former is not None and former is not session and (entry.landing or former.may_lag):
                # Units of its former link may still arrive. It is ended, and the writer asks again.
                self._poster.post(former.supersede)
                raise GrantBusy(ticket=ticket)
            entry.writer, entry.session = session.peer, session
            entry.one_sided_writer = session.one_sided
            entry.attempt, entry.source_fidelity = attempt, fidelity
            listener, verified = entry.listener, entry.progress.verified()
        if listener is not None:
            self._poster.run(lambda: listener.opened(session))
        return verified, entry.grant.num_positions

    def _open_done(self, session: Session, ticket: int) -> tuple[list[int], int]:
        done = self._done[ticket]
        if done.writer != session.peer:
            raise GrantRefused(ticket=ticket, reason="it was completed by another writer")
        return [span_mask(0, done.num_positions)] * done.num_layers, done.num_positions

    def _may_open(self, session: Session, entry: GrantEntry, fidelity: Fidelity) -> None:
        grant = entry.grant
        if not fidelity.is_exact and fidelity.codec not in grant.codecs:
            accepted = ", ".join(["exact", *grant.codecs])
            raise GrantRefused(ticket=grant.ticket, reason=f"fidelity {fidelity} is not accepted here, only {accepted}")
        if grant.writer and grant.writer != session.peer.node:
            raise GrantRefused(ticket=grant.ticket, reason=f"it is for {grant.writer}")
        if entry.writer is not None and entry.writer != session.peer:
            raise GrantRefused(ticket=grant.ticket, reason=f"{entry.writer} has opened it")
        if grant.transports and session.scheme not in grant.transports:
            raise GrantRefused(ticket=grant.ticket, reason=f"{session.scheme} is not one of {grant.transports}")
        if session.one_sided:
            slots = self.quarantined_slots(session.peer.node)
            if slots + grant.num_positions > self.quarantine_max:
                raise QuarantineFull(slots=slots, peer=session.peer.node, limit=self.quarantine_max)

    def gave_up(self, session: Session, ticket: int, error: KVError) -> None:
        """The writer will not complete a grant, and has stopped writing."""
        self._one_sided_over(ticket, session.peer)
        self._lost(ticket, session.peer, error, dead=True)

    def fenced(self, session: Session, ticket: int) -> None:
        """The writer confirms a fence."""
        self._one_sided_over(ticket, session.peer)

    def session_lost(self, session: Session, error: KVError, *, clean: bool) -> None:
        """A connection ended; `clean` if the peer said that it had stopped writing."""
        for entry in self._entries_of(session.peer):
            if entry.session is session:
                if clean:
                    self._one_sided_over(entry.grant.ticket, session.peer)
                self._lost(entry.grant.ticket, session.peer, error, dead=False)

    def session_silent(self, session: Session, error: KVError) -> None:
        """The peer does not answer any more: its hand-overs fail, though it may still be able to write."""
        for entry in self._entries_of(session.peer):
            if entry.session is session:
                self._lost(entry.grant.ticket, session.peer, error, dead=True)

    def may_still_write(self, peer: PeerName) -> bool:
        """Whether a fence on that peer's one-sided access is still to come."""
        return any(entry.one_sided_writer for entry in self._entries_of(peer))

    def process_gone(self, peer: PeerName, error: KVError) -> None:
        """The peer's process has exited: it writes nothing any more."""
        for entry in self._entries_of(peer):
            self._one_sided_over(entry.grant.ticket, peer)
            self._lost(entry.grant.ticket, peer, error, dead=True)

    def _entries_of(self, peer: PeerName) -> list[GrantEntry]:
        with self._lock:
            return [entry for entry in self._grants.values() if entry.writer == peer]

    def _lost(self, ticket: int, peer: PeerName, error: KVError, *, dead: bool) -> None:
        with self._lock:
            entry = self._grants.get(ticket)
            if entry is None or entry.writer != peer:
                return
            listener = entry.listener
        if listener is not None:
            self._poster.run(lambda: listener.writer_lost(error, dead))

    def _one_sided_over(self, ticket: int, peer: PeerName) -> None:
        with self._lock:
            entry = self._grants.get(ticket)
            if entry is None or entry.writer != peer:
                return
            entry.one_sided_writer = False
        self._clear_if_possible(entry)

    def _clear_if_possible(self, entry: GrantEntry) -> None:
        """Invariant L3."""
        with self._lock:
            if not entry.revoked or entry.clear or entry.landing or entry.one_sided_writer:
                return
            entry.clear = True
            ticket = entry.grant.ticket
            self._grants.pop(ticket, None)
            self._quarantined.pop(ticket, None)
            self._regions.unuse(entry.grant.region)
            listener = entry.listener
        if listener is not None:
            self._poster.run(listener.fenced)

    # Units.

    def admit(self, session: Session, head: UnitHead) -> Landing:
        """A unit is about to land (or, one-sided, has been placed). End it with `land` or `abort`.

        Raises:
            GrantRefused, StaleGeneration, ReplayedNonce, ForgottenPut, FrameRefused, UnknownRegion, InvalidDescriptor.
        """
        nonce, checksum = read_stamps(head.header)
        try:
            with self._lock:
                history = self._history(session.peer)
                history.nonces.use(nonce)
                if head.notif:
                    history.puts.require(head.put)
                if head.ticket:
                    return self._admit_granted(session, head, checksum)
            region, codec, offsets, sizes, expected = check_plain_unit(self._regions, session, head, checksum)
        except KVError:
            self.refusals += 1
            raise
        self._regions.use(head.region)
        return Landing(session, head, None, region.memory, head.region, offsets, sizes, expected, 0, codec)

    def place(self, session: Session, head: UnitHead) -> None:
        """A one-sided writer has placed a unit, and checked it in our memory itself: `admit` and `land` in one.

        Raises:
            as they do.
        """
        if head.ticket:
            self.land(self.admit(session, head))
            return
        nonce, checksum = read_stamps(head.header)
        try:
            with self._lock:
                self._history(session.peer).nonces.use(nonce)
            check_plain_unit(self._regions, session, head, checksum)
            self._tell(session, head)
        except KVError:
            self.refusals += 1
            raise

    def run_puts(self, session: Session) -> RunPuts:
        """For a connection over which pieces of open regions are put without a head."""
        with self._lock:
            history = self._history(session.peer)
        return RunPuts(session.peer, history, self._lock, self._regions, self._on_notif, self._count_refusal)

    def _count_refusal(self) -> None:
        self.refusals += 1

    def _admit_granted(self, session: Session, head: UnitHead, checksum: int) -> Landing:
        entry = self._grants.get(head.ticket)
        if entry is None or entry.revoked or entry.session is not session:
            raise GrantRefused(ticket=head.ticket, reason="it is not open on this connection")
        grant = entry.grant
        require_generations(entry.arena, grant, head.start, head.end)
        codec = codec_of(session, head)
        if codec is not Codec.NONE and codec.value not in grant.codecs:
            raise GrantRefused(ticket=grant.ticket, reason=f"{codec.value} is not one of the codecs {grant.codecs}")
        sizes = [entry.arena.shape.cell_nbytes] * (head.end - head.start)
        expected = unpack_checks(head.checks, len(sizes), session.peer)
        check_header(
            head.header,
            checksum,
            ticket_header(grant, head.layer, head.start, head.end),
            combined(expected, [encoded_cell_nbytes(codec, entry.arena.geometry)] * len(sizes)),
            peer=session.peer,
            transport=session.scheme,
            cells=len(sizes),
        )
        fresh = entry.progress.begin(head.layer, head.start, head.end)
        entry.landing += 1
        offsets = entry.arena.shape.offsets(entry.slots[head.start : head.end], head.layer).tolist()
        return Landing(session, head, entry, entry.arena, grant.region, offsets, sizes, expected, fresh, codec)

    def land(
        self,
        landing: Landing,
        checks: list[int] | None = None,
        stored: list[int] | None = None,
        wire_nbytes: int | None = None,
    ) -> None:
        """The unit's bytes are in place. `checks` are what we computed over what came; None if a one-sided writer took
        the expected ones from our memory itself.

        Args:
            stored: checksums of the cells in memory, where they are not `checks`.
            wire_nbytes: length of the payload, where it is not that of the cells.

        Raises:
            ChecksumMismatch: they are not the bytes that were sent; nothing became visible.
            GrantRefused: the grant was revoked meanwhile.
        """
        head, entry = landing.head, landing.entry
        if checks is not None and checks != landing.expected:
            self.abort(landing)
            bad = sum(ours != theirs for ours, theirs in zip(checks, landing.expected, strict=True))
            self.count_checksum_failure()
            raise ChecksumMismatch(
                peer=str(landing.session.peer),
                transport=landing.session.scheme,
                bad=bad,
                total=len(checks),
                layer=head.layer,
            )
        if entry is None:
            self._over(landing)
        else:
            self._land_granted(landing, entry, stored or landing.expected, wire_nbytes)
        self._tell(landing.session, head)

    def _tell(self, session: Session, head: UnitHead) -> None:
        """What a unit brought beside its bytes, which are verified; once a put. Raises `ForgottenPut`."""
        if not head.notif:
            return
        with self._lock:
            fresh = self._history(session.peer).puts.announce(head.put)
        if fresh:
            self._poster.run(partial(self._on_notif, session.peer.node, head.notif))

    def _land_granted(self, landing: Landing, entry: GrantEntry, stored: list[int], wire_nbytes: int | None) -> None:
        head, grant = landing.head, entry.grant
        with self._lock:
            if entry.revoked:
                self.abort(landing)
                raise GrantRefused(ticket=grant.ticket, reason="it was revoked")
            landing.over = True
            entry.landing -= 1
            cells = [cell for cell in range(head.end - head.start) if landing.writable(cell)]
            if cells:
                slots = entry.slots[head.start : head.end][cells]
                entry.arena.checks[head.layer, slots] = np.array(stored, np.uint64)[cells]
            entry.nbytes += (nbytes := sum(landing.sizes[cell] for cell in cells))
            entry.wire_nbytes += nbytes if wire_nbytes is None else wire_nbytes
            entry.units += 1
            if cells:
                codec = landing.codec.value
                entry.codecs[codec] = entry.codecs.get(codec, 0) + 1
            scheme = landing.session.scheme
            entry.transports[scheme] = entry.transports.get(scheme, 0) + nbytes
            self._received[scheme] = self._received.get(scheme, 0) + nbytes
            layer_done = entry.progress.land(head.layer, landing.fresh)
            if entry.progress.complete:
                self._complete(entry)
            listener = entry.listener
        if layer_done and listener is not None:
            self._poster.run(lambda: listener.layer_done(head.layer))

    def _complete(self, entry: GrantEntry) -> None:
        """Remember a complete grant, so that a writer whose last acknowledgement was lost is told so."""
        grant, ticket = entry.grant, entry.grant.ticket
        del self._grants[ticket]
        self._regions.unuse(grant.region)
        self._done[ticket] = DoneGrant(entry.writer, grant.layer_end - grant.layer_start, grant.num_positions)
        if len(self._done) > limits.GRANTS_MAX:
            self._done.popitem(last=False)

    def abort(self, landing: Landing) -> None:
        """The unit did not make it. Idempotent."""
        with self._lock:
            if landing.over:
                return
            self._over(landing)
            entry = landing.entry
            if entry is None:
                return
            entry.progress.abort(landing.head.layer, landing.fresh)
            entry.landing -= 1
        self._clear_if_possible(entry)

    def _over(self, landing: Landing) -> None:
        landing.over = True
        if landing.entry is None:
            self._regions.unuse(landing.region)

    def _history(self, peer: PeerName) -> PeerHistory:
        history = self._histories.get(peer)
        if history is None:
            history = self._histories[peer] = PeerHistory(str(peer))
            # Earlier lives of a node cannot come back: their sessions are refused at the handshake.
            for other in [name for name in self._histories if name.node == peer.node and name != peer]:
                if other.incarnation < peer.incarnation:
                    del self._histories[other]
        return history

    def may_map(self, session: Session, region: int, ticket: int, *, write: bool) -> bool:
        """Whether a peer may map a region; the answer is whether it gets a writable descriptor.

        Raises:
            GrantRefused, StaleGeneration, UnknownRegion.
        """
        found = self._regions.get(region)
        if write:
            if found.access is Access.WRITE:
                return True
            entry = self.entry(ticket)
            if entry.grant.region != region or entry.session is not session or entry.revoked:
                raise GrantRefused(ticket=ticket, reason=f"it does not allow writing region {region} here")
            require_generations(entry.arena, entry.grant)
            return True
        if found.access is Access.NONE:
            self.reads.require(ticket, region)
        return False

    def memory(self, region: int) -> Arena | SharedBuffer:
        """Raises `UnknownRegion`."""
        return self._regions.get(region).memory

    def count_checksum_failure(self) -> None:
        """Bytes of any direction that did not pass their check."""
        with self._lock:
            self.checksum_failures += 1

    # What there is.

    def grants(self) -> list[GrantEntry]:
        with self._lock:
            return list(self._grants.values())

    def received_bytes(self) -> dict[str, int]:
        """Verified KV bytes that peers have written, by scheme."""
        with self._lock:
            return dict(self._received)

    def is_quarantined(self, ticket: int) -> bool:
        with self._lock:
            return ticket in self._quarantined


def new_ticket() -> int:
    """A ticket that nobody can guess and that is never used twice."""
    return secrets.randbits(63) | 1
