"""Decides whether a checked request fits the model and the cluster's limits, and makes the generation request of it.

It knows tokens and limits; it refuses to know HTTP and nodes. Time, seed and request id are handed in. Pure, but for
the tokeniser it is given.

M1: an admitted prompt has at least one token, every token is in the vocabulary, and prompt and answer fit the context.
M2: an explicit `max_tokens` is kept or refused, never lowered; without one the answer may fill what is left.
M3: the salt is under the caller's tenant, whatever the client sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_core.ids import RequestId
from kv_services.engine.errors import ChatTemplateError, TextTooLongError
from kv_services.engine.interface import ChatMessage
from kv_services.gateway.completer import GenerationRequest, KVOptions, SamplingParams
from kv_services.gateway.errors import (
    BodyTooLargeError,
    ContextLengthError,
    EmptyPromptError,
    InvalidRequestError,
    PromptTooLongError,
    UnknownModelError,
    UnsupportedParameterError,
)
from kv_services.gateway.openai_schema import AnyRequest, ChatRequest, shorten
from kv_services.gateway.tenancy import Caller, fold_salt

SEED_MASK = (1 << 63) - 1


class PromptTokenizer(Protocol):
    """What the front needs of `engine.interface.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it.

    Attributes:
        max_context: tokens of prompt and answer together.
        revision: of the weights; clients see it as `system_fingerprint`.
        created_s: since when it is served, seconds of the epoch.
        fidelities: stored KV that a request may allow; the first is that of a request that says nothing.
    """

    name: str
    tokenizer: PromptTokenizer
    max_context: int
    revision: str
    created_s: int = 0
    fidelities: tuple[str, ...] = ("exact",)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The cluster's limits on one request; `timeout_s` is its whole life."""

    max_prompt_tokens: int
    max_output_tokens: int
    timeout_s: float


def find_model(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    """The model of that name.

    Raises:
        UnknownModelError: not served.
    """
    model = models.get(name)
    if model is None:
        raise UnknownModelError(param="model", model=shorten(name), served=", ".join(sorted(models)) or "none")
    return model


def is_text(request: AnyRequest) -> bool:
    """Whether the prompt has to be tokenised.

    Raises:
        InvalidRequestError: as `prompt_tokens`.
    """
    return isinstance(request, ChatRequest) or isinstance(request.single_prompt(), str)


def prompt_tokens(request: AnyRequest, tokenizer: PromptTokenizer) -> list[int]:
    """The prompt as tokens. Takes long for a long text.

    Raises:
        InvalidRequestError: empty, of a wrong kind, or refused by the chat template.
        BodyTooLargeError: more text than the tokeniser takes.
    """
    try:
        if isinstance(request, ChatRequest):
            return tokenizer.encode_chat([ChatMessage(role, text) for role, text in request.conversation()])
        prompt = request.single_prompt()
        return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    except TextTooLongError as error:
        raise BodyTooLargeError(limit=error.fields.get("limit", "the tokeniser's")) from error
    except ChatTemplateError as error:
        raise InvalidRequestError(param="messages", detail=str(error)) from error


def admit(
    request: AnyRequest,
    tokens: Sequence[int],
    model: ServedModel,
    *,
    caller: Caller,
    limits: RequestLimits,
    request_id: RequestId,
    received_ns: int,
    drawn_seed: int,
) -> GenerationRequest:
    """The generation request for that prompt.

    Args:
        received_ns: monotonic; the deadline counts from here.
        drawn_seed: used when the client gave none.

    Raises:
        InvalidRequestError: tokens, lengths or options that this model or cluster does not take.
    """
    _check_tokens(request, tokens, model)
    max_tokens = _answer_length(request, len(tokens), model, limits)
    fidelity = request.kv_fidelity or model.fidelities[0]
    if fidelity not in model.fidelities:
        raise UnsupportedParameterError(param="kv_fidelity", detail=f"this model has {', '.join(model.fidelities)}")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=(drawn_seed if request.seed is None else request.seed) & SEED_MASK,
        top_logprobs=request.wanted_logprobs,
    )
    salt = fold_salt(caller, request.cache_salt)
    retention = _retention(request, caller)
    return GenerationRequest(
        request_id=request_id,
        tenant=caller.tenant,
        model=model.name,
        prompt_token_ids=tuple(tokens),
        sampling=sampling,
        stop_token_ids=() if request.ignore_eos else model.tokenizer.eos_ids,
        deadline_ns=received_ns + int(limits.timeout_s * 1e9),
        received_ns=received_ns,
        kv=KVOptions(salt, shared=request.cache_salt is None, fidelity=fidelity, retention=retention),
    )


def _retention(request: AnyRequest, caller: Caller) -> tuple[int, int] | None:
    """What the request asks to be kept, within what its tenant may."""
    asked = request.kv_retention
    if asked is None:
        return None
    if not caller.retain_ttl_max_s:
        raise UnsupportedParameterError(param="kv_retention", detail="your tenant has no retain_quota")
    if asked.ttl_s > caller.retain_ttl_max_s:
        raise InvalidRequestError(
            param="kv_retention.ttl_s", detail=f"'kv_retention.ttl_s' is at most {caller.retain_ttl_max_s} for you"
        )
    return asked.priority, asked.ttl_s * 1_000_000_000


def _check_tokens(request: AnyRequest, tokens: Sequence[int], model: ServedModel) -> None:
    if not tokens:
        raise EmptyPromptError(param=request.prompt_param)
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= model.tokenizer.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            param=request.prompt_param,
            detail=f"'{request.prompt_param}': token {shorten(str(wrong))} is not below {model.tokenizer.vocab_size}",
        )


def _answer_length(request: AnyRequest, num_prompt: int, model: ServedModel, limits: RequestLimits) -> int:
    if num_prompt > limits.max_prompt_tokens:
        raise PromptTooLongError(param=request.prompt_param, prompt_tokens=num_prompt, limit=limits.max_prompt_tokens)
    wanted = request.wanted_tokens
    if wanted is not None and wanted > limits.max_output_tokens:
        raise InvalidRequestError(
            param=request.limit_name, detail=f"'{request.limit_name}' is at most {limits.max_output_tokens} here"
        )
    room = model.max_context - num_prompt
    if room < (wanted or 1):
        raise ContextLengthError(
            param=request.prompt_param, prompt_tokens=num_prompt, max_tokens=wanted or 1, limit=model.max_context
        )
    return wanted or min(room, limits.max_output_tokens, request.default_tokens or room)
