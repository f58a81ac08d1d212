"""Finding and fetching what was lost: digests, gaps, ranges.

Decides whom to compare with, what to ask of whom, and when to ask again. Everything is pulled by the one that lacks
it: a digest shows that something is missing (as does an update whose predecessor or dependency is not there), a range
request fetches it from whoever has it, and where no log reaches back a synchronisation takes over (sync.py).

D1: of one origin at most one range is asked for at a time. D2: a gap that lasts is asked for again, of each peer that
may have it in turn, until it is filled. D3: what a peer is known to have, it has.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kv_consistency import limits
from kv_consistency.causal_buffer import CausalBuffer
from kv_consistency.effects import SendTo
from kv_consistency.hlc import Timestamp
from kv_consistency.messages import Digest, RangeReply, RangeRequest
from kv_consistency.update_log import UpdateLog
from kv_consistency.version_vector import Origin, VersionVector
from kv_core.ids import Incarnation, NodeId

_SENT_KEPT = 4


@dataclass(slots=True)
class _Peer:
    incarnation: Incarnation
    seq: int = 0
    sent: dict[int, VersionVector] = field(default_factory=dict)
    known_seq: int = 0
    known: VersionVector | None = None
    over: frozenset[Origin] = frozenset()


@dataclass(slots=True)
class _Gap:
    since_ns: int
    source: NodeId | None = None
    asked: NodeId | None = None
    deadline_ns: int = 0
    tried: list[NodeId] = field(default_factory=list)


class AntiEntropy:
    """What one replica knows of its peers, and what it has asked of them."""

    __slots__ = ("_gaps", "_grace", "_peers", "_timeout", "_turn", "ranges_asked")

    def __init__(self, grace_ns: int = limits.GAP_GRACE_NS, timeout_ns: int = limits.REPLY_TIMEOUT_NS) -> None:
        self._grace = grace_ns
        self._timeout = timeout_ns
        self._peers: dict[NodeId, _Peer] = {}
        self._gaps: dict[Origin, _Gap] = {}
        self._turn: NodeId | None = None
        self.ranges_asked = 0

    def peers(self) -> list[NodeId]:
        """The living peers, in order."""
        return sorted(self._peers)

    def add_peer(self, origin: Origin) -> None:
        """A peer joined."""
        self._peers[origin.node] = _Peer(origin.incarnation)

    def remove_peer(self, origin: Origin) -> None:
        """That life of a peer is over."""
        peer = self._peers.get(origin.node)
        if peer is not None and peer.incarnation <= origin.incarnation:
            del self._peers[origin.node]
            for gap in self._gaps.values():
                if gap.asked == origin.node:
                    gap.asked = None

    def next_peer(self) -> NodeId | None:
        """Whom to compare with now: each in turn."""
        names = self.peers()
        if not names:
            return None
        later = [name for name in names if self._turn is not None and name > self._turn]
        self._turn = later[0] if later else names[0]
        return self._turn

    def start_after(self, node: NodeId) -> None:
        """Begin the round after our own name, so that replicas that start together do not all ask the same peer."""
        self._turn = node

    def digest_for(
        self,
        node: NodeId,
        vector: VersionVector,
        stamp: Timestamp,
        retired: Callable[[Origin], bool],
        over: list[Origin],
        answer: bool,
        reading_ns: int = 0,
    ) -> SendTo:
        """Our digest for that peer, as a difference to what it last said of itself."""
        peer = self._peers[node]
        peer.seq += 1
        peer.sent[peer.seq] = vector
        for seq in list(peer.sent)[:-_SENT_KEPT]:
            del peer.sent[seq]
        base = peer.known if peer.known is not None else VersionVector()
        # Of a retired origin everybody has all, so no difference is told whoever still counts it.
        seen = tuple(reach for reach in vector.delta(base) if not retired(reach.origin))
        # It may still count or mention a life that we retired: tell it as well.
        told = (origin for origin in (*base, *sorted(peer.over)) if retired(origin))
        ended = tuple(dict.fromkeys((*over, *told)))
        digest = Digest(peer.seq, peer.known_seq, seen, stamp.wall_ns, stamp.logical, answer, ended, reading_ns)
        return SendTo(node, digest)

    def take_digest(self, node: NodeId, digest: Digest) -> VersionVector | None:
        """The vector of the peer; None when it cannot be told from what is kept here (the next one will do)."""
        peer = self._peers.get(node)
        if peer is None:
            return VersionVector.of(digest.seen) if digest.base == 0 else None
        base = VersionVector() if digest.base == 0 else peer.sent.get(digest.base)
        if digest.seq <= peer.known_seq:
            return None
        if base is None:
            # It builds on a digest of ours that is forgotten here. Say ours in full: the next will build on that.
            peer.known_seq, peer.known = 0, None
            return None
        peer.known_seq = digest.seq
        peer.known = base.updated(digest.seen)
        peer.over = frozenset(digest.over)
        return peer.known

    def known(self, node: NodeId) -> VersionVector | None:
        """What a peer last said of itself."""
        peer = self._peers.get(node)
        return None if peer is None else peer.known

    def stable(self, own: VersionVector, retired: Callable[[Origin], bool]) -> VersionVector | None:
        """What every member has applied; None until all have said so, or while some have what is missing here."""
        stable = own
        for peer in self._peers.values():
            known = peer.known
            if known is None or any(known[origin] > own[origin] and not retired(origin) for origin in known):
                return None
            stable = stable.meet(known)
        return stable

    def agreed_over(self, origin: Origin, applied: int) -> bool:
        """Whether every member said that this life is over and that it has as much of it as we have. As nobody takes
        anything from a life that it holds for over, except from members, nobody will ever have more."""
        return all(
            peer.known is not None and origin in peer.over and peer.known[origin] == applied
            for peer in self._peers.values()
        )

    def pursues(self, origin: Origin, peer: NodeId) -> bool:
        """Whether a gap of the origin is open, and that peer is known to be who may fill it."""
        gap = self._gaps.get(origin)
        return gap is not None and gap.source == peer

    def open_gap(self, origin: Origin, peer: NodeId, now_ns: int) -> None:
        """Something of the origin is missing, and that peer may have it."""
        gap = self._gaps.get(origin)
        if gap is None:
            gap = self._gaps[origin] = _Gap(now_ns)
        gap.source = peer

    def requests(self, buffer: CausalBuffer, own: Origin, now_ns: int, urgent: bool = False) -> list[SendTo]:
        """What to ask for now. `urgent`: do not wait for a gap to fill by itself."""
        if not self._gaps and not urgent:
            return []
        out: list[SendTo] = []
        for origin in list(self._gaps):
            gap, missing = self._gaps[origin], buffer.gap(origin)
            if missing is None or origin == own:
                del self._gaps[origin]
                continue
            if gap.asked is not None:
                if now_ns < gap.deadline_ns:
                    continue
                gap.asked = None
            if not urgent and now_ns - gap.since_ns < self._grace:
                continue
            if sum(g.asked is not None for g in self._gaps.values()) >= limits.MAX_RANGES_OUTSTANDING:
                break
            peer = self._choose(origin, missing[0], gap)
            if peer is not None:
                gap.asked, gap.deadline_ns = peer, now_ns + self._timeout
                gap.tried.append(peer)
                self.ranges_asked += 1
                out.append(SendTo(peer, RangeRequest(origin, *missing)))
        return out

    def answered(self, origin: Origin, peer: NodeId, useful: bool) -> None:
        """A range came; ask the next peer if it brought nothing."""
        gap = self._gaps.get(origin)
        if gap is not None and gap.asked == peer:
            gap.asked = None
            if useful:
                gap.tried.clear()

    def _choose(self, origin: Origin, first: int, gap: _Gap) -> NodeId | None:
        """Who shall send updates from `first` on: who showed that it has them, the origin itself, any that has."""
        candidates: dict[NodeId, None] = {}
        if gap.source in self._peers and gap.source is not None:
            candidates[gap.source] = None
        itself = self._peers.get(origin.node)
        if itself is not None and itself.incarnation == origin.incarnation:
            candidates[origin.node] = None
        for name in self.peers():
            known = self._peers[name].known
            if known is not None and known[origin] >= first:
                candidates[name] = None
        untried = [name for name in candidates if name not in gap.tried]
        if not untried and candidates:
            gap.tried.clear()
            untried = list(candidates)
        return untried[0] if untried else None


def serve_range(log: UpdateLog, buffer: CausalBuffer, request: RangeRequest, bytes_max: int) -> RangeReply:
    """What our log has of a range."""
    origin, first = request.origin, request.first
    low = log.low(origin)
    updates = log.slice(origin, first, request.last, bytes_max)
    return RangeReply(origin, first, 0 if low is None else low, buffer.applied(origin), updates)
