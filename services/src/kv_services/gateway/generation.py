"""What happens to one completion request between its first byte and its last.

Decides the order: who asks, is there room, the body, the checks, then the completer, then the answer; and that every
way out gives back what was taken. Text, tokens and JSON longer than a moment are dealt with in one thread of its own,
so that nobody's stream waits for somebody's prompt.

H5: a stream that was submitted is cancelled on every way out: disconnect, slow reader, deadline, stop, bug.
H7: at most `max_requests` requests are open; more are refused at once.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from aiohttp import web

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import RequestId, TenantId
from kv_services.gateway import limits
from kv_services.gateway.admission import RequestLimits, ServedModel, admit, find_model, is_text, prompt_tokens
from kv_services.gateway.answers import AnswerSource, error_event, streamed_answer, whole_answer
from kv_services.gateway.completer import Completer, GenerationRequest, GenerationStream, RequestRecord
from kv_services.gateway.errors import DrainingError, GatewayError, HttpFault, OverloadedError, fault_of
from kv_services.gateway.http_io import REQUEST_ID_HEADER, SseSink, client_gone, read_json_body, send_whole
from kv_services.gateway.openai_answers import AnswerForm, AnswerHead, ChatForm, CompletionForm
from kv_services.gateway.openai_schema import AnyRequest, ChatRequest
from kv_services.gateway.tenancy import ApiKeys, Caller
from kv_services.gateway.text_state import TextState

_log: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

Parse = Callable[[bytes], AnyRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """Limits of the front on its requests; see `limits` for the defaults' reasons.

    Attributes:
        max_requests: open at once, whatever they are doing.
        show_fabric: whether answers carry `kv_fabric`, which names nodes.
    """

    request_limits: RequestLimits
    max_requests: int = 256
    show_fabric: bool = True
    keepalive_s: float = limits.KEEPALIVE_S
    stall_timeout_s: float = limits.STALL_TIMEOUT_S
    body_timeout_s: float = limits.BODY_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that may be submitted."""

    request: AnyRequest
    model: ServedModel
    generation: GenerationRequest


