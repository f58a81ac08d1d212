"""Turns one stream of tokens into one answer, whole or in chunks, within the request's deadline.

Decides when what is said: an error before the first text keeps its HTTP status, a later one is the last chunk; silence
is filled with comments; what the client asked to know at the end waits for it. Knows no sockets: chunks go to a `Sink`.

W1: an answer ends by its deadline, whatever the completer does.
W2: a complete text is a good answer: an error after it costs its timings only.
W3: one chunk is made at a time and the next token is taken only after the client had room for it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_services.gateway.completer import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    GenerationStream,
    RequestRecord,
    Token,
    Usage,
)
from kv_services.gateway.errors import DeadlineExceededError, StreamProtocolError
from kv_services.gateway.limits import FINISH_GRACE_S
from kv_services.gateway.openai_answers import (
    DONE,
    KEEPALIVE,
    Answer,
    AnswerForm,
    FabricBody,
    UsageBody,
    encode,
    error_answer,
    fabric_body,
    sse,
    usage_body,
)
from kv_services.gateway.text_state import ShownToken, TextDelta, TextState

_log: Final = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the chunks of a streamed answer go. Both may raise `SlowReaderError` or `ConnectionError`."""

    async def open(self) -> None:
        """Send the head of the response: from now on its status is 200."""
        ...

    async def send(self, data: bytes) -> None:
        """Send one event; returns when there is room for another."""
        ...


class AnswerSource:
    """The text of one request as it comes, with its times, counts and deadline.

    Args:
        record: filled in as things become known.
    """

    def __init__(
        self,
        generation: GenerationRequest,
        stream: GenerationStream,
        state: TextState,
        *,
        clock: Clock,
        record: RequestRecord,
    ) -> None:
        self.state = state
        self._generation = generation
        self._stream = stream
        self._clock = clock
        self._record = record
        self._last_token_ns = 0
        self._finished: Finished | None = None
        self._abort: KVError | None = None
        self._scope: asyncio.Timeout | None = None

    async def next_delta(self, wait_s: float | None = None) -> TextDelta | None:
        """What the next token adds; None when none came for `wait_s` seconds.

        Raises:
            DeadlineExceededError: the request's time is over.
            KVError: the request failed, or was aborted.
        """
        event = await self._next_event(wait_s)
        if event is None:
            return None
        delta = self.state.step(event)
        if delta.finish is not None:
            # No-op when the completer ended by itself; a stop string only we can see.
            self._stream.stop()
        return delta

    async def result(self) -> tuple[UsageBody, FabricBody | None]:
        """Counts and costs, once the text is complete; without costs when they do not come soon (W2)."""
        end_s = asyncio.get_running_loop().time() + FINISH_GRACE_S
        try:
            while self._finished is None:
                left_s = end_s - asyncio.get_running_loop().time()
                if await self._next_event(max(left_s, 0.0)) is None:
                    break
        except KVError as error:
            _log.info("request=%s ended without timings cause=%s", self._generation.request_id, error)
        return self._summary()

    def abort(self, error: KVError) -> None:
        """End the request with that error, also a wait that is going on."""
        self._abort = error
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _next_event(self, wait_s: float | None) -> GenerationEvent | None:
        if self._finished is not None:
            raise StreamProtocolError(detail="an event was asked for after the end")
        if self._abort is not None:
            raise self._abort
        left_s = (self._generation.deadline_ns - self._clock.monotonic_ns()) / 1e9
        if left_s <= 0:
            raise self._too_late()
        scope = asyncio.timeout(left_s if wait_s is None else min(left_s, wait_s))
        try:
            async with scope:
                self._scope = scope
                event = await anext(self._stream)
        except StopAsyncIteration:
            raise StreamProtocolError(detail="the stream ended without an end") from None
        except TimeoutError:
            if not scope.expired():
                raise
            if self._abort is not None:
                raise self._abort from None
            if wait_s is None or left_s <= wait_s:
                raise self._too_late() from None
            return None
        finally:
            self._scope = None
        self._note(event)
        return event

    def _note(self, event: GenerationEvent) -> None:
        if isinstance(event, Token):
            self._last_token_ns = self._clock.monotonic_ns() - self._generation.received_ns
            if self._record.ttft_ns is None:
                self._record.ttft_ns = self._last_token_ns
        else:
            self._finished = event
            self._record.timings = event.timings
            self._record.cached_tokens = event.usage.cached_tokens

    def _summary(self) -> tuple[UsageBody, FabricBody | None]:
        record = self._record
        record.completion_tokens = self.state.num_tokens
        usage = Usage(len(self._generation.prompt_token_ids), record.completion_tokens, record.cached_tokens)
        if record.timings is None:
            return usage_body(usage), None
        ttft_ns = record.ttft_ns or 0
        fabric = fabric_body(
            self._generation.request_id, usage, record.timings, ttft_ns=ttft_ns, last_token_ns=self._last_token_ns
        )
        return usage_body(usage), fabric

    def _too_late(self) -> DeadlineExceededError:
        generation = self._generation
        return DeadlineExceededError(timeout_s=round((generation.deadline_ns - generation.received_ns) / 1e9, 3))


