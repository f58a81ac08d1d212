"""Decides where one request goes, what to do when that fails, and which tokens the client may see.

One machine is one request at the gateway that holds its client. It refuses to know HTTP, the bus, the index and the
clock: the actor places, sends and times, and turns every outcome into an event.

G1: only this machine raises the request's epoch; it does so before every reserve.
G2: an event of another epoch changes nothing (a former owner is fenced).
G3: the client sees the token at index i once, and only after those at 0 .. i-1.
G4: exactly one of `Succeed`, `Fail` and `Leave` is emitted, and no effect after it.
G5: whatever was reserved at a node is ended there, or the node is known to be dead.
G6: being handed over by a node that leaves is no failed attempt, once for each node.
G7: a request that lost its place over several nodes, or the race for it, waits for room for a bounded time, and that is
    no failed attempt: its last pieces are still being given back, and who died may begin a new life.
G8: when the text is complete, a prefill node whose hand-over brought tokens is not ended before its own report.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kv_core.errors import KVError, LocalProtocolError, RemoteProtocolError
from kv_core.ids import NodeId, RequestId
from kv_core.sharding import Placement
from kv_services.errors import NodeDrainingError, RequestTooLargeError
from kv_services.messages import OutputToken
from kv_services.sharded.errors import ClusterFullError, ShardLostError, ShardRefusedError
from kv_transport.recovery import (
    CHECKSUM_RETRIES_MAX,
    RetryOnAlternateNode,
    TransferTask,
    diagnose_transfer_failure,
)

ROOM_PAUSE_DELAYS: Final = 4
"""At which multiple of the delay between attempts G7 looks for room."""


class RouteState(Enum):
    """Where a request stands."""

    NEW = "new"
    PLACING = "placing"
    RESERVING = "reserving"
    RUNNING = "running"
    WAITING = "waiting"
    FINISHING = "finishing"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Started:
    """The client's request was accepted by the front."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Placement chose; `prefill` is None when no prefill node lives: the decode node then computes the rest itself.

    With `pieces` several nodes hold the request, and `decode` coordinates them.
    """

    decode: NodeId
    prefill: NodeId | None
    pieces: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """No node can take the request now."""

    error: KVError


@dataclass(frozen=True, slots=True)
class Reserved:
    """The decode node holds slots; `needs_prefill` is false when it already has every block."""

    epoch: int
    needs_prefill: bool


@dataclass(frozen=True, slots=True)
class ReserveFailed:
    """The decode node refused, or could not be reached."""

    epoch: int
    error: KVError
    may_retry: bool


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The hand-over ended; `error` is None when every byte was verified at the decode node."""

    epoch: int
    error: KVError | None = None
    may_retry: bool = True


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """Tokens `first_index ..` of this request's output; `finish` is the reason when it is the last batch."""

    epoch: int
    first_index: int
    tokens: tuple[OutputToken, ...]
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """The decode node gave the request up."""

    epoch: int
    error: KVError
    may_retry: bool


@dataclass(frozen=True, slots=True)
class NodeDied:
    """Membership declared a node dead."""

    node_id: NodeId
    error: KVError


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The pause before another attempt is over."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's time is over."""

    error: KVError


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody is waiting for the answer any more."""


@dataclass(frozen=True, slots=True)
class TextComplete:
    """The front saw a stop string: the answer is complete though the decode node goes on."""


Event = (
    Started
    | Placed
    | PlacementFailed
    | Reserved
    | ReserveFailed
    | PrefillEnded
    | TokensArrived
    | DecodeFailed
    | NodeDied
    | RetryDue
    | DeadlinePassed
    | ClientGone
    | TextComplete
)


@dataclass(frozen=True, slots=True)
class Place:
    """Choose nodes, none of `exclude` unless nothing else lives."""

    exclude: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Ask `decode` for slots for the prompt and the `num_confirmed` tokens the client already has; for `pieces`, to
    hold them at several nodes."""

    decode: NodeId
    prefill: NodeId | None
    epoch: int
    num_confirmed: int
    pieces: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True)
class SendPrefill:
    """Ask `prefill` to compute and hand over to `decode`."""

    prefill: NodeId
    decode: NodeId
    epoch: int


@dataclass(frozen=True, slots=True)
class EndAt:
    """Tell `node_id` that this epoch of the request is over there."""

    node_id: NodeId
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Deliver:
    """Show these tokens, which start at output index `first_index`, to the client."""

    first_index: int
    tokens: tuple[OutputToken, ...]


@dataclass(frozen=True, slots=True)
class Succeed:
    """The answer is complete; `reason` is `stop` or `length`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The client gets this error."""

    error: KVError


@dataclass(frozen=True, slots=True)
class Leave:
    """The client is gone: nobody gets a verdict, the request is over."""


@dataclass(frozen=True, slots=True)
class PauseThenRetry:
    """Send `RetryDue` after this long."""

    delay_ns: int


@dataclass(frozen=True, slots=True)
class NoteRetry:
    """An attempt failed and another follows: an event for operators and counters."""

    attempt: int
    cause: KVError


