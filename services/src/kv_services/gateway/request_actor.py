"""The gateway's cluster side: turns generation requests into work on nodes, and nodes' tokens into streams.

One `RequestActor` per request owns its `RequestRoute`; this module performs effects and makes events of outcomes. The
gateway that holds the client is the only one to raise a request's epoch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kv_bus.actor import Actor
from kv_bus.errors import BusError
from kv_bus.interface import Bus
from kv_consistency.errors import HolderLostError
from kv_consistency.messages import UpdateBatch
from kv_consistency.update import OwnerEpoch
from kv_core.clock import Clock
from kv_core.errors import KVError, RetryableError
from kv_core.hashing import hash_packed, token_bytes
from kv_core.ids import NodeId, RequestId
from kv_core.namespace import Fidelity, Namespace
from kv_core.wire import Message
from kv_prefix.prefix_index import PrefixIndex
from kv_services.config import ClusterConfig, Role
from kv_services.errors import NodeError, RequestExpiredError
from kv_services.event_log import EventLog
from kv_services.gateway.completer import Finished, FinishReason, GenerationRequest, Token
from kv_services.gateway.errors import DeadlineExceededError, DrainingError, GatewayError, NoNodesError
from kv_services.gateway.figures import Figures
from kv_services.gateway.gateway_breakers import GatewayBreakers
from kv_services.gateway.oversize import Oversize
from kv_services.gateway.piece_placing import place_in_pieces, sizes_of
from kv_services.gateway.placing import Placer
from kv_services.gateway.routing_state import (
    ClientGone,
    DeadlinePassed,
    Deliver,
    Effect,
    EndAt,
    Event,
    Fail,
    Leave,
    NoteRetry,
    PauseThenRetry,
    Place,
    Placed,
    PlacementFailed,
    PrefillEnded,
    RequestRoute,
    Reserved,
    ReserveFailed,
    RetryDue,
    RouteState,
    SendPrefill,
    SendReserve,
    Started,
    Succeed,
    TextComplete,
)
from kv_services.gateway.stream import TokenStream
from kv_services.in_flight_watch import InFlightWatch
from kv_services.membership.actor import ClusterView
from kv_services.messages import (
    DecodeReserved,
    EndRequest,
    Load,
    NamespaceFields,
    PrefillDone,
    ReserveDecode,
    Retention,
    RunPrefill,
    Sampling,
)
from kv_services.metrics import Metrics
from kv_services.past_requests import PastRequests
from kv_services.sharded.messages import in_pieces
from kv_transport.errors import TransportError

MAX_ATTEMPTS: Final = 4
RETRY_DELAY_NS: Final = 50_000_000
END_TIMEOUT_NS: Final = 1_000_000_000
END_TRIES: Final = 3
FIGURES_WAIT_S: Final = 0.1
"""How long the end of a whole answer waits for what the prefill node has to tell of it."""

_log = logging.getLogger(__name__)


class Ownership(Protocol):
    """What the gateway asks of its replica about who owns a request."""

    def own(self, request_id: RequestId) -> tuple[OwnerEpoch, bytes]:
        """Raise the request's epoch to the next one, ours; and a causal token of that."""
        ...

    def news(self) -> UpdateBatch | None:
        """What was said and is not published yet: a node that must follow it is sent it along."""
        ...

    def end(self, request_id: RequestId) -> None:
        """The request is over everywhere."""
        ...


@dataclass(slots=True)
class GatewayContext:
    """What all requests of one gateway share."""

    config: ClusterConfig
    clock: Clock
    bus: Bus
    cluster: ClusterView
    index: PrefixIndex
    placer: Placer
    ownership: Ownership
    metrics: Metrics
    model_id: str
    weights_revision: str
    events: EventLog | None = None
    in_flight: InFlightWatch | None = None
    oversize: Oversize | None = None
    past: PastRequests | None = None
    breakers: GatewayBreakers = field(init=False)

    def __post_init__(self) -> None:
        self.breakers = GatewayBreakers(self.bus.node_id, self.clock, self.events, self.metrics)

    def namespace(self, request: GenerationRequest) -> Namespace:
        """Whose KV this request may share."""
        return Namespace(
            model_id=self.model_id,
            weights_revision=self.weights_revision,
            salt=request.kv.salt,
            dtype=self.config.model.dtype,
            fidelity=Fidelity.parse(request.kv.fidelity),
            block_size=self.config.model.block_size,
        )


