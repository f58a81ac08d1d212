"""The incoming half of an endpoint: what arrives, who may answer it, and when it is too late to.

H1: a handler sees a message only if its sender owns the key it came with, lives, and meant this life of ours (B3).
H2: a request is answered at most once; one that stays unanswered ends at its deadline, with the sender's next life,
    when its caller gives up, or when we close. All unanswered requests can be listed.
H3: whatever is refused is counted by cause, and answered with an error if it can be.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from kv_bus.carrier import Carrier, Frame
from kv_bus.control import CONTROL, Cancel, Hello, HelloReply, header_of
from kv_bus.errors import (
    AlreadyAnswered,
    AuthRefused,
    ClosedWithOpenRequests,
    Draining,
    HandlerFailed,
    HandlerTaken,
    NoHandler,
    NoReply,
    TooManyRequests,
    WrongCluster,
    WrongIncarnation,
)
from kv_bus.interface import DEFERRED, Handler, OpenRequest, Reply, Stamp
from kv_bus.limits import (
    DEFAULT_REQUEST_TIMEOUT_NS,
    HANDLER_JOBS_MAX,
    MAX_REQUEST_TIMEOUT_NS,
    OPEN_REQUESTS_PER_PEER,
)
from kv_bus.local import Local
from kv_bus.peers import Peer, Peers
from kv_bus.pending import PendingTable
from kv_bus.replies import ReplyQueue
from kv_bus.sequencer import NO_LIFE
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import (
    Envelope,
    ErrorReply,
    Message,
    SchemaMismatchError,
    UnknownMessageTypeError,
    UnregisteredMessageError,
    WireError,
    decode,
)

_log = logging.getLogger(__name__)


class Incoming(msgspec.Struct, eq=False):
    """A message that arrived: what a handler gets as its `Request`."""

    serving: "Serving"
    line: Peer
    route: bytes
    message: Message
    sender: NodeId
    incarnation: Incarnation
    call_id: int
    stamp: Stamp
    deadline_ns: int
    answered: bool = False
    abandoned: bool = False
    open_id: int = 0
    job: asyncio.Task[None] | None = None
    callbacks: list[Callable[[], None]] | None = None

    @property
    def wants_reply(self) -> bool:
        return self.call_id != 0

    @property
    def done(self) -> bool:
        return self.answered or self.abandoned

    def reply(self, message: Message) -> None:
        self.serving.answer(self, message)

    def fail(self, error: KVError) -> None:
        self.serving.answer(self, ErrorReply.of(error))

    def on_abandoned(self, callback: Callable[[], None]) -> None:
        if self.abandoned:
            asyncio.get_running_loop().call_soon(callback)
        elif self.callbacks is None:
            self.callbacks = [callback]
        else:
            self.callbacks.append(callback)

    def abandon(self) -> list[Callable[[], None]]:
        """Nobody waits any more; the callbacks to be told."""
        self.abandoned = True
        callbacks, self.callbacks = self.callbacks or [], None
        return [] if self.answered else callbacks


AnyHandler = Callable[[Incoming], Reply | Awaitable[Reply]]


class Serving:
    """Every message that peers send to this node."""

    def __init__(self, local: Local, peers: Peers, carrier: Carrier) -> None:
        self._local = local
        self._peers = peers
        self._carrier = carrier
        self._handlers: dict[type[Message], AnyHandler] = {}
        self._open: PendingTable[Incoming] = PendingTable()
        self._next_open_id = 0
        self._jobs: dict[asyncio.Task[None], None] = {}
        self.replies = ReplyQueue(carrier, local.counters)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._draining = False
        self._impersonators: dict[NodeId, None] = {}  # reported once each; bounded by the allow-list
        self._empty_waiters: list[asyncio.Future[None]] = []
        peers.on_new_life.append(self.abandon_all)

    def handle(self, message_type: type[Message], handler: "Handler[Any]") -> None:
        """See `Bus.handle`."""
        if message_type not in self._local.registry.by_class:
            raise UnregisteredMessageError(name=message_type.__qualname__)
        if message_type in self._handlers or message_type in CONTROL.by_class:
            raise HandlerTaken(message=message_type.__name__)
        self._handlers[message_type] = handler

    def request_arrived(self, owner: NodeId, route: bytes, data: Frame) -> None:
        """A frame came from a connection made with the key of `owner`."""
        local, counters = self._local, self._local.counters
        counters.bytes_received += len(data)
        try:
            envelope = decode(data, local.registry)
        except WireError as error:
            self._refused_frame(owner, route, data, error)
            return
        body, call_id = envelope.body, envelope.correlation_id
        if envelope.sender != owner:
            # Not answered: whoever it is, it is not the node whose name it used.
            counters.refuse("impersonation")
            if owner not in self._impersonators:
                self._impersonators[owner] = None
                _log.warning("impersonation refused owner=%s claimed=%s", owner, envelope.sender)
            return
        line = self._peers.line(owner)
        refusal = None
        if envelope.sender_incarnation != line.incarnation or envelope.target_incarnation != local.incarnation:
            refusal = self._judge_lives(line, envelope)
        stamp, clock_refusal = local.learn(envelope)
        refusal = refusal or clock_refusal
        if refusal is not None:
            self._refuse(route, envelope, refusal)
            return
        handler = self._handlers.get(type(body))
        if handler is None:
            self._no_handler(line, route, envelope)
            return
        now_ns = local.monotonic_ns()
        wait_ns = envelope.deadline_ns or DEFAULT_REQUEST_TIMEOUT_NS
        if wait_ns > MAX_REQUEST_TIMEOUT_NS:
            wait_ns = MAX_REQUEST_TIMEOUT_NS
        request = Incoming(
            self, line, route, body, owner, envelope.sender_incarnation, call_id, stamp, now_ns + wait_ns
        )
        if call_id == 0:
            counters.notes_received += 1
        else:
            counters.requests_received += 1
            if not self._may_begin(line, request):
                return
        self._run(handler, request)

    def stranger_arrived(self, route: bytes, data: Frame) -> None:
        """A frame came from somebody who is no longer admitted. He is told so, and nothing else happens."""
        self._local.counters.refuse("key_revoked")
        try:
            envelope = decode(data, self._local.registry)
        except WireError:
            return
        if envelope.correlation_id:
            cause = "its key is no longer in the allow-list"
            error = AuthRefused(node=self._local.node_id, cause=cause)
            self._send_error(route, envelope.sender_incarnation, envelope.correlation_id, error)

    def answer(self, request: Incoming, message: Message) -> None:
        """Send the one answer to `request`."""
        if request.answered:
            raise AlreadyAnswered(message=type(request.message).__name__, node=request.sender)
        late = request.done
        request.answered = True
        if request.open_id:
            self._leave(request)
        if request.call_id == 0:
            return
        if late:
            self._local.counters.replies_dropped += 1
            return
        try:
            data = self._local.encode(message, request.incarnation, request.call_id, 0)
        except LocalProtocolError:
            failed = HandlerFailed(
                node=self._local.node_id, message=type(request.message).__name__, exception=type(message).__name__
            )
            self.replies.send(
                request.route, self._local.encode(ErrorReply.of(failed), request.incarnation, request.call_id, 0)
            )
            raise
        self.replies.send(request.route, data)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    async def wait_until_empty(self) -> None:
        """Return when no request is open and no handler runs."""
        if len(self._open) or self._jobs:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._empty_waiters.append(waiter)
            await waiter

    async def close(self) -> None:
        """Answer what is open with an error, then cancel the handlers in the order they began."""
        self._draining = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for _, request in self._open.take_all():
            request.line.open.pop(request.call_id, None)
            request.open_id = 0
            if not request.done:
                error = ClosedWithOpenRequests(node=self._local.node_id, message=type(request.message).__name__)
                try:
                    self.answer(request, ErrorReply.of(error))
                except KVError as unsaid:
                    # Without a stamp nothing can be said; the end of the connection, which must follow, says it too.
                    self._local.counters.replies_dropped += 1
                    _log.warning("end not told node=%s asker=%s cause=%s", self._local.node_id, request.sender, unsaid)
            self._tell_abandoned(request)
        current = asyncio.current_task()
        jobs = [job for job in self._jobs if job is not current]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self.replies.clear()
        self._maybe_empty()

    def abandon_all(self, line: Peer) -> None:
        """This peer will take no answers any more: it is in a new life, or cut off."""
        for request in list(line.open.values()):
            self._abandon(request)

    def open_requests(self) -> tuple[OpenRequest, ...]:
        return tuple(
            OpenRequest(
                request.sender,
                request.incarnation,
                type(request.message).__name__,
                request.deadline_ns,
                request.job is not None,
            )
            for _, _, request in self._open.entries()
        )

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def job_count(self) -> int:
        return len(self._jobs)

    def _run(self, handler: AnyHandler, request: Incoming) -> None:
        try:
            result = handler(request)
        except KVError as error:
            self._handler_raised(request, error)
            return
        except Exception as error:  # a bug of the handler: the caller and the process are both told
            self._handler_raised(request, error)
            return
        if result is DEFERRED:
            if not request.answered and request.call_id:
                self._keep(request)
        elif result is None or isinstance(result, Message):
            self._settle(request, result)
        else:
            self._start_job(request, result)

    def _settle(self, request: Incoming, result: Message | None) -> None:
        """A handler ended with its result."""
        if request.answered:
            return
        if result is not None:
            self.answer(request, result)
        elif request.call_id:
            self.answer(
                request,
                ErrorReply.of(NoReply(node=self._local.node_id, message=type(request.message).__name__)),
            )

    def _start_job(self, request: Incoming, work: Awaitable[Reply]) -> None:
        if request.call_id:
            self._keep(request)
        job = asyncio.get_running_loop().create_task(self._job(request, work))
        request.job = job
        self._jobs[job] = None
        job.add_done_callback(self._job_ended)
        if isinstance(work, Coroutine):
            job.add_done_callback(lambda _: work.close())  # one cancelled before its first step never began `work`

    async def _job(self, request: Incoming, work: Awaitable[Reply]) -> None:
        try:
            result = await work
        except Exception as error:  # as in `_run`
            self._handler_raised(request, error)
            return
        request.job = None
        if result is not DEFERRED:
            self._settle(request, result if isinstance(result, Message) else None)

    def _job_ended(self, job: asyncio.Task[None]) -> None:
        del self._jobs[job]
        if not job.cancelled() and (error := job.exception()) is not None:
            self._local.report("a handler's answer could not be sent", error)
        self._maybe_empty()

    def _handler_raised(self, request: Incoming, error: Exception) -> None:
        name = type(request.message).__name__
        if not isinstance(error, KVError) or isinstance(error, LocalProtocolError):
            self._local.report(f"handler for {name} from {request.sender} failed", error)
        if request.answered:
            return
        if not isinstance(error, KVError):
            error = HandlerFailed(node=self._local.node_id, message=name, exception=type(error).__name__)
        self.answer(request, ErrorReply.of(error))

    def _may_begin(self, line: Peer, request: Incoming) -> bool:
        refusal: KVError | None = None
        if self._draining:
            refusal = Draining(node=self._local.node_id)
        elif len(line.open) >= OPEN_REQUESTS_PER_PEER:
            refusal = TooManyRequests(node=self._local.node_id, limit=OPEN_REQUESTS_PER_PEER)
        elif len(self._jobs) >= HANDLER_JOBS_MAX:
            refusal = TooManyRequests(node=self._local.node_id, limit=HANDLER_JOBS_MAX)
        elif request.call_id in line.open:
            # The carrier repeated a frame: the first one will be answered.
            self._local.counters.refuse("repeat")
            return False
        if refusal is None:
            return True
        self._local.counters.refuse(type(refusal).__name__)
        request.fail(refusal)
        return False

    def _keep(self, request: Incoming) -> None:
        """The request stays open (H2)."""
        self._next_open_id = open_id = self._next_open_id + 1
        request.open_id = open_id
        request.line.open[request.call_id] = request
        self._open.add(open_id, request.deadline_ns, request)
        if self._timer is None or request.deadline_ns < self._timer_ns:
            self._arm(request.deadline_ns)

    def _leave(self, request: Incoming) -> None:
        self._open.resolve(request.open_id)
        request.open_id = 0
        request.line.open.pop(request.call_id, None)
        if self._empty_waiters:
            self._maybe_empty()

    def _abandon(self, request: Incoming) -> None:
        """Nobody waits for the answer any more."""
        if request.open_id:
            self._open.remove(request.open_id)
            request.open_id = 0
        request.line.open.pop(request.call_id, None)
        self._tell_abandoned(request)
        if request.job is not None:
            request.job.cancel()
        self._maybe_empty()

    def _tell_abandoned(self, request: Incoming) -> None:
        for callback in request.abandon():
            self._local.guard(callback)

    def _arm(self, deadline_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = deadline_ns
        delay_s = max(0, deadline_ns - self._local.monotonic_ns()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._deadline_came)

    def _deadline_came(self) -> None:
        self._timer = None
        for _, request in self._open.expire(self._local.monotonic_ns()):
            request.open_id = 0
            self._abandon(request)
        next_ns = self._open.next_deadline_ns()
        if next_ns is not None and self._timer is None:
            self._arm(next_ns)

    def _judge_lives(self, line: Peer, envelope: Envelope) -> KVError | None:
        """Whether the sender lives and meant us (H1)."""
        counters, local = self._local.counters, self._local
        greets = envelope.target_incarnation == NO_LIFE and type(envelope.body) is Hello
        if envelope.target_incarnation != local.incarnation and not greets:
            counters.refuse("not_for_this_life")
            return WrongIncarnation(node=local.node_id, expected=envelope.target_incarnation, actual=local.incarnation)
        if envelope.sender_incarnation == NO_LIFE or not self._peers.seen(line, envelope.sender_incarnation):
            counters.refuse("past_life")
            return WrongIncarnation(node=line.node_id, expected=envelope.sender_incarnation, actual=line.incarnation)
        return None

    def _refuse(self, route: bytes, envelope: Envelope, error: KVError) -> None:
        if envelope.correlation_id:
            self._send_error(route, envelope.sender_incarnation, envelope.correlation_id, error)

    def _no_handler(self, line: Peer, route: bytes, envelope: Envelope) -> None:
        match envelope.body:
            case Hello(cluster):
                ours = self._carrier.cluster
                if cluster != ours:
                    self._local.counters.refuse("other_cluster")
                    self._refuse(route, envelope, WrongCluster(node=self._local.node_id, theirs=ours, ours=cluster))
                    return
                reply = HelloReply(ours)
                self.replies.send(
                    route, self._local.encode(reply, envelope.sender_incarnation, envelope.correlation_id, 0)
                )
            case Cancel(call_id):
                request = line.open.get(call_id)
                if request is not None:
                    self._abandon(request)
            case body:
                self._local.counters.refuse("no_handler")
                self._refuse(route, envelope, NoHandler(node=self._local.node_id, message=type(body).__name__))

    def _refused_frame(self, owner: NodeId, route: bytes, data: Frame, error: WireError) -> None:
        """Bytes that are no message of ours. Only a known form with an unusable body can be answered."""
        self._local.counters.refuse(type(error).__name__)
        _log.debug("frame refused owner=%s cause=%s", owner, error)
        if not isinstance(error, UnknownMessageTypeError | SchemaMismatchError):
            return
        header = header_of(data)
        if header is not None and header.sender == owner and header.correlation_id:
            self._send_error(route, Incarnation(header.sender_incarnation), header.correlation_id, error)

    def _send_error(self, route: bytes, incarnation: Incarnation, call_id: int, error: KVError) -> None:
        self.replies.send(route, self._local.encode(ErrorReply.of(error), incarnation, call_id, 0))

    def _maybe_empty(self) -> None:
        if not len(self._open) and not self._jobs:
            waiters, self._empty_waiters = self._empty_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
