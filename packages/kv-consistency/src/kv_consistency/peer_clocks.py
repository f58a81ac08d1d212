"""What the peers' clocks say of ours.

Decides two things that one clock cannot know: whether a newcomer follows peers that are ahead of it, and whether a wall
that jumped is believed. Both are votes of the peers that were heard lately, each with its newest word. One peer with a
wrong clock decides neither, and peers that share our error do not keep us from those that are right.

Q1: nothing is decided within `wait_ns` of the first doubt, so that more than the first peer is heard. Q2: only words
of the last three waits count. Q3: a newcomer follows only if more peers are ahead of it than are not; a jump is
believed if at least as many peers' walls agree with ours as do not, since the wall itself has a vote.
"""

from dataclasses import dataclass

from kv_consistency import limits
from kv_core.ids import NodeId

_LATELY_WAITS = 3


@dataclass(slots=True)
class _Word:
    """The newest of one peer.

    Attributes:
        stamp_ns, told_ns: when a stamp of it came, and a reading of its wall.
        ahead: its stamp lay too far ahead of our clock.
        stamp_agrees, told_agrees: that stamp, or reading, was near our wall.
    """

    stamp_ns: int | None = None
    ahead: bool = False
    stamp_agrees: bool = False
    told_ns: int | None = None
    told_agrees: bool = False


class PeerClocks:
    """See the module.

    Args:
        near_ns: walls that differ by no more agree.
        wait_ns: how long a doubt must last.
    """

    __slots__ = (
        "_ahead_since_ns",
        "_jumped_since_ns",
        "_last_ahead_ns",
        "_lately_ns",
        "_near_ns",
        "_wait_ns",
        "_words",
    )

    def __init__(self, near_ns: int, wait_ns: int) -> None:
        self._near_ns = near_ns
        self._wait_ns = wait_ns
        self._lately_ns = _LATELY_WAITS * wait_ns
        self._words: dict[NodeId, _Word] = {}
        self._ahead_since_ns: int | None = None
        self._last_ahead_ns: int | None = None
        self._jumped_since_ns: int | None = None

    @property
    def jumped(self) -> bool:
        """Whether our wall has jumped and is not believed."""
        return self._jumped_since_ns is not None

    def wall_jumped(self, now_ns: int) -> None:
        """Our wall jumped; what was heard before says nothing of where it is now."""
        self._jumped_since_ns = now_ns
        self._words.clear()

    def wall_is_right(self) -> None:
        """Our wall is where it should be, or is believed."""
        self._jumped_since_ns = None

    def heard(self, node: NodeId, stamp_wall_ns: int, wall_ns: int, now_ns: int, ahead: bool) -> None:
        """A stamp of that peer came; `ahead`: too far ahead to be followed."""
        word = self._word(node)
        if word is None:
            return
        word.stamp_ns, word.ahead = now_ns, ahead
        word.stamp_agrees = abs(stamp_wall_ns - wall_ns) <= self._near_ns
        if ahead:
            if self._last_ahead_ns is None or now_ns - self._last_ahead_ns > self._lately_ns:
                self._ahead_since_ns = now_ns
            self._last_ahead_ns = now_ns

    def told(self, node: NodeId, reading_ns: int, wall_ns: int, now_ns: int) -> None:
        """That peer told what its wall reads, which it may not follow itself."""
        word = self._word(node)
        if word is not None:
            word.told_ns, word.told_agrees = now_ns, abs(reading_ns - wall_ns) <= self._near_ns

    def forget(self, node: NodeId) -> None:
        """A life of that peer is over; the next one has a clock state of its own."""
        self._words.pop(node, None)

    def most_are_ahead(self, now_ns: int) -> bool:
        """Whether more peers are ahead of us than are not."""
        since_ns = self._ahead_since_ns
        if since_ns is None or now_ns - since_ns < self._wait_ns:
            return False
        heard = [word for word in self._words.values() if self._is_new(word.stamp_ns, now_ns)]
        return 2 * sum(word.ahead for word in heard) > len(heard)

    def wall_is_confirmed(self, now_ns: int) -> bool:
        """Whether the walls of at least half of the peers agree with ours, which jumped."""
        since_ns = self._jumped_since_ns
        if since_ns is None or now_ns - since_ns < self._wait_ns:
            return False
        votes: list[bool] = []
        for word in self._words.values():
            if self._is_new(word.told_ns, now_ns):
                votes.append(word.told_agrees)
            elif self._is_new(word.stamp_ns, now_ns):
                votes.append(word.stamp_agrees)
        return any(votes) and 2 * sum(votes) >= len(votes)

    def _word(self, node: NodeId) -> _Word | None:
        """Its word; None for a peer beyond the bound, which has no vote."""
        word = self._words.get(node)
        if word is None and len(self._words) < limits.MAX_ORIGINS:
            word = self._words[node] = _Word()
        return word

    def _is_new(self, came_ns: int | None, now_ns: int) -> bool:
        return came_ns is not None and now_ns - came_ns <= self._lately_ns