class Generation:
    """Answers completion requests of both routes.

    Args:
        models: what is served, by name; may change while running.
        draw_seed: a seed for a request that names none.
        observe: told of every request when it is over.
    """

    def __init__(
        self,
        completer: Completer,
        models: Mapping[str, ServedModel],
        keys: ApiKeys,
        settings: GenerationSettings,
        *,
        clock: Clock,
        draw_seed: Callable[[], int],
        observe: Callable[[RequestRecord], None],
    ) -> None:
        self._completer = completer
        self._models = models
        self._keys = keys
        self._settings = settings
        self._clock = clock
        self._draw_seed = draw_seed
        self._observe = observe
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway-text")
        self._sources: dict[RequestId, AnswerSource] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._open_of: dict[TenantId, int] = {}
        self.running = 0
        self.draining = False
        self._closing = False

    async def answer(self, request: web.Request, request_id: RequestId, parse: Parse) -> web.StreamResponse:
        """Read, check, submit and answer one request.

        Raises:
            KVError: refused or failed, and nothing was sent yet.
            ConnectionError: the client has gone.
            ClientStalledError: the client was dropped for not reading.
        """
        record = RequestRecord(request_id, TenantId(""))
        with self._recorded(request, record):
            caller = self._keys.caller(request.headers.get("Authorization"))
            record.tenant = caller.tenant
            with self._counted(), self._within_quota(caller):
                prepared = await self._read(request, request_id, parse, caller)
                record.model = prepared.generation.model
                record.user = prepared.request.user or ""
                record.prompt_tokens = len(prepared.generation.prompt_token_ids)
                if self._closing:
                    raise DrainingError()
                stream = self._completer.submit(prepared.generation)
                try:
                    return await self._reply(request, prepared, stream, record)
                finally:
                    stream.cancel()

    @contextmanager
    def _within_quota(self, caller: Caller) -> Iterator[None]:
        """Count a tenant's open requests; one more than its quota is refused at once."""
        tenant, limit = caller.tenant, caller.max_requests
        if limit and self._open_of.get(tenant, 0) >= limit:
            raise OverloadedError(what=f"the quota of {tenant}", limit=limit, retry_after_s=1)
        self._open_of[tenant] = self._open_of.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._open_of[tenant] -= 1
            if not self._open_of[tenant]:
                del self._open_of[tenant]

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new and wait for what runs; gives the number of requests that still run."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self.running

    async def close(self, timeout_s: float) -> None:
        """End what runs with `DrainingError`, and the thread."""
        self.draining = self._closing = True
        for source in list(self._sources.values()):
            source.abort(DrainingError())
        await self.drain(timeout_s)
        # A thread that is in the middle of a long text ends with it; nothing else is started.
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    async def _read(self, request: web.Request, request_id: RequestId, parse: Parse, caller: Caller) -> _Prepared:
        body = await read_json_body(request, timeout_s=self._settings.body_timeout_s)
        received_ns = self._clock.monotonic_ns()
        seed = self._draw_seed()

        def prepare(asked: AnyRequest) -> _Prepared:
            return self._prepare(asked, caller, request_id, received_ns, seed)

        if len(body) > limits.OFFLOAD_JSON_BYTES:
            return await self._in_thread_if(True, lambda: prepare(parse(body)))
        asked = parse(body)
        return await self._in_thread_if(len(body) > limits.OFFLOAD_BYTES and is_text(asked), lambda: prepare(asked))

    def _prepare(
        self, request: AnyRequest, caller: Caller, request_id: RequestId, received_ns: int, seed: int
    ) -> _Prepared:
        model = find_model(self._models, request.model)
        generation = admit(
            request,
            prompt_tokens(request, model.tokenizer),
            model,
            caller=caller,
            limits=self._settings.request_limits,
            request_id=request_id,
            received_ns=received_ns,
            drawn_seed=seed,
        )
        return _Prepared(request, model, generation)

    async def _reply(
        self, request: web.Request, prepared: _Prepared, stream: GenerationStream, record: RequestRecord
    ) -> web.StreamResponse:
        state = TextState(
            prepared.model.tokenizer,
            stop=prepared.request.stop_strings,
            stop_token_ids=prepared.generation.stop_token_ids,
            max_tokens=prepared.generation.sampling.max_tokens,
        )
        source = AnswerSource(prepared.generation, stream, state, clock=self._clock, record=record)
        self._sources[record.request_id] = source
        try:
            if prepared.request.streamed:
                return await self._streamed(request, prepared, source, record)
            return await self._whole(request, prepared, source)
        finally:
            del self._sources[record.request_id]
            record.completion_tokens = state.num_tokens

    async def _streamed(
        self, request: web.Request, prepared: _Prepared, source: AnswerSource, record: RequestRecord
    ) -> web.StreamResponse:
        settings = self._settings
        headers = {REQUEST_ID_HEADER: record.request_id}
        sink = SseSink(request, headers, stall_timeout_s=settings.stall_timeout_s)
        try:
            await streamed_answer(
                source,
                self._form(prepared),
                sink,
                include_usage=prepared.request.wants_usage,
                show_fabric=settings.show_fabric,
                keepalive_s=settings.keepalive_s,
            )
        except Exception as error:
            if not sink.opened or client_gone(request):
                raise
            # The status is out already: the error is the last thing the stream says, whatever it is.
            failure = as_kv_error(error, record.request_id)
            record.outcome = fault_of(failure).code
            await sink.send(error_event(failure))
        await sink.close()
        return sink.response

    async def _whole(self, request: web.Request, prepared: _Prepared, source: AnswerSource) -> web.StreamResponse:
        generation = prepared.generation
        top = generation.sampling.top_logprobs
        write = await whole_answer(
            source, self._form(prepared), keep_tokens=top is not None, show_fabric=self._settings.show_fabric
        )
        candidates = 0 if top is None else source.state.num_tokens * (top + 1)
        body = await self._in_thread_if(candidates > limits.OFFLOAD_CANDIDATES, write)
        return await send_whole(
            request,
            200,
            body,
            headers={REQUEST_ID_HEADER: generation.request_id},
            stall_timeout_s=self._settings.stall_timeout_s,
        )

    def _form(self, prepared: _Prepared) -> AnswerForm:
        model = prepared.model
        head = AnswerHead(
            prepared.generation.request_id, self._clock.wall_ns() // 10**9, prepared.generation.model, model.revision
        )
        kind = ChatForm if isinstance(prepared.request, ChatRequest) else CompletionForm
        return kind(head, model.tokenizer, prepared.generation.sampling.top_logprobs)

    async def _in_thread_if(self, long: bool, work: Callable[[], _T]) -> _T:
        if not long:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self.draining:
            raise DrainingError()
        if self.running >= self._settings.max_requests:
            raise OverloadedError(what="the gateway", limit=self._settings.max_requests, retry_after_s=1)
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if self.running == 0:
                self._idle.set()

    @contextmanager
    def _recorded(self, request: web.Request, record: RequestRecord) -> Iterator[None]:
        started_ns = self._clock.monotonic_ns()
        try:
            yield
        except asyncio.CancelledError:
            record.outcome = "disconnected"
            raise
        except Exception as error:
            gone = client_gone(request) and not isinstance(error, KVError)
            record.outcome = "disconnected" if gone else fault_of_any(error).code
            raise
        finally:
            record.duration_ns = self._clock.monotonic_ns() - started_ns
            self._observe(record)
            _log_record(record)


def fault_of_any(error: Exception) -> HttpFault:
    """What HTTP says of any exception."""
    return fault_of(error if isinstance(error, KVError) else GatewayError())


def as_kv_error(error: Exception, request_id: RequestId) -> KVError:
    """An error that a client may see; one that is a bug is logged and told by its request id alone."""
    if isinstance(error, KVError):
        return error
    _log.error("request=%s failed by a bug", request_id, exc_info=error)
    return GatewayError(detail=f"internal error in request {request_id}")


def _log_record(record: RequestRecord) -> None:
    _log.info(
        "request=%s tenant=%s user=%r model=%s outcome=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d"
        " ttft_ms=%.1f duration_ms=%.1f",
        record.request_id,
        record.tenant,
        record.user,
        record.model,
        record.outcome,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        (record.ttft_ns or 0) / 1e6,
        record.duration_ns / 1e6,
    )