async def whole_answer(
    source: AnswerSource, form: AnswerForm, *, keep_tokens: bool, show_fabric: bool
) -> Callable[[], bytes]:
    """Wait for the whole answer; gives the function that writes it, which takes long when there are many logprobs.

    Raises:
        KVError: the request failed.
    """
    texts: list[str] = []
    tokens: list[ShownToken] = []
    finish = None
    while finish is None:
        delta = await source.next_delta()
        if delta is None:
            continue
        texts.append(delta.text)
        if keep_tokens:
            tokens.extend(delta.tokens)
        finish = delta.finish
    reason = finish
    usage, fabric = await source.result()
    shown = fabric if show_fabric and fabric is not None else UNSET
    return lambda: encode(_with(form.whole("".join(texts), tokens, reason), usage, shown))


async def streamed_answer(
    source: AnswerSource, form: AnswerForm, sink: Sink, *, include_usage: bool, show_fabric: bool, keepalive_s: float
) -> None:
    """Send the answer in chunks as it comes. The sink is opened when there is something to say, or after one silence.

    Raises:
        KVError: the request failed, or the client does not read.
        ConnectionError: the client has gone.
    """
    # With include_usage each chunk but the last says `"usage": null`, as in the API we speak.
    no_usage: UnsetType | None = None if include_usage else UNSET
    delta = await source.next_delta(keepalive_s)
    await sink.open()
    opening = form.opening()
    if opening is not None:
        await sink.send(_event(opening, no_usage))
    while delta is None or delta.finish is None:
        if delta is None:
            await sink.send(KEEPALIVE)
        elif delta.text or delta.tokens:
            await sink.send(_event(form.chunk(delta.text, delta.tokens, None), no_usage))
        delta = await source.next_delta(keepalive_s)
    last = form.chunk(delta.text, delta.tokens, delta.finish)
    if include_usage:
        await sink.send(_event(last, None))
        last = form.trailer()
    usage, fabric = await source.result()
    shown = fabric if show_fabric and fabric is not None else UNSET
    await sink.send(_event(last, usage if include_usage else UNSET, shown) + DONE)


def error_event(error: KVError) -> bytes:
    """The chunk that ends a stream which failed after it began."""
    return sse(encode(error_answer(error)))


def _event(answer: Answer, usage: UsageBody | UnsetType | None, fabric: FabricBody | UnsetType = UNSET) -> bytes:
    return sse(encode(_with(answer, usage, fabric)))


def _with(answer: Answer, usage: UsageBody | UnsetType | None, fabric: FabricBody | UnsetType = UNSET) -> Answer:
    if usage is UNSET and fabric is UNSET:
        return answer
    return msgspec.structs.replace(answer, usage=usage, kv_fabric=fabric)
