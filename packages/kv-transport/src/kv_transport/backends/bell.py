"""What rings between this process and one life of a peer: both connections, ours to it and its to us.

A message to a peer wakes its loop, whatever it is about. So an answer that waits in the page of one connection (see
`doorbell`) need not be sent by a frame where a put goes to the same peer at once by the other connection: who receives
a put looks first for the answers that somebody waits for. If the put is lost with its connection, the answer is found
at the next heartbeat.
"""

from typing import Protocol


class HearsBell(Protocol):
    """Our end of a connection to that peer."""

    def rung(self) -> None: ...


class Bell:
    """One for each life of each peer, as long as a connection to or from it stands; on the loop."""

    __slots__ = ("__weakref__", "_links", "rung")

    def __init__(self) -> None:
        self.rung = 0
        """Puts that have left for that peer."""
        self._links: tuple[HearsBell, ...] = ()

    def join(self, link: HearsBell) -> None:
        """This link's answers are taken when the peer rings."""
        self._links = (*self._links, link)

    def leave(self, link: HearsBell) -> None:
        """No longer. Idempotent."""
        self._links = tuple(other for other in self._links if other is not link)

    def heard(self) -> None:
        """The peer rang."""
        for link in self._links:
            link.rung()
