"""What the gateway refuses or fails with, and what HTTP makes of any error of the product.

Decides status, OpenAI error type and code, and whether a client may try again; knows no request and no response.

E1: a class decides for its subclasses too; the nearest class in the method resolution order wins.
E2: an error that no row names is 503 if it may be retried and 500 if not; a client's fault is never either.
"""

from dataclasses import dataclass
from typing import Final

from kv_core.errors import KVError, RetryableError


class GatewayError(KVError):
    """Base of the gateway's errors."""

    code = 7200


class InvalidRequestError(GatewayError):
    """The client sent what cannot be honoured. `param` names the parameter, or is "" when the whole is wrong."""

    code = 7201
    template = "{detail}"


class UnsupportedParameterError(InvalidRequestError):
    """A parameter, or a value of it, that this server does not honour; ignoring it would change the answer."""

    code = 7202
    template = "parameter '{param}' is not supported: {detail}"


class EmptyPromptError(InvalidRequestError):
    """There is nothing to continue."""

    code = 7203
    template = "'{param}' is empty: at least one token is needed"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer do not fit the model's context, or the prompt is over the cluster's limit."""

    code = 7204
    template = (
        "this model takes {limit} tokens, but {prompt_tokens} prompt tokens and {max_tokens} for the answer were"
        " asked for"
    )


class PromptTooLongError(ContextLengthError):
    """The prompt alone is over what one request may bring."""

    code = 7205
    template = "the prompt has {prompt_tokens} tokens, {limit} are allowed"


class UnknownModelError(GatewayError):
    """No such model is served."""

    code = 7206
    template = "the model '{model}' does not exist; served: {served}"


class AuthenticationError(GatewayError):
    """No API key, or nobody's."""

    code = 7207
    template = "{detail}"


class PermissionDeniedError(GatewayError):
    """Who asks is known, but may not have that."""

    code = 7208
    template = "{detail}"


class BodyTooLargeError(GatewayError):
    """More bytes than a request may have."""

    code = 7209
    template = "the body is over the limit of {limit} bytes"


class MediaTypeError(GatewayError):
    """A body that is not plain JSON."""

    code = 7210
    template = "{detail}"


class BodyTimeoutError(GatewayError):
    """The client stopped in the middle of its request."""

    code = 7211
    template = "the body did not arrive in {timeout_s} s"


class RouteNotFoundError(GatewayError):
    """No such path."""

    code = 7212
    template = "unknown path {path}"


class MethodNotAllowedError(GatewayError):
    """The path exists, but not for that method."""

    code = 7213
    template = "{method} is not allowed here, use {allowed}"


class OverloadedError(GatewayError, RetryableError):
    """Too much is running or waiting; nothing was started. `retry_after_s` says when to come again."""

    code = 7214
    template = "{what} is full ({limit}): try again in {retry_after_s} s"


class NoNodesError(GatewayError, RetryableError):
    """No live node can serve the request now; raised by a completer."""

    code = 7215
    template = "no {role} node is available for model {model}"


class DeadlineExceededError(GatewayError):
    """The request's time was over before its answer was complete."""

    code = 7216
    template = "the request was not finished in {timeout_s} s"


class DrainingError(GatewayError, RetryableError):
    """This gateway is being stopped and takes nothing new."""

    code = 7217
    template = "the gateway is shutting down"


class SlowReaderError(GatewayError):
    """Tokens came faster than the client reads and than its stream holds, so its request was ended."""

    code = 7218
    template = "the client does not read its answer: {detail}"


class ClientStalledError(SlowReaderError):
    """The client left what was sent to it unread for too long; its connection is gone, so nobody sees this."""

    code = 7222
    template = "the client read nothing for {timeout_s} s"


class StreamProtocolError(GatewayError):
    """A completer broke the contract of `GenerationStream`: a bug on this side."""

    code = 7219
    template = "{detail}"


class OpenGatewayError(GatewayError):
    """Without API keys a gateway serves loopback only."""

    code = 7220
    template = "no API key is configured, so the gateway binds loopback only, not {host}: add a tenant with a key"


class BindError(GatewayError):
    """The address cannot be served."""

    code = 7221
    template = "cannot serve HTTP on {host}:{port}: {reason}"


@dataclass(frozen=True, slots=True)
class HttpFault:
    """An error as HTTP says it.

    Attributes:
        status: HTTP status.
        type: OpenAI's class of error.
        code: OpenAI's machine-readable code, or ours where OpenAI has none.
        retry_after_s: sent as `Retry-After` when not None.
    """

    status: int
    type: str
    code: str
    retry_after_s: int | None = None


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_FAULTS: Final[dict[type[KVError], HttpFault]] = {
    InvalidRequestError: HttpFault(400, _INVALID, "invalid_value"),
    UnsupportedParameterError: HttpFault(400, _INVALID, "unsupported_parameter"),
    EmptyPromptError: HttpFault(400, _INVALID, "empty_prompt"),
    ContextLengthError: HttpFault(400, _INVALID, "context_length_exceeded"),
    AuthenticationError: HttpFault(401, "authentication_error", "invalid_api_key"),
    PermissionDeniedError: HttpFault(403, "permission_error", "permission_denied"),
    UnknownModelError: HttpFault(404, _INVALID, "model_not_found"),
    RouteNotFoundError: HttpFault(404, _INVALID, "unknown_url"),
    MethodNotAllowedError: HttpFault(405, _INVALID, "method_not_allowed"),
    BodyTimeoutError: HttpFault(408, _INVALID, "request_timeout"),
    BodyTooLargeError: HttpFault(413, _INVALID, "request_too_large"),
    MediaTypeError: HttpFault(415, _INVALID, "unsupported_media_type"),
    OverloadedError: HttpFault(429, "rate_limit_error", "overloaded", 1),
    NoNodesError: HttpFault(503, _SERVER, "no_nodes", 1),
    DrainingError: HttpFault(503, _SERVER, "draining", 1),
    DeadlineExceededError: HttpFault(504, _SERVER, "deadline_exceeded"),
    SlowReaderError: HttpFault(408, _INVALID, "slow_reader"),
    RetryableError: HttpFault(503, _SERVER, "try_again", 1),
    KVError: HttpFault(500, _SERVER, "internal_error"),
}


def register_fault(error: type[KVError], fault: HttpFault) -> None:
    """Say what HTTP makes of an error of another package; for the process entry, before the server starts."""
    _FAULTS[error] = fault


def fault_of(error: KVError) -> HttpFault:
    """Status, type and code of any error of the product (E1, E2)."""
    for cls in type(error).__mro__:
        fault = _FAULTS.get(cls)
        if fault is not None:
            break
    else:  # KVError itself is in the table
        fault = _FAULTS[KVError]
    retry_after = error.fields.get("retry_after_s")
    if fault.retry_after_s is not None and isinstance(retry_after, int | float) and not isinstance(retry_after, bool):
        return HttpFault(fault.status, fault.type, fault.code, max(1, -int(-retry_after // 1)))
    return fault


def param_of(error: KVError) -> str | None:
    """The request parameter an error is about, if it is about one."""
    param = error.fields.get("param")
    return param if isinstance(param, str) and param else None
