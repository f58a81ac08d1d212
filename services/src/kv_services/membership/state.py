"""Decides who is alive, from heartbeats and the passing of time.

Knows no socket and no clock: time arrives in events. The list of members is given (from the cluster file or a
discovery service); this machine only judges their lives.

M1: a member is DEAD only after `dead_after_ns` without a sign of life, when a higher incarnation of it is seen, or when
    it said itself that this life is over.
M2: death is sticky: a dead incarnation never comes back, whatever arrives late; only a higher one does.
M3: silence before the first sign of life is not death: such a member is UNSEEN.
M4: being idle is not being silent: any heartbeat counts, whatever load it reports.
M5: time in which this process itself stood still is nobody's silence: it could not have heard them.
M6: no death is declared by who hears less than half of those he last heard of, himself counted: he is the one cut off.
    Whoever is suspected is not heard. Time in which this process is cut off is nobody's silence, so that when it hears
    the first of them again the others have time to be heard too. (Two that lose each other may both judge.)
    It is not its word alone where a directory lists no longer who is silent: after `dead_after_ns` of both, he is dead.
M7: whoever was not heard in the first `dead_after_ns` is not waited for any more (M5 holds for that time too).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kv_core.errors import LocalProtocolError
from kv_core.ids import Incarnation, NodeId

_NEVER = Incarnation(0)
LEFT: Final = "it left"
GONE_MAX: Final = 4096
"""Members that went of which the last life is remembered; the longest gone are forgotten first."""


class Liveness(Enum):
    """What is known of one member."""

    UNSEEN = "unseen"
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class HeartbeatSeen:
    """A member showed a sign of life."""

    now_ns: int
    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The bus says that the connection to this member broke: a hint, not a verdict."""

    now_ns: int
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The view is asked to judge silence."""

    now_ns: int


@dataclass(frozen=True, slots=True)
class LeaveSeen:
    """A member said that this life of it is over."""

    node_id: NodeId
    incarnation: Incarnation


Event = HeartbeatSeen | LinkLost | TimePassed | LeaveSeen


@dataclass(frozen=True, slots=True)
class MemberUp:
    """A member (or a new incarnation of it) is alive."""

    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MemberSuspected:
    """A member was silent for `silent_ns`; nothing is taken from it yet."""

    node_id: NodeId
    incarnation: Incarnation
    silent_ns: int


@dataclass(frozen=True, slots=True)
class MemberRecovered:
    """A suspect showed a sign of life."""

    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MemberDied:
    """This incarnation is gone for good."""

    node_id: NodeId
    incarnation: Incarnation
    cause: str


Effect = MemberUp | MemberSuspected | MemberRecovered | MemberDied


def _listed(node_id: NodeId, incarnation: Incarnation) -> bool:
    return False


@dataclass(slots=True)
class Member:
    """One line of the view."""

    node_id: NodeId
    liveness: Liveness = Liveness.UNSEEN
    incarnation: Incarnation = _NEVER
    last_seen_ns: int = 0
    unlisted_ns: int | None = None


@dataclass(slots=True)
class MembershipView:
    """The lives of the members of one cluster, as one process sees them.

    Args:
        suspect_after_ns: silence after which a member is suspected.
        dead_after_ns: silence after which its incarnation is dead; more than `suspect_after_ns`.
        standstill_ns: time between two `TimePassed` from which on this process must have stood still; 0: it never does.
        is_unlisted: whether a directory listed this life and does so no more, as far as it can be asked.
    """

    suspect_after_ns: int
    dead_after_ns: int
    standstill_ns: int = 0
    is_unlisted: Callable[[NodeId, Incarnation], bool] = _listed
    members: dict[NodeId, Member] = field(default_factory=dict)
    _gone: dict[NodeId, Incarnation] = field(default_factory=dict)
    _judged_ns: int | None = None
    _listened_ns: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.suspect_after_ns < self.dead_after_ns:
            raise LocalProtocolError(detail="suspect_after must be positive and less than dead_after")

    def add(self, node_id: NodeId) -> None:
        """Make `node_id` a member whose life is watched; adding one twice changes nothing."""
        if node_id in self.members:
            return
        over = self._gone.pop(node_id, None)
        self.members[node_id] = Member(node_id) if over is None else Member(node_id, Liveness.DEAD, over)

    def remove(self, node_id: NodeId) -> None:
        """Forget a member that is not alive; M2 holds for it when it is added again.

        Raises:
            LocalProtocolError: it is alive, or suspected.
        """
        member = self.members.get(node_id)
        if member is None:
            return
        if member.liveness in (Liveness.ALIVE, Liveness.SUSPECT):
            raise LocalProtocolError(detail=f"{node_id} is {member.liveness.value}: only who is gone is forgotten")
        del self.members[node_id]
        if member.incarnation != _NEVER:
            self._gone[node_id] = member.incarnation
            if len(self._gone) > GONE_MAX:
                del self._gone[next(iter(self._gone))]

    @property
    def listened_enough(self) -> bool:
        """Whether who lives had the time to be heard: what is unseen by now is not there (M7)."""
        return self._listened_ns >= self.dead_after_ns

    def alive(self) -> list[NodeId]:
        """Members to which work may be given, in the order they were added."""
        return [m.node_id for m in self.members.values() if m.liveness in (Liveness.ALIVE, Liveness.SUSPECT)]

    def is_current(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Whether this incarnation is the living one."""
        member = self.members.get(node_id)
        return (
            member is not None
            and member.incarnation == incarnation
            and member.liveness in (Liveness.ALIVE, Liveness.SUSPECT)
        )

    def step(self, event: Event) -> list[Effect]:
        match event:
            case HeartbeatSeen():
                return self._heard(event)
            case LinkLost(now_ns, node_id):
                return self._link_lost(now_ns, node_id)
            case TimePassed(now_ns):
                return self._judge(now_ns)
            case LeaveSeen(node_id, incarnation):
                if not self.is_current(node_id, incarnation):
                    return []
                self.members[node_id].liveness = Liveness.DEAD
                return [MemberDied(node_id, incarnation, LEFT)]

    def check(self) -> None:
        """Assert what must hold of every member."""
        for member in self.members.values():
            assert (member.liveness is Liveness.UNSEEN) == (member.incarnation == 0), member

    def _heard(self, event: HeartbeatSeen) -> list[Effect]:
        member = self.members.get(event.node_id)
        if member is None or event.incarnation < member.incarnation:
            return []
        if event.incarnation > member.incarnation:
            effects: list[Effect] = []
            if member.liveness in (Liveness.ALIVE, Liveness.SUSPECT):
                cause = f"replaced by incarnation {event.incarnation}"
                effects.append(MemberDied(member.node_id, member.incarnation, cause))
            member.incarnation, member.liveness = event.incarnation, Liveness.ALIVE
            member.last_seen_ns = event.now_ns
            effects.append(MemberUp(member.node_id, member.incarnation))
            return effects
        if member.liveness is Liveness.DEAD:
            return []
        member.last_seen_ns = max(member.last_seen_ns, event.now_ns)
        if member.liveness is Liveness.SUSPECT:
            member.liveness = Liveness.ALIVE
            return [MemberRecovered(member.node_id, member.incarnation)]
        return []

    def _link_lost(self, now_ns: int, node_id: NodeId) -> list[Effect]:
        member = self.members.get(node_id)
        if member is None or member.liveness is not Liveness.ALIVE:
            return []
        member.liveness = Liveness.SUSPECT
        return [MemberSuspected(node_id, member.incarnation, max(0, now_ns - member.last_seen_ns))]

    def _forgive_standstill(self, now_ns: int) -> None:
        """Do not count as silence what passed since the last look, if nobody could be heard in it."""
        since_ns = 0 if self._judged_ns is None else now_ns - self._judged_ns
        self._judged_ns = now_ns
        if not self.standstill_ns or since_ns < self.standstill_ns:
            self._listened_ns += since_ns
            return
        for member in self.members.values():
            member.last_seen_ns = min(now_ns, member.last_seen_ns + since_ns)
            if member.unlisted_ns is not None:
                member.unlisted_ns = min(now_ns, member.unlisted_ns + since_ns)

    def _judge(self, now_ns: int) -> list[Effect]:
        since_ns = 0 if self._judged_ns is None else now_ns - self._judged_ns
        self._forgive_standstill(now_ns)
        effects: list[Effect] = []
        living = [m for m in self.members.values() if m.liveness in (Liveness.ALIVE, Liveness.SUSPECT)]
        # Members that are lost together were not last heard together: by `dead_after` the first of them would be judged
        # while the others still count as heard.
        heard = sum(1 for m in living if now_ns - m.last_seen_ns < self.suspect_after_ns)
        cut_off = 2 * (heard + 1) < len(living) + 1
        for member in living:
            unlisted_ns = self._unlisted_for(member, now_ns)
            silent_ns = now_ns - member.last_seen_ns
            if silent_ns < self.suspect_after_ns:
                continue
            if cut_off and unlisted_ns is None:
                longest_ns = max(self.suspect_after_ns, silent_ns - since_ns)
                member.last_seen_ns = max(member.last_seen_ns, now_ns - longest_ns)
            elif silent_ns >= self.dead_after_ns and not (cut_off and (unlisted_ns or 0) < self.dead_after_ns):
                member.liveness = Liveness.DEAD
                cause = f"silent for {silent_ns // 1_000_000} ms" + (" and listed no longer" if cut_off else "")
                effects.append(MemberDied(member.node_id, member.incarnation, cause))
                continue
            if member.liveness is Liveness.ALIVE:
                member.liveness = Liveness.SUSPECT
                effects.append(MemberSuspected(member.node_id, member.incarnation, silent_ns))
        return effects

    def _unlisted_for(self, member: Member, now_ns: int) -> int | None:
        """For how long the directory has listed this life no more; None if it does, or never did."""
        if self.is_unlisted(member.node_id, member.incarnation):
            if member.unlisted_ns is None:
                member.unlisted_ns = now_ns
            return now_ns - member.unlisted_ns
        if member.unlisted_ns is not None:
            # It is listed anew, so it lives, or did just now: it has time to be heard.
            member.unlisted_ns = None
            member.last_seen_ns = max(member.last_seen_ns, now_ns - self.suspect_after_ns)
        return None