class RequestActor(Actor[Event, Effect]):
    """One request at the gateway that holds its client."""

    def __init__(self, ctx: GatewayContext, request: GenerationRequest, on_end: Callable[[RequestId], None]) -> None:
        room_wait_ns = int(ctx.config.sharding.room_wait_s * 1e9)
        self.route = RequestRoute(MAX_ATTEMPTS, RETRY_DELAY_NS, room_wait_ns)
        super().__init__(f"request {request.request_id}", self.route, clock=ctx.clock)
        self._ctx = ctx
        self._request = request
        self._on_end = on_end
        self._namespace = ctx.namespace(request)
        self._hashes = hash_packed(self._namespace, request.prompt_token_ids)
        self._confirmed: list[int] = []
        self._unread: deque[Token] = deque()
        self._figures = Figures()
        self._after = b""
        self._reason: FinishReason | None = None
        self._finished: Finished | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self.stream = TokenStream(
            on_taken=lambda _: self._feed(),
            on_stop=self._stop_reading,
            on_cancel=lambda: self.complete(ClientGone()),
        )

    def _stop_reading(self) -> None:
        # The reader has its text: what it did not take it will not miss, and only the end is still due.
        self._unread.clear()
        self.complete(TextComplete())
        self._feed()

    def begin(self) -> None:
        """Start the request and its deadline."""
        left_s = max(0.0, (self._request.deadline_ns - self._ctx.clock.monotonic_ns()) / 1e9)
        self._later(left_s, self._deadline)
        if self._ctx.past is not None:
            prompt = token_bytes(self._request.prompt_token_ids)
            self._ctx.past.note(self._request.request_id, self._namespace, prompt)
        self.post(Started())

    def perform(self, effect: Effect) -> None:
        match effect:
            case Place(exclude):
                # In the gateway's first moments this waits, boundedly, until it can tell who is there.
                self._ctx.cluster.when_settled(lambda: self._place_if_awaited(exclude))
            case SendReserve():
                self._send_reserve(effect)
            case SendPrefill():
                self._send_prefill(effect)
            case EndAt(node_id, epoch, cause):
                self._end_at(node_id, EndRequest(self._request.request_id, epoch, cause), END_TRIES)
            case Deliver(first_index, tokens):
                if self.route.decode is not None:
                    self._ctx.breakers.decoded(self.route.decode)
                self._confirmed += [token.token_id for token in tokens]
                self._unread.extend(
                    Token(first_index + i, token.token_id, token.logprob, token.top_logprobs)
                    for i, token in enumerate(tokens)
                )
                self._feed()
            case Succeed(reason):
                self._reason = FinishReason(reason)
                if self._figures.awaited:
                    asyncio.get_running_loop().call_later(FIGURES_WAIT_S, self._tell_end)
                else:
                    self._tell_end()
                self._ctx.metrics.requests.labels("ok").inc()
                self._end()
            case Fail(error):
                self._blame(error)
                _log.warning("request failed request=%s cause=%s", self._request.request_id, error)
                self.stream.fail(error)
                self._ctx.metrics.requests.labels(type(error).__name__).inc()
                self._end()
            case PauseThenRetry(delay_ns):
                self._later(delay_ns / 1e9, lambda: self.complete(RetryDue()))
            case NoteRetry(attempt, cause):
                _log.warning(
                    "request tried again request=%s attempt=%d cause=%s", self._request.request_id, attempt, cause
                )
                self._figures.retries.append(str(cause))
                self._note_attempt(cause)
                self._blame(cause)
                self._ctx.metrics.request_retries.inc()
                self._unassign()
            case Leave():
                self._ctx.metrics.requests.labels("disconnected").inc()
                self._end()

    def _blame(self, cause: KVError) -> None:
        """Judge the link over which an attempt failed, once."""
        blamed, self.route.blamed = self.route.blamed, None
        if blamed is not None:
            self._ctx.breakers.failed(blamed, cause, self._request.request_id)

    def _note_attempt(self, cause: KVError) -> None:
        choice = self._figures.choice
        nodes = [choice.prefill.node] if choice and choice.prefill else []
        link = ">".join([*nodes, choice.decode.node] if choice else [self._ctx.bus.node_id])
        if self._ctx.events is not None:
            self._ctx.events.note("another_attempt", link, str(cause), request=self._request.request_id)
        self._ctx.metrics.recoveries.labels("another_attempt").inc()

    async def close(self) -> None:
        self._cancel_timers()
        if not self.stream.ended:
            self.stream.fail(DrainingError())
        await super().close()

    def failed(self, error: BaseException) -> None:
        """A bug, which the loop's handler logs: the client is told, and whatever a node holds is ended there."""
        request_id, epoch = self._request.request_id, self.route.epoch
        self.stream.fail(GatewayError(detail=f"internal error in request {request_id}"))
        for node_id in (self.route.decode, self.route.prefill):
            if node_id is not None:
                self._end_at(node_id, EndRequest(request_id, epoch, "its gateway failed"), END_TRIES)
        self._ctx.metrics.requests.labels(type(error).__name__).inc()
        self._end()

    def _place_if_awaited(self, exclude: tuple[NodeId, ...]) -> None:
        if self.route.state is RouteState.PLACING:
            self.complete(self._place(exclude))

    def _place(self, exclude: tuple[NodeId, ...]) -> Placed | PlacementFailed:
        ctx = self._ctx
        decode = ctx.breakers.reachable(self._loads(exclude, Role.DECODE))
        prefill = ctx.breakers.reachable(self._loads(exclude, Role.PREFILL))
        if not decode:
            return PlacementFailed(NoNodesError(role="decode", model=self._request.model))
        if ctx.oversize is not None:
            try:
                shunned = (*exclude, *ctx.breakers.avoided())
                pieces = place_in_pieces(ctx.oversize, ctx.cluster, self._request, shunned, decode, prefill)
            except KVError as error:
                return PlacementFailed(error)
            if pieces:
                ctx.breakers.given(pieces[0].node)
                self._figures = Figures(coordinator=pieces[0].node, retries=self._figures.retries)
                return Placed(pieces[0].node, None, pieces)
            decode, prefill = ctx.oversize.roomy(decode, prefill, *sizes_of(self._request))
        holders = ctx.index.lookup(self._hashes)
        request_id = self._request.request_id
        num_tokens = len(self._request.prompt_token_ids)
        held = {match.holder.node: match.num_blocks for match in holders}
        coming = ctx.in_flight.coming(self._hashes, held) if ctx.in_flight else {}
        decode, feeding = ctx.breakers.fed(decode, prefill), ctx.breakers.feeding
        choice = ctx.placer.choose(request_id, self._hashes, num_tokens, holders, decode, prefill, coming, feeding)
        ctx.breakers.given(choice.decode.node, choice.prefill.node if choice.prefill else None)
        self._figures = Figures(choice, retries=self._figures.retries)
        ctx.placer.assign(choice.decode.node, request_id, 1)
        if choice.prefill is not None:
            ctx.placer.assign(choice.prefill.node, request_id, choice.prefill.new_blocks + 1)
        computes = choice.prefill or choice.decode
        if ctx.in_flight is not None and computes.new_blocks:
            new = self._hashes[computes.overlap_blocks :]
            ctx.in_flight.assigned(request_id, computes.node, new, self._request.deadline_ns)
        _log.debug("placed request=%s decode=%s (%s)", request_id, choice.decode.node, choice.decode.reason)
        return Placed(choice.decode.node, choice.prefill.node if choice.prefill else None)

    def _loads(self, exclude: tuple[NodeId, ...], role: Role) -> dict[NodeId, Load]:
        alive = self._ctx.cluster.alive(role)
        usable = [node_id for node_id in alive if node_id not in exclude] or alive
        return {node_id: self._ctx.cluster.load_of(node_id) for node_id in usable}

    def _send_reserve(self, effect: SendReserve) -> None:
        request, sampling = self._request, self._request.sampling
        left = sampling.max_tokens - effect.num_confirmed
        try:
            owner, self._after = self._ctx.ownership.own(request.request_id)
        except KVError as error:
            # Whom this gateway cannot fence later it must not ask now.
            self.complete(ReserveFailed(effect.epoch, error, may_retry=False))
            return
        assert owner.number == effect.epoch, (owner, effect)
        message = ReserveDecode(
            request_id=request.request_id,
            epoch=effect.epoch,
            namespace=NamespaceFields.of(self._namespace),
            tokens=self._tokens(),
            num_confirmed=effect.num_confirmed,
            sampling=Sampling(
                max_tokens=max(1, left),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed,
                stop_token_ids=request.stop_token_ids,
                top_logprobs=sampling.top_logprobs,
            ),
            deadline_ns=self._left_ns(),
            compute_locally=effect.prefill is None,
            after=self._after,
            retention=self._retention(),
            news=self._ctx.ownership.news(),
        )

        def outcome(reply: Message | KVError) -> None:
            if isinstance(reply, DecodeReserved):
                self._figures.reserved = reply
                self.complete(Reserved(effect.epoch, needs_prefill=reply.grant is not None))
            else:
                error = _error_of(reply)
                self.complete(ReserveFailed(effect.epoch, error, may_retry=may_retry(error)))

        self._call(effect.decode, in_pieces(message, effect.pieces) if effect.pieces else message, outcome)

    def _send_prefill(self, effect: SendPrefill) -> None:
        reserved = self._figures.reserved
        assert reserved is not None and reserved.grant is not None, effect
        message = RunPrefill(
            request_id=self._request.request_id,
            epoch=effect.epoch,
            namespace=NamespaceFields.of(self._namespace),
            tokens=self._tokens(),
            decode_node=effect.decode,
            first_block=reserved.first_block,
            grant=reserved.grant,
            deadline_ns=self._left_ns(),
            after=self._after,
            retention=self._retention(),
            news=self._ctx.ownership.news(),
        )

        figures = self._figures
        figures.prefill_asked = True

        def outcome(reply: Message | KVError) -> None:
            self._prefill_over(effect.prefill)
            if isinstance(reply, PrefillDone):
                figures.prefill = reply
                self._ctx.breakers.handed_over(effect.prefill, effect.decode)
                self._tell_end()
                self.complete(PrefillEnded(effect.epoch))
            else:
                error = _error_of(reply)
                self.complete(PrefillEnded(effect.epoch, error, may_retry=may_retry(error)))

        self._call(effect.prefill, message, outcome)

    def _call(self, node_id: NodeId, message: Message, outcome: Callable[[Message | KVError], None]) -> None:
        try:
            self._ctx.bus.call(node_id, message, outcome, deadline_ns=self._request.deadline_ns)
            self._ctx.bus.flush()
        except KVError as error:
            outcome(error)

    def _end_at(self, node_id: NodeId, message: EndRequest, tries: int) -> None:
        """Tell a node that an epoch is over, more than once if need be; its own deadline is the last resort."""

        def outcome(reply: Message | KVError) -> None:
            if isinstance(reply, BusError) and tries > 1 and self._ctx.cluster.view.alive().count(node_id):
                self._end_at(node_id, message, tries - 1)

        try:
            self._ctx.bus.call(node_id, message, outcome, timeout_ns=END_TIMEOUT_NS)
        except KVError as error:
            _log.warning("end not sent request=%s node=%s cause=%s", message.request_id, node_id, error)

    def _feed(self) -> None:
        """Give the client what it has room for, then the end."""
        if self._unread and self.stream.room > 0:
            batch = [self._unread.popleft() for _ in range(min(self.stream.room, len(self._unread)))]
            self.stream.push(batch)
        if not self._unread and self._finished is not None:
            self.stream.finish(self._finished)

    def _tell_end(self) -> None:
        """Say that the answer is whole, once, with what is known of it by now."""
        if self._reason is None or self._finished is not None or self.stream.ended:
            return
        usage = self._figures.usage(len(self._request.prompt_token_ids), len(self._confirmed))
        self._finished = Finished(self._reason, usage, self._figures.timings())
        self._feed()

    def _deadline(self) -> None:
        timeout_s = self._ctx.config.limits.request_timeout_s
        self.complete(DeadlinePassed(DeadlineExceededError(timeout_s=timeout_s)))

    def _tokens(self) -> bytes:
        return token_bytes([*self._request.prompt_token_ids, *self._confirmed])

    def _retention(self) -> Retention | None:
        asked = self._request.kv.retention
        return Retention(*asked) if asked is not None else None

    def _left_ns(self) -> int:
        return max(1, self._request.deadline_ns - self._ctx.clock.monotonic_ns())

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, call))

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _prefill_over(self, node_id: NodeId) -> None:
        self._ctx.placer.done(node_id, self._request.request_id)
        if self._ctx.in_flight is not None:
            self._ctx.in_flight.over(self._request.request_id)

    def _unassign(self) -> None:
        choice = self._figures.choice
        if choice is not None:
            self._ctx.placer.done(choice.decode.node, self._request.request_id)
            self._prefill_over((choice.prefill or choice.decode).node)

    def _end(self) -> None:
        self._cancel_timers()
        self._unassign()
        try:
            self._ctx.ownership.end(self._request.request_id)
        except KVError as error:
            # Its replica takes nothing now; entries of a gateway that is gone end with it.
            _log.warning("end not published request=%s cause=%s", self._request.request_id, error)
        self._on_end(self._request.request_id)


def may_retry(error: KVError) -> bool:
    """Whether another attempt, elsewhere or later, may go better."""
    if isinstance(error, RequestExpiredError):
        return False
    # Of a lost holder's updates the next attempt need not follow any.
    return isinstance(error, RetryableError | BusError | TransportError | NodeError | HolderLostError)


def _error_of(reply: Message | KVError) -> KVError:
    if isinstance(reply, KVError):
        return reply
    return NodeError(detail=f"a node answered with {type(reply).__name__}")