Effect = Place | SendReserve | SendPrefill | EndAt | Deliver | Succeed | Fail | Leave | PauseThenRetry | NoteRetry


@dataclass(slots=True)
class RequestRoute:
    """One request at its gateway.

    Args:
        max_attempts: how often a failed attempt is followed by another before the client gets the error.
        retry_delay_ns: pause before the second attempt; doubles with each further one.
        room_wait_ns: how long room is waited for (G7).

    Attributes:
        blamed: where the attempt that failed last failed: at a node, or in the hand-over from one to another.
    """

    max_attempts: int
    retry_delay_ns: int
    room_wait_ns: int = 0
    state: RouteState = RouteState.NEW
    epoch: int = 0
    attempt: int = 0
    decode: NodeId | None = None
    prefill: NodeId | None = None
    num_confirmed: int = 0
    prefill_running: bool = False
    blamed: NodeId | tuple[NodeId, NodeId] | None = None
    _reason: str = ""
    _confirmed_before: int = 0
    _excluded: dict[NodeId, None] = field(default_factory=dict)
    _handed_over: set[NodeId] = field(default_factory=set)
    _waited_ns: int = 0
    _last_error: KVError | None = None

    def step(self, event: Event) -> list[Effect]:
        if self.state is RouteState.DONE:
            return []
        match event:
            case Started():
                self._expect(event, RouteState.NEW)
                return self._place()
            case Placed(decode, prefill, pieces):
                self._expect(event, RouteState.PLACING)
                return self._reserve(decode, prefill, pieces)
            case PlacementFailed(error):
                self._expect(event, RouteState.PLACING)
                if isinstance(error, RequestTooLargeError):
                    return self._finish(Fail(error))
                return self._retry(error, None)
            case DeadlinePassed(error):
                if self.state is RouteState.FINISHING:
                    return [*self._end_prefill("deadline"), *self._finish(Succeed(self._reason))]
                return [*self._end_everywhere("deadline"), *self._finish(Fail(error))]
            case ClientGone() | TextComplete() if self.state is RouteState.FINISHING:
                # Only the prefill node's report is due: ended before it, it would not keep what it was asked to keep.
                return []
            case ClientGone():
                return [*self._end_everywhere("client gone"), *self._finish(Leave())]
            case TextComplete() if self.prefill_running and self.decode and self.num_confirmed > self._confirmed_before:
                self.state, self._reason = RouteState.FINISHING, "stop"
                return [EndAt(self.decode, self.epoch, "stop string")]
            case TextComplete():
                return [*self._end_everywhere("stop string"), *self._finish(Succeed("stop"))]
            case RetryDue():
                return self._place() if self.state is RouteState.WAITING else []
            case NodeDied(node_id, error):
                return self._node_died(node_id, error)
            case Reserved() | ReserveFailed() | PrefillEnded() | TokensArrived() | DecodeFailed():
                return self._of_epoch(event)

    def _of_epoch(self, event: Reserved | ReserveFailed | PrefillEnded | TokensArrived | DecodeFailed) -> list[Effect]:
        if event.epoch != self.epoch or self.state in (RouteState.WAITING, RouteState.PLACING):
            return []
        if self.state is RouteState.FINISHING and not isinstance(event, PrefillEnded):
            return []
        match event:
            case Reserved(epoch, needs_prefill):
                self._expect(event, RouteState.RESERVING)
                self.state = RouteState.RUNNING
                if not needs_prefill or self.decode is None:
                    return []
                if self.prefill is None:
                    # It was asked to compute what it lacks itself, so it broke the protocol.
                    error = RemoteProtocolError(detail=f"{self.decode} wants a hand-over that nobody was asked for")
                    return self._retry_after_ending(error, self.decode)
                self.prefill_running = True
                return [SendPrefill(self.prefill, self.decode, epoch)]
            case ReserveFailed(_, error, may_retry):
                # A time-out does not say whether slots were taken, so the epoch is ended there in any case.
                if not may_retry:
                    return [*self._end_everywhere("reserve failed"), *self._finish(Fail(error))]
                return self._retry_after_ending(error, self._to_blame(error))
            case PrefillEnded(_, error, may_retry):
                self.prefill_running = False
                if self.state is RouteState.FINISHING:
                    return self._finish(Succeed(self._reason))
                if error is None:
                    return []
                if not may_retry:
                    return [*self._end_everywhere("prefill failed"), *self._finish(Fail(error))]
                return self._retry_after_ending(error, self._culprit(error), self._link())
            case TokensArrived():
                return self._tokens(event)
            case DecodeFailed(_, error, may_retry):
                if not may_retry:
                    return [*self._end_everywhere("decode failed"), *self._finish(Fail(error))]
                return self._retry_after_ending(
                    error, self._to_blame(error), self._link() if self.prefill_running else None
                )

    def _tokens(self, event: TokensArrived) -> list[Effect]:
        if event.first_index > self.num_confirmed:
            error = LocalProtocolError(
                detail=f"tokens from index {event.first_index} came before index {self.num_confirmed}"
            )
            return self._retry_after_ending(error, self.decode)
        fresh = event.tokens[self.num_confirmed - event.first_index :]
        effects: list[Effect] = []
        if fresh:
            effects.append(Deliver(self.num_confirmed, fresh))
            self.num_confirmed += len(fresh)
        if event.finish is None:
            return effects
        if self.prefill_running:
            # Tokens prove that the hand-over was verified; its own report is under way and completes the figures.
            self.state, self._reason = RouteState.FINISHING, event.finish
            return effects
        return [*effects, *self._finish(Succeed(event.finish))]

    def _node_died(self, node_id: NodeId, error: KVError) -> list[Effect]:
        if self.state is RouteState.FINISHING and node_id == self.prefill:
            return self._finish(Succeed(self._reason))
        if self.state not in (RouteState.RESERVING, RouteState.RUNNING):
            return []
        if node_id == self.decode:
            effects = self._end_prefill("decode node died")
            self.decode = None
            return [*effects, *self._retry(error, node_id)]
        if node_id == self.prefill and self.prefill_running:
            self.prefill_running = False
            return self._retry_after_ending(error, node_id)
        return []

    def _to_blame(self, error: KVError) -> NodeId | None:
        """Whom the next attempt leaves out after decoding failed: who lost or refused a piece, else who decoded."""
        if isinstance(error, ShardLostError | ShardRefusedError):
            return NodeId(str(error.fields.get("node")))
        return self.decode

    def _culprit(self, error: KVError) -> NodeId | None:
        """Whom the next attempt leaves out after a hand-over failed: whom the table of recoveries names, else the
        prefill node, and another one computes the whole prompt again."""
        if self.prefill is None or self.decode is None:
            return self.prefill
        # The transfer has done by itself what it could: tcp and three retries are behind it.
        task = TransferTask(RequestId(""), self.prefill, self.decode, "tcp", CHECKSUM_RETRIES_MAX)
        match diagnose_transfer_failure(task, error):
            case RetryOnAlternateNode(exclude):
                return exclude[0]
            case _:
                return self.prefill

    def _place(self) -> list[Effect]:
        self.state = RouteState.PLACING
        self.attempt += 1
        return [Place(tuple(self._excluded))]

    def _reserve(self, decode: NodeId, prefill: NodeId | None, pieces: tuple[Placement, ...]) -> list[Effect]:
        self.epoch += 1
        self.decode, self.prefill, self.prefill_running = decode, prefill, False
        self.state, self._confirmed_before = RouteState.RESERVING, self.num_confirmed
        return [SendReserve(decode, prefill, self.epoch, self.num_confirmed, pieces)]

    def _link(self) -> tuple[NodeId, NodeId] | None:
        """Between whom this attempt hands over."""
        return None if self.prefill is None or self.decode is None else (self.prefill, self.decode)

    def _retry_after_ending(
        self, error: KVError, culprit: NodeId | None, link: tuple[NodeId, NodeId] | None = None
    ) -> list[Effect]:
        return [*self._end_everywhere("attempt failed"), *self._retry(error, culprit, link)]

    def _retry(self, error: KVError, culprit: NodeId | None, link: tuple[NodeId, NodeId] | None = None) -> list[Effect]:
        self._last_error = error
        self.blamed = link or culprit
        if culprit is not None:
            self._excluded[culprit] = None
        self.decode = self.prefill = None
        self.prefill_running = False
        if isinstance(error, NodeDrainingError) and culprit is not None and culprit not in self._handed_over:
            # Nothing failed: the node is leaving, and hands the request over. Once for each node, so this ends.
            self._handed_over.add(culprit)
            self.attempt -= 1
            return [NoteRetry(self.attempt + 1, error), *self._place()]
        if isinstance(error, ClusterFullError) and self.epoch > 0 and self._waited_ns < self.room_wait_ns:
            pause_ns = ROOM_PAUSE_DELAYS * self.retry_delay_ns
            self._waited_ns += pause_ns
            self.attempt -= 1
            self.state = RouteState.WAITING
            return [PauseThenRetry(pause_ns)]
        if self.attempt >= self.max_attempts:
            return self._finish(Fail(error))
        self.state = RouteState.WAITING
        delay_ns = self.retry_delay_ns << (self.attempt - 1)
        return [NoteRetry(self.attempt, error), PauseThenRetry(delay_ns)]

    def _end_prefill(self, cause: str) -> list[Effect]:
        if not self.prefill_running or self.prefill is None:
            return []
        self.prefill_running = False
        return [EndAt(self.prefill, self.epoch, cause)]

    def _end_everywhere(self, cause: str) -> list[Effect]:
        effects = self._end_prefill(cause)
        # A reserve in flight is ended too: the node fences the epoch, so a late arrival reserves nothing.
        if self.decode is not None and self.state in (RouteState.RESERVING, RouteState.RUNNING):
            effects.append(EndAt(self.decode, self.epoch, cause))
        return effects

    def _finish(self, verdict: Succeed | Fail | Leave) -> list[Effect]:
        self.state = RouteState.DONE
        return [verdict]

    def _expect(self, event: Event, state: RouteState) -> None:
        if self.state is not state:
            raise LocalProtocolError(detail=f"{type(event).__name__} while {self.state.value}, not {state.value}")
