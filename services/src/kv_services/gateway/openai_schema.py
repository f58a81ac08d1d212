"""What a client may ask for: the requests of the OpenAI API as strict structs, and everything that is refused.

Decides on the request alone: which parameters exist, of which type and range, which of them contradict each other.
What needs the model (tokens, context, fidelity) is decided in `admission`. Pure.

R1: no value is converted: `"5"`, `5.0` and `true` are no integers.
R2: nothing is ignored. A parameter we do not honour is refused by name, unless its value asks for what happens anyway
    (`n: 1`, `tools: []`, null).
R3: whatever the bytes, the outcome is a request or an `InvalidRequestError`.
"""

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kv_services.gateway import limits
from kv_services.gateway.errors import EmptyPromptError, InvalidRequestError, UnsupportedParameterError

_Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_MaxTokens = Annotated[int, Meta(ge=1, le=1 << 30)]
_Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
_TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
_Stop = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_CHARS)]
_Model = Annotated[str, Meta(min_length=1, max_length=255)]
PromptTokens: TypeAlias = list[int]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class KVRetention(Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_retention`: keep this prompt's KV before others for `ttl_s` seconds; low priorities are given up first."""

    ttl_s: Annotated[int, Meta(ge=1, le=limits.MAX_RETENTION_S)]
    priority: Annotated[int, Meta(ge=0, le=limits.MAX_RETENTION_PRIORITY)] = 50


class _Request(Struct, frozen=True, kw_only=True):
    """What both routes share. `cache_salt`, `kv_fidelity`, `kv_retention` and `ignore_eos` are not OpenAI's: the first
    and the last are named as vLLM names them."""

    model: _Model
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    seed: _Int64 | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=limits.MAX_STOP_STRINGS)] | None = None
    max_tokens: _MaxTokens | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=limits.MAX_USER_CHARS)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=limits.MAX_SALT_CHARS)] | None = None
    kv_fidelity: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    kv_retention: KVRetention | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(_Request, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt_param: ClassVar[str] = "prompt"
    default_tokens: ClassVar[int | None] = limits.DEFAULT_COMPLETION_TOKENS

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_TOP_LOGPROBS_COMPLETION)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to report per token; None: no logprobs."""
        return self.logprobs

    @property
    def wanted_tokens(self) -> int | None:
        """The answer's greatest length, if the client said one."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """The parameter that set `wanted_tokens`."""
        return "max_tokens"

    def single_prompt(self) -> str | PromptTokens:
        """The one prompt, as text or as tokens.

        Raises:
            EmptyPromptError: nothing in it.
            UnsupportedParameterError: several prompts.
            InvalidRequestError: a list of mixed kinds.
        """
        prompt: str | Sequence[int | str | list[int]] = self.prompt
        if len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if not prompt:
            raise EmptyPromptError(param="prompt")
        if isinstance(prompt, str):
            return prompt
        kinds = {type(item) for item in prompt}
        if kinds == {int}:
            return [item for item in prompt if isinstance(item, int)]
        if len(kinds) > 1:
            raise InvalidRequestError(param="prompt", detail="'prompt' must be a string or a list of token ids")
        raise UnsupportedParameterError(param="prompt", detail="one prompt per request")


class ContentPart(Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message. The fields that must be null are those which an answer's message carries, so that it can be sent
    back as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1, max_length=limits.MAX_MESSAGES)]
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None
    tool_calls: None = None


class ChatRequest(_Request, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    prompt_param: ClassVar[str] = "messages"
    default_tokens: ClassVar[int | None] = None

    messages: Annotated[list[Message], Meta(max_length=limits.MAX_MESSAGES)]
    max_completion_tokens: _MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_TOP_LOGPROBS_CHAT)] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to report per token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        """The answer's greatest length, if the client said one."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_name(self) -> str:
        """The parameter that set `wanted_tokens`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def conversation(self) -> list[tuple[str, str]]:
        """`(role, text)` of each message; `developer` is today's word for `system`, parts are joined as they are.

        Raises:
            EmptyPromptError: no message.
            UnsupportedParameterError: a part that is not text.
        """
        if not self.messages:
            raise EmptyPromptError(param="messages")
        return [
            ("system" if message.role == "developer" else message.role, _text_of(index, message.content))
            for index, message in enumerate(self.messages)
        ]


AnyRequest: TypeAlias = CompletionRequest | ChatRequest
RequestT = TypeVar("RequestT", bound=CompletionRequest | ChatRequest)

_COMPLETION_ONLY: Final[dict[str, tuple[object, ...]]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}
_CHAT_ONLY: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_NOT_HONOURED: Final[dict[str, tuple[object, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "metadata": ({},),
    "n": (1,),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
"""Parameters that are not honoured, with the values that change nothing; null is one for each."""

_TABLE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT: Final = re.compile(r"^(?P<text>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD: Final = re.compile(r"(missing required|contains unknown) field `([^`]*)`")


class RequestParser(Generic[RequestT]):
    """Bytes to a checked request, for one route."""

    def __init__(self, request: type[RequestT], neutral: dict[str, tuple[object, ...]]) -> None:
        self._decoder: msgspec.json.Decoder[RequestT] = msgspec.json.Decoder(request)
        self._known = {field.encode_name for field in msgspec.structs.fields(request)}
        self._neutral = _NOT_HONOURED | neutral

    def parse(self, body: bytes) -> RequestT:
        """The request in that body.

        Raises:
            InvalidRequestError: no JSON, no object, a wrong type or range, a contradiction; `param` says where.
            UnsupportedParameterError: a parameter we do not honour.
        """
        try:
            for name, raw in _TABLE.decode(body).items():
                if name not in self._known:
                    self._check_neutral(name, raw)
            request = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explain(str(error)) from None
        except msgspec.DecodeError as error:
            raise InvalidRequestError(param="", detail=f"the body is no valid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequestError(param="", detail="the body is nested too deeply") from None
        _check_contradictions(request)
        return request

    def _check_neutral(self, name: str, raw: msgspec.Raw) -> None:
        neutral = self._neutral.get(name)
        if neutral is None:
            raise UnsupportedParameterError(param=shorten(name), detail="there is no such parameter here")
        value = msgspec.json.decode(raw)
        if value is None or any(_same(value, one) for one in neutral):
            return
        allowed = ", ".join(msgspec.json.encode(one).decode() for one in neutral)
        detail = f"only {allowed} is possible" if neutral else "leave it out"
        raise UnsupportedParameterError(param=shorten(name), detail=detail)


COMPLETIONS: Final = RequestParser(CompletionRequest, _COMPLETION_ONLY)
CHAT: Final = RequestParser(ChatRequest, _CHAT_ONLY)


def shorten(text: str) -> str:
    """What a client sent, short enough to be repeated to it."""
    return text if len(text) <= limits.MAX_ECHO_CHARS else text[: limits.MAX_ECHO_CHARS - 3] + "..."


def _same(value: object, neutral: object) -> bool:
    # In Python `True == 1`; in a request it is a wrong type.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _text_of(index: int, content: str | Sequence[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        at = f"messages[{index}].content[{number}]"
        if part.type != "text":
            raise UnsupportedParameterError(param=f"{at}.type", detail="only text parts are possible")
        if part.text is None:
            raise InvalidRequestError(param=f"{at}.text", detail=f"'{at}.text' is missing")
    return "".join(part.text or "" for part in content)


def _check_contradictions(request: AnyRequest) -> None:
    if request.stream_options is not None and not request.streamed:
        raise InvalidRequestError(param="stream_options", detail="'stream_options' needs 'stream': true")
    if isinstance(request, CompletionRequest):
        return
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(param="top_logprobs", detail="'top_logprobs' needs 'logprobs': true")
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            param="max_tokens", detail="'max_tokens' and 'max_completion_tokens' contradict each other"
        )


def _explain(message: str) -> InvalidRequestError:
    match = _AT.match(message)
    text, path = (match["text"], match["path"] or "") if match else (message, "")
    if field := _FIELD.search(text):
        path = f"{path}.{shorten(field[2])}".lstrip(".")
        if field[1].startswith("contains"):
            return UnsupportedParameterError(param=path, detail="leave it out")
        return InvalidRequestError(param=path, detail=f"'{path}' is missing")
    what = f"'{path}'" if path else "the body"
    return InvalidRequestError(param=path, detail=f"{what}: {shorten(text)}")
