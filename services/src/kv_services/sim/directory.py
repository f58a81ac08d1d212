"""The discovery service of a simulated cluster, and how one node follows it.

Stands for etcd: a record under a lease for each process, one listing and one ordered watch for each session. What a
node makes of it is the production `MemberList`. Whoever cannot reach the service keeps the members he knows; his own
record stays until its lease ends, and his next session begins with a listing as a whole.
"""

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from kv_core.ids import NodeId
from kv_services.membership.discovery_state import Event, Listing, ListingLost, RecordGone, RecordPut
from kv_services.membership.member_list import MemberList
from kv_services.membership.records import NodeRecord

LEASE_S: Final = 1.5
_DELAY_S: Final = 0.02


@dataclass(slots=True, eq=False)
class Session:
    """One node's lease, record and watch.

    Attributes:
        context: what the node hears runs in it.
        lease_ends: loop time.
        watching: whether changes are still told.
        last_told: loop time of the last thing that was or will be told.
    """

    record: NodeRecord
    hear: Callable[[Event], None]
    context: contextvars.Context
    lease_ends: float
    watching: bool = True
    last_told: float = 0.0


class SimDirectory:
    """See the module."""

    def __init__(self, rng: Random) -> None:
        self._random = rng
        # Leases end though the node that held them stands still.
        self._context = contextvars.copy_context()
        self._sessions: dict[NodeId, Session] = {}
        self._cut: dict[NodeId, int] = {}

    def open(self, record: NodeRecord, hear: Callable[[Event], None]) -> Session | None:
        """Put a record under a new lease and begin to watch; None when the node cannot reach the service."""
        if record.node in self._cut:
            return None
        loop = asyncio.get_running_loop()
        session = Session(record, hear, contextvars.copy_context(), loop.time() + LEASE_S)
        former = self._sessions.get(record.node)
        if former is not None:
            former.watching = False
        self._sessions[record.node] = session
        loop.call_at(session.lease_ends, self._expire, session, context=self._context)
        self._tell(session, Listing(tuple(other.record for other in self._sessions.values())))
        self._tell_others(record.node, RecordPut(record))
        return session

    def renew(self, session: Session) -> bool:
        """Keep a lease; False when it has ended, or the service cannot be reached."""
        if session.record.node in self._cut or not session.watching:
            return False
        session.lease_ends = asyncio.get_running_loop().time() + LEASE_S
        return True

    def revoke(self, session: Session) -> None:
        """End a lease, where the service can be told."""
        if session.record.node not in self._cut:
            self._end(session)

    def cut(self, node: NodeId) -> None:
        """That node does not reach the service any more."""
        self._cut[node] = self._cut.get(node, 0) + 1
        session = self._sessions.get(node)
        if session is not None:
            session.watching = False

    def heal(self, node: NodeId) -> None:
        """Undo one cut."""
        self._cut[node] -= 1
        if not self._cut[node]:
            del self._cut[node]

    def _expire(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < session.lease_ends:
            loop.call_at(session.lease_ends, self._expire, session, context=self._context)
        else:
            self._end(session)

    def _end(self, session: Session) -> None:
        session.watching = False
        node = session.record.node
        # A newer session put the record under its own lease.
        if self._sessions.get(node) is session:
            del self._sessions[node]
            self._tell_others(node, RecordGone(node))

    def _tell_others(self, node: NodeId, event: Event) -> None:
        for session in self._sessions.values():
            if session.record.node != node:
                self._tell(session, event)

    def _tell(self, session: Session, event: Event) -> None:
        if session.watching:
            loop = asyncio.get_running_loop()
            # In order: timers of one instant fire in none.
            at = max(loop.time() + self._random.random() * _DELAY_S, session.last_told + 1e-6)
            session.last_told = at
            loop.call_at(at, self._arrive, session, event, context=session.context)

    def _arrive(self, session: Session, event: Event) -> None:
        if session.watching:
            session.hear(event)


class SimDiscovery:
    """One life's part of it. A supervised child: `start`, `run`, `close`.

    Args:
        crashed: whether this life is over without a word.
    """

    def __init__(
        self, directory: SimDirectory, record: NodeRecord, members: MemberList, crashed: Callable[[], bool]
    ) -> None:
        self._directory = directory
        self._record = record
        self._members = members
        self._crashed = crashed
        self._closed: asyncio.Event | None = None

    async def start(self) -> None:
        self._closed = asyncio.Event()
        self._members.attach()

    async def run(self) -> None:
        """Hold one session after another until closed."""
        assert self._closed is not None
        session: Session | None = None
        while not self._closed.is_set():
            if session is None or not self._directory.renew(session):
                if session is not None:
                    self._hear(ListingLost())
                session = self._directory.open(self._record, self._hear)
            try:
                async with asyncio.timeout(LEASE_S / 3):
                    await self._closed.wait()
            except TimeoutError:
                continue
        if session is not None and not self._crashed():
            self._directory.revoke(session)

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.set()

    def _hear(self, event: Event) -> None:
        if self._closed is not None and not self._closed.is_set():
            self._members.hear(event)
