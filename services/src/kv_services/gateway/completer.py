"""The seam between HTTP and routing: what is asked for, and the stream of events that answers it.

HTTP knows text, JSON and clients; routing knows nodes, blocks and epochs; tokens are all that crosses. Nothing here
decides anything.

Contract of a stream, which both sides keep:
    S1  Tokens come in order of index from 0, each once, whatever happened behind the seam (retry, resume, preemption).
    S2  A stream ends by one `Finished`, then `StopAsyncIteration`; or by raising one `KVError`; never by neither, and
        at the latest at the request's deadline.
    S3  `cancel` and `stop` may be called at any time, any number of times, also after the end, and never block.
    S4  Cancelling a task that waits in `__anext__` loses no event: the next call gives it.
    S5  A consumer that does not take events stops the producer (bounded window), never the loop.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from kv_core.ids import RequestId, TenantId


class FinishReason(Enum):
    """Why an answer is complete, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Fully determined: with the same prompt and weights another node goes on identically.

    Attributes:
        max_tokens: tokens to generate at most, at least 1; prompt and these fit the model's context.
        temperature: 0 is greedy.
        top_p: in (0, 1].
        seed: keys the draw together with the position; the front draws one when the client gave none.
        top_logprobs: alternatives to report per token, 0 to 20 (0: the chosen token's only); None: no logprobs.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class KVOptions:
    """What the request says of its KV.

    Attributes:
        salt: salt of the namespace, already folded under the tenant (`tenancy.fold_salt`), so that no client can
            name another tenant's; use it as it is.
        shared: no salt of the client's own is in it, so that the tenant's sharing rules apply.
        retention: priority (0 to 100) and nanoseconds for which the prompt is to be kept before others afterwards.
        fidelity: which stored KV may be read and made, one of the model's: `exact`, or a codec and its version.
    """

    salt: str
    shared: bool = True
    fidelity: str = "exact"
    retention: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, checked: every field is in its range and the prompt fits the model.

    Attributes:
        prompt_token_ids: at least one, each below the vocabulary size.
        stop_token_ids: the model's end tokens; the one that ends the answer is sent as the last `Token`.
        deadline_ns: on the monotonic clock; past it the stream raises `DeadlineExceededError`.
        received_ns: when the front had the whole request, on the same clock; time to first token counts from here.
    """

    request_id: RequestId
    tenant: TenantId
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    deadline_ns: int
    received_ns: int
    kv: KVOptions


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; log-probabilities are natural logarithms.

    Attributes:
        index: position in the answer, from 0.
        logprob: None when none were asked for.
        top_logprobs: `(token_id, logprob)`, best first, at most as many as asked for.
    """

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt were found in a prefix cache, local or remote, not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request ran and what its KV cost; of the last attempt when there were several.

    Attributes:
        prefill_node: None when the decode node held the whole prefix.
        kv_bytes_moved: verified bytes that reached the decode node.
        transport: backend that moved them, or "none".
        handover_ns: from the first unit posted to the last one verified; computing goes on meanwhile.
        prefill_ns: from the prefill node's hearing of it to the last layer computed.
        tail_ns: what the hand-over took beyond that, until the decode node had compared its checksum and said so.
        attempts: 1 plus the attempts that failed.
    """

    decode_node: str
    prefill_node: str | None = None
    kv_bytes_moved: int = 0
    transport: str = "none"
    handover_ns: int = 0
    attempts: int = 1
    prefill_ns: int = 0
    tail_ns: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete; nothing follows."""

    reason: FinishReason
    usage: Usage
    timings: Timings


GenerationEvent: TypeAlias = Token | Finished


class GenerationStream(Protocol):
    """The events of one request (S1-S5). `stream.TokenStream` is one, for a completer to fill."""

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    async def __anext__(self) -> GenerationEvent:
        """The next event.

        Raises:
            StopAsyncIteration: after `Finished`, and after `cancel`.
            KVError: the request failed; raised once, then `StopAsyncIteration`.
        """
        ...

    def stop(self) -> None:
        """The text is complete (a stop string was seen): generate no more, then give `Finished` as usual. Tokens that
        were under way may still come before it."""
        ...

    def cancel(self) -> None:
        """Nobody listens any more: release everything. Nothing more is given."""
        ...


class Completer(Protocol):
    """Whoever turns requests into tokens: the cluster in production, a script in tests."""

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Start a request. Does not wait: what can only be known later is raised by the stream.

        Raises:
            OverloadedError: no room; nothing was started.
            KVError: refused at once for another reason; nothing was started.
        """
        ...


@dataclass(slots=True)
class RequestRecord:
    """How one request went, for counters and logs; handed to the front's observer when it is over.

    Attributes:
        tenant: "" when nobody's key came.
        outcome: "ok", "disconnected", or the OpenAI error code it ended with.
        user: what the client calls its own user.
        ttft_ns: from the whole request read to the first token; None without one.
        duration_ns: from the whole request read to the end.
    """

    request_id: RequestId
    tenant: TenantId
    model: str = ""
    user: str = ""
    outcome: str = "ok"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft_ns: int | None = None
    duration_ns: int = 0
    timings: Timings | None = None
