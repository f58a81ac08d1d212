"""What other processes compute just now, as they publish it: for nodes that may wait for it, and for placement.

Announcements are hints. One that is lost costs a computation; one that is wrong costs a bounded wait, because it ends
by its computation's end, by its node's death or by its time, and what is waited for is matched by tokens afterwards.

A1: an owner names one computation of one life of one node.
A2: what a node announced is gone with its life, and when it falls silent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from kv_bus.interface import Event
from kv_core.block_hashes import BlockHashes
from kv_core.clock import Clock
from kv_core.hash_chain import PACKED_BYTES
from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message
from kv_prefix.errors import InvalidRequestError
from kv_prefix.in_flight import InFlight, Wait
from kv_services.membership.state import Effect as MemberEffect
from kv_services.membership.state import MemberDied, MemberSuspected, MemberUp
from kv_services.messages import PrefixComputed, PrefixComputing

M = TypeVar("M", bound=Message)
BELIEVED_NS_MAX: Final = 600_000_000_000
"""No announcement is believed for longer, whatever it says: ten minutes compute the longest prompts there are."""


def owner_of(node_id: NodeId, incarnation: Incarnation, computation: str) -> str:
    """How one computation is called in a process that hears of it."""
    return f"{node_id}#{incarnation}/{computation}"


class Announcers(Protocol):
    """Those whose announcements are heard, and their lives; the process's `ClusterView`."""

    def on_published(self, message_type: type[M], listener: Callable[[Event[M]], None]) -> None: ...
    def on_change(self, listener: Callable[[MemberEffect], None]) -> None: ...


class InFlightWatch:
    """The announcements that one process has heard.

    Args:
        on_over: told when a computation ended, with its owner and the causal token of its claims, empty when it will
            not come.
    """

    def __init__(self, cluster: Announcers, clock: Clock, on_over: Callable[[str, bytes], None] | None = None) -> None:
        self._clock = clock
        self._on_over = on_over or _nobody
        self._node_of: dict[str, NodeId] = {}
        self.table = InFlight()
        cluster.on_published(PrefixComputing, self._on_computing)
        cluster.on_published(PrefixComputed, self._on_computed)
        cluster.on_change(self._on_member)

    def ask(
        self, block_hashes: Sequence[BlockHash], num_held: int, now_ns: int, *, block_ns: int, fetch_ns: int
    ) -> Wait | None:
        """Whether to wait before computing a prompt (`InFlight.ask`).

        Args:
            block_ns: what computing a block takes here.
            fetch_ns: what reading the blocks takes here once they are there.
        """
        self.expire()
        if not len(self.table):
            return None
        return self.table.ask(block_hashes, num_held, now_ns=now_ns, ns_per_block=block_ns, fetch_ns=fetch_ns)

    def coming(self, block_hashes: Sequence[BlockHash], held: Mapping[NodeId, int]) -> dict[NodeId, int]:
        """By node: how many blocks behind those it holds it is computing already, without a hole.

        Args:
            held: by node, how many blocks from block 0 it holds.
        """
        self.expire()
        if not len(self.table):
            return {}
        owners = self.table.owners(block_hashes)
        nodes = [self._node_of.get(owner) if owner else None for owner in owners]
        found: dict[NodeId, int] = {}
        for node_id in dict.fromkeys(nodes):
            if node_id is None:
                continue
            first = at = held.get(node_id, 0)
            while at < len(nodes) and nodes[at] == node_id:
                at += 1
            if at > first:
                found[node_id] = at - first
        return found

    def assigned(self, computation: str, node_id: NodeId, block_hashes: Sequence[BlockHash], until_ns: int) -> None:
        """This process sent a node a request: it will compute these blocks, long before it says so itself."""
        now_ns = self._clock.monotonic_ns()
        if until_ns > now_ns and self.table.announce(
            computation, block_hashes, start_ns=now_ns, ns_per_block=0, until_ns=until_ns
        ):
            self._node_of[computation] = node_id

    def over(self, computation: str) -> None:
        """What was `assigned` is over."""
        self.table.withdraw(computation)
        self._node_of.pop(computation, None)

    def expire(self) -> None:
        """End what has run out of time; those who wait for it look at the time themselves."""
        for owner in self.table.expire(self._clock.monotonic_ns()):
            self._node_of.pop(owner, None)

    def _on_computing(self, event: Event[PrefixComputing]) -> None:
        message, now_ns = event.message, self._clock.monotonic_ns()
        if len(message.names) % PACKED_BYTES:
            return
        owner = owner_of(event.origin, event.incarnation, message.computation)
        self.expire()
        try:
            taken = self.table.announce(
                owner,
                BlockHashes(message.names),
                start_ns=now_ns + message.ready_ns,
                ns_per_block=0,
                until_ns=now_ns + min(message.until_ns, BELIEVED_NS_MAX),
            )
        except InvalidRequestError:
            return
        if taken:
            self._node_of[owner] = event.origin

    def _on_computed(self, event: Event[PrefixComputed]) -> None:
        self._end(owner_of(event.origin, event.incarnation, event.message.computation), event.message.after)

    def _on_member(self, effect: MemberEffect) -> None:
        if isinstance(effect, MemberDied | MemberSuspected | MemberUp):
            # A new life knows nothing of what the one before it computed, and a silent one is not worth waiting for.
            new_life = owner_of(effect.node_id, effect.incarnation, "") if isinstance(effect, MemberUp) else None
            for owner, node_id in list(self._node_of.items()):
                if node_id == effect.node_id and (new_life is None or not owner.startswith(new_life)):
                    self._end(owner, b"")

    def _end(self, owner: str, after: bytes) -> None:
        if self._node_of.pop(owner, None) is not None:
            self.table.withdraw(owner)
        self._on_over(owner, after)


def _nobody(owner: str, after: bytes) -> None:
    """Nobody waits here."""
