"""Decides whether a link between two nodes may be given work, from how its last transfers went. Pure.

B1: `FAILURES_MAX` failures in a row open a link; one success closes it, from whatever state.
B2: an open link gets nothing until its pause is over, then one trial at a time; a trial that fails doubles the pause,
    up to `PAUSE_MAX_NS`. So a link that heals is used again by itself, and one that does not costs one trial a pause.
B3: memory is bounded: of more than `LINKS_MAX` links the one heard of least recently is forgotten, that is, closed.

Source: the circuit breaker pattern (M. Nygard, "Release It!"), with one trial in the half-open state.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

FAILURES_MAX: Final = 3
PAUSE_FIRST_NS: Final = 1_000_000_000
PAUSE_MAX_NS: Final = 30_000_000_000
LINKS_MAX: Final = 65_536


class LinkState(Enum):
    """What a link may be given."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "on trial"


@dataclass(slots=True)
class _Line:
    state: LinkState = LinkState.CLOSED
    failures: int = 0
    pause_ns: int = PAUSE_FIRST_NS
    until_ns: int = 0


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class LinkBreakers(Generic[K]):
    """The breakers of many links, by whatever names them."""

    _lines: dict[K, _Line] = field(default_factory=dict)

    def state(self, link: K) -> LinkState:
        """Where a link stands."""
        line = self._lines.get(link)
        return line.state if line else LinkState.CLOSED

    def allows(self, link: K, now_ns: int) -> bool:
        """Whether it may be given work now. Changes nothing: say `tried` when it is."""
        line = self._lines.get(link)
        return line is None or line.state is LinkState.CLOSED or now_ns >= line.until_ns

    def tried(self, link: K, now_ns: int) -> None:
        """It was given work: of an open link whose pause is over, this is the trial."""
        line = self._lines.get(link)
        if line is not None and line.state is not LinkState.CLOSED and now_ns >= line.until_ns:
            # Were the outcome never told, the next trial would come a pause later.
            line.state, line.until_ns = LinkState.TRIAL, now_ns + line.pause_ns

    def succeeded(self, link: K) -> bool:
        """A transfer over it ended well; whether that closed it."""
        line = self._lines.pop(link, None)
        return line is not None and line.state is not LinkState.CLOSED

    def failed(self, link: K, now_ns: int) -> bool:
        """A transfer over it failed; whether that opened it."""
        line = self._lines.pop(link, None) or _Line()
        self._lines[link] = line
        if len(self._lines) > LINKS_MAX:
            del self._lines[next(iter(self._lines))]
        line.failures += 1
        match line.state:
            case LinkState.CLOSED if line.failures < FAILURES_MAX:
                return False
            case LinkState.CLOSED:
                line.state, line.until_ns = LinkState.OPEN, now_ns + line.pause_ns
                return True
            case LinkState.TRIAL:
                line.pause_ns = min(2 * line.pause_ns, PAUSE_MAX_NS)
                line.state, line.until_ns = LinkState.OPEN, now_ns + line.pause_ns
                return False
            case LinkState.OPEN:
                # What was under way when it opened says nothing new.
                return False

    def open_links(self) -> list[K]:
        """Links that are not closed, in the order they were heard of."""
        return [link for link, line in self._lines.items() if line.state is not LinkState.CLOSED]
