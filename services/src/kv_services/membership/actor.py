"""Keeps one process's view of its cluster: publishes its own heartbeats, hears those of the others, judges silence.

A peer that differs in what must agree (wire version, hash scheme, weights or block size of a model that both serve) is
refused: it gets no work, and both values are told. Of the two, the one that came later ends itself.

One subscription per peer carries everything that peer publishes; this is the one place that subscribes, and it hands
other messages to whoever registered for their type. Everything happens on the loop and is bounded per event.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, TypeVar

from kv_bus.interface import (
    Bus,
    Event,
    GapDetected,
    OriginRestarted,
    PeerDown,
    PeerEvent,
    PeerRefused,
    PeerRestarted,
    PeerUp,
    Reply,
    Request,
    Subscription,
    Watch,
)
from kv_core.clock import Clock
from kv_core.compatibility import Compatibility, IncompatiblePeerError, check_compatible
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message
from kv_services.config import BusSection, Role
from kv_services.errors import LifeOverError
from kv_services.membership.state import (
    Effect,
    HeartbeatSeen,
    LeaveSeen,
    LinkLost,
    Liveness,
    MemberDied,
    MemberRecovered,
    MembershipView,
    MemberSuspected,
    MemberUp,
    TimePassed,
)
from kv_services.messages import Heartbeat, LifeIsOver, Load

_log = logging.getLogger(__name__)
_MS: Final = 1_000_000
LEFT_STATE: Final = "left"
STANDSTILL_BEATS: Final = 3
"""A process that is this many of its own heartbeats late stood still: stopped, or without a processor."""
_KV_ROLES: Final = frozenset((Role.PREFILL.value, Role.DECODE.value))
"""Roles between which a node may change while it runs."""
M = TypeVar("M", bound=Message)


class ClusterView:
    """Who is alive and how busy, as this process knows it. A supervised child: `start`, `run`, `close`.

    Args:
        peers: the other members and their roles, from the cluster file.
        load: this process's own load, asked for at each heartbeat.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        settings: BusSection,
        role: Role,
        peers: dict[NodeId, Role],
        load: Callable[[], Load],
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._interval_s = settings.heartbeat_interval_ms / 1000
        self._role = role
        self._load = load
        self.roles = dict(peers)
        self.view = MembershipView(
            settings.suspect_after_ms * _MS,
            settings.dead_after_ms * _MS,
            standstill_ns=STANDSTILL_BEATS * settings.heartbeat_interval_ms * _MS,
        )
        self._loads: dict[NodeId, Heartbeat] = {}
        self._listeners: list[Callable[[Effect], None]] = []
        self._gap_listeners: list[Callable[[NodeId], None]] = []
        self._published: dict[type[Message], Callable[[Event[Message]], None]] = {}
        self._subscriptions: dict[NodeId, Subscription] = {}
        self._watch: Watch | None = None
        self._closed: asyncio.Event | None = None
        self.state = "serving"
        self.compatibility = Compatibility(())
        self.refused: dict[NodeId, IncompatiblePeerError] = {}
        self.life_over: LifeOverError | None = None
        self._not_joined: IncompatiblePeerError | None = None
        self._settled = False
        self._when_settled: list[Callable[[], None]] = []
        # Where members are listed elsewhere, they are not known before that was read.
        self.is_listed: Callable[[], bool] = _always
        # Deaths that others judged travel with the metadata: what is over there is over here.
        self.known_over: Callable[[NodeId, Incarnation], bool] = _nobody

    def on_change(self, listener: Callable[[Effect], None]) -> None:
        """Call `listener` with each effect of the view, in order of registration."""
        self._listeners.append(listener)

    def on_gap(self, listener: Callable[[NodeId], None]) -> None:
        """Call `listener` with the node of which something published was lost."""
        self._gap_listeners.append(listener)

    def on_published(self, message_type: type[M], listener: Callable[[Event[M]], None]) -> None:
        """Hand published messages of that type to `listener`."""
        self._published[message_type] = listener  # type: ignore[assignment]  # only called with events of that type

    def unheard(self) -> list[NodeId]:
        """Members that hold KV and have not said yet how they are; those that died have said it."""
        members = self.view.members
        return [
            node_id
            for node_id, role in self.roles.items()
            if role.holds_kv and node_id not in self._loads and members[node_id].liveness is not Liveness.DEAD
        ]

    @property
    def settled(self) -> bool:
        """Whether this process can tell who is there: every member that holds KV was heard since its start, or had
        `dead_after_ms` for it. Once true it stays so."""
        if not self._settled and (self.view.listened_enough or (self.is_listed() and not self.unheard())):
            self._settled = True
        return self._settled

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call `call` as soon as this process can tell who is there: at once, but in its first moments."""
        if self.settled:
            call()
        else:
            self._when_settled.append(call)

    def load_of(self, node_id: NodeId) -> Load:
        """The last load that node reported; all zero before its first heartbeat."""
        heartbeat = self._loads.get(node_id)
        return heartbeat.load if heartbeat else Load()

    def alive(self, *roles: Role) -> list[NodeId]:
        """Members of those roles that may be given work: alive and serving, suspects last."""
        serving = [
            node_id
            for node_id in self.view.alive()
            if self.roles.get(node_id) in roles and self._state_of(node_id) == "serving" and node_id not in self.refused
        ]
        return sorted(serving, key=lambda node_id: self.view.members[node_id].liveness is Liveness.SUSPECT)

    def readable(self, *roles: Role) -> list[NodeId]:
        """Members of those roles that were heard of just now, also those that are leaving: they still give what they
        have."""
        members = self.view.members
        return [
            node_id
            for node_id in self.view.alive()
            if self.roles.get(node_id) in roles
            and node_id not in self.refused
            and members[node_id].liveness is Liveness.ALIVE
        ]

    def certain(self, *roles: Role) -> list[NodeId]:
        """Members of those roles that were heard of just now: for work that would wait for a silent one."""
        return [node_id for node_id in self.alive(*roles) if self.view.members[node_id].liveness is Liveness.ALIVE]

    def wires(self) -> dict[str, str]:
        """Wire version and revision of each member that was heard."""
        return {
            node_id: heartbeat.compatibility.wire
            for node_id, heartbeat in self._loads.items()
            if heartbeat.compatibility is not None
        }

    def wire_revision(self, node_id: NodeId) -> int:
        """The wire revision that a member speaks; 0, the first, before its first heartbeat."""
        heartbeat = self._loads.get(node_id)
        told = heartbeat.compatibility if heartbeat is not None else None
        return told.wire_revision if told is not None else 0

    def incarnation(self, node_id: NodeId) -> Incarnation:
        """The living incarnation of a member; 0 before its first sign of life."""
        member = self.view.members.get(node_id)
        return member.incarnation if member else Incarnation(0)

    async def start(self) -> None:
        """Subscribe to every peer and begin to beat."""
        self._closed = asyncio.Event()
        self._watch = self._bus.watch_peers(self._on_peer)
        self._bus.handle(LifeIsOver, self._on_life_over)
        for node_id in self.roles:
            self._listen_to(node_id)

    async def run(self) -> None:
        """Beat and judge until closed.

        Raises:
            IncompatiblePeerError: the cluster is not one to join.
            LifeOverError: a member declared this life over.
        """
        assert self._closed is not None
        while not self._closed.is_set():
            self._beat()
            if self._not_joined is not None:
                raise self._not_joined
            if self.life_over is not None:
                raise self.life_over
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._closed.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Tell the others that this life is over, and stop at once. Idempotent."""
        if self._closed is not None and not self._closed.is_set():
            self._closed.set()
            self.say(LEFT_STATE)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for subscription in self._subscriptions.values():
            subscription.close()
        self._subscriptions.clear()

    def add_member(self, node_id: NodeId, role: Role) -> None:
        """Make a process a member whose life is watched; the bus knows its address already. Twice is once."""
        self.roles[node_id] = role
        if self._closed is not None and not self._closed.is_set():
            self._listen_to(node_id)

    def remove_member(self, node_id: NodeId) -> None:
        """Forget a member that is not alive; unknown names are ignored."""
        self.view.remove(node_id)
        self.roles.pop(node_id, None)
        self._loads.pop(node_id, None)
        self.refused.pop(node_id, None)
        subscription = self._subscriptions.pop(node_id, None)
        if subscription is not None:
            subscription.close()

    def _listen_to(self, node_id: NodeId) -> None:
        self.view.add(node_id)
        if node_id not in self._subscriptions:
            self._subscriptions[node_id] = self._bus.subscribe(
                node_id, self._on_event, self._on_gap, on_restart=self._on_restart
            )

    def say(self, state: str) -> None:
        """Be in that state from now on, and let everybody know at once."""
        self.state = state
        try:
            self._bus.publish(
                Heartbeat(self._bus.node_id, self._role.value, self.state, self._load(), self.compatibility)
            )
        except KVError as error:
            # The bus may be down already; silence says the same, later.
            _log.debug("not said state=%s cause=%s", state, error)

    @property
    def role(self) -> Role:
        """What this process does now."""
        return self._role

    def take_role(self, role: Role) -> None:
        """Be of another role from now on; said with the next `say`."""
        self._role = role

    def _follow_role(self, node_id: NodeId, role: str) -> None:
        known = self.roles.get(node_id)
        if known is not None and known.value != role and role in _KV_ROLES and known.value in _KV_ROLES:
            _log.info("member changed its role node=%s role=%s", node_id, role)
            self.roles[node_id] = Role(role)

    def _beat(self) -> None:
        self._bus.publish(Heartbeat(self._bus.node_id, self._role.value, self.state, self._load(), self.compatibility))
        self._tell(self.view.step(TimePassed(self._clock.monotonic_ns())))
        self._tell_settled()

    def _tell_settled(self) -> None:
        if self._when_settled and self.settled:
            calls, self._when_settled = self._when_settled, []
            for call in calls:
                call()

    def _state_of(self, node_id: NodeId) -> str:
        heartbeat = self._loads.get(node_id)
        return heartbeat.state if heartbeat else "starting"

    def _on_event(self, event: Event[Message]) -> None:
        self._seen(event.origin, event.incarnation)
        if self._tell_if_over(event.origin, event.incarnation):
            return
        message = event.message
        if isinstance(message, Heartbeat):
            if message.state == LEFT_STATE:
                self._tell(self.view.step(LeaveSeen(event.origin, event.incarnation)))
            elif self.view.is_current(event.origin, event.incarnation):
                if event.origin not in self._loads:
                    self._note_wire(event.origin, message.compatibility)
                self._loads[event.origin] = message
                self._follow_role(event.origin, message.role)
                self._compare(event.origin, event.incarnation, message.compatibility)
                self._tell_settled()
            return
        listener = self._published.get(type(message))
        if listener is not None:
            listener(event)

    def _tell_if_over(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Whether that life is over here; if so it is told, each time it is heard of, until it has understood."""
        member = self.view.members.get(node_id)
        if member is None:
            return True
        if self.view.is_current(node_id, incarnation) and not self.known_over(node_id, incarnation):
            return False
        try:
            self._bus.send(node_id, LifeIsOver(incarnation))
        except KVError as error:
            _log.debug("not told that its life is over node=%s cause=%s", node_id, error)
        return True

    def _on_life_over(self, request: Request[LifeIsOver]) -> Reply:
        if request.message.incarnation == self._bus.incarnation:
            self.life_over = LifeOverError(
                node=self._bus.node_id, by=request.sender, incarnation=request.message.incarnation
            )
        return None

    def _compare(self, node_id: NodeId, incarnation: Incarnation, theirs: Compatibility | None) -> None:
        try:
            check_compatible(node_id, self.compatibility, theirs or Compatibility(()))
        except IncompatiblePeerError as error:
            if node_id not in self.refused:
                _log.error("peer refused: %s", error)
            self.refused[node_id] = error
            # Incarnations begin with the second of the start: whoever came later is the one that joins.
            if self._bus.incarnation >= incarnation:
                self._not_joined = error
        else:
            self.refused.pop(node_id, None)

    def _note_wire(self, node_id: NodeId, theirs: Compatibility | None) -> None:
        ours = self.compatibility.wire
        if theirs is not None and theirs.wire != ours:
            _log.info("member speaks another wire node=%s theirs=%s ours=%s", node_id, theirs.wire, ours)

    def _on_gap(self, gap: GapDetected) -> None:
        for listener in self._gap_listeners:
            listener(gap.origin)

    def _on_restart(self, restarted: OriginRestarted) -> None:
        self._seen(restarted.origin, restarted.incarnation)

    def _on_peer(self, event: PeerEvent) -> None:
        match event:
            case PeerUp(node_id, incarnation) | PeerRestarted(node_id, incarnation):
                self._seen(node_id, incarnation)
            case PeerDown(node_id):
                self._tell(self.view.step(LinkLost(self._clock.monotonic_ns(), node_id)))
            case PeerRefused(node_id, cause):
                _log.error("peer refuses us node=%s cause=%s", node_id, cause)

    def _seen(self, node_id: NodeId, incarnation: Incarnation) -> None:
        self._tell(self.view.step(HeartbeatSeen(self._clock.monotonic_ns(), node_id, incarnation)))

    def _tell(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case MemberUp(node_id, incarnation):
                    _log.info("member up node=%s incarnation=%d", node_id, incarnation)
                case MemberSuspected(node_id, _, silent_ns):
                    _log.warning("member suspected node=%s silent_ms=%d", node_id, silent_ns // _MS)
                case MemberRecovered(node_id):
                    _log.info("member recovered node=%s", node_id)
                case MemberDied(node_id, incarnation, cause):
                    _log.warning("member died node=%s incarnation=%d cause=%s", node_id, incarnation, cause)
                    self._loads.pop(node_id, None)
            for listener in self._listeners:
                listener(effect)


def _nobody(node_id: NodeId, incarnation: Incarnation) -> bool:
    return False


def _always() -> bool:
    return True
