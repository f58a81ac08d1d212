"""Brings a decode node's tokens to their gateways: in order, each batch acknowledged, tried again until it is.

O1: at most one batch per request is under way; what is added meanwhile goes with the next.
O2: a batch is given up only when its gateway is dead, fenced the epoch, or the request's time is over.
O3: what is queued is bounded by the answers themselves: a token is a few numbers, and an answer has a limit.
O4: a batch is bounded: what piled up while a gateway was out of reach goes in many, each far below what a message may
    be, and holds up no turn of the loop.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kv_bus.errors import BusError
from kv_bus.interface import Bus, Call
from kv_core.clock import Clock
from kv_core.errors import FieldValue, KVError
from kv_core.ids import NodeId, RequestId
from kv_core.wire import Message
from kv_services.messages import DecodeGaveUp, OutputToken, TokenBatch

ACK_TIMEOUT_NS: Final = 2_000_000_000
RETRY_PAUSE_S: Final = 0.05
BATCH_TOKENS_MAX: Final = 512

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """What is still to be told about one epoch of one request."""

    request_id: RequestId
    epoch: int
    gateway: NodeId
    deadline_ns: int
    first_index: int = 0
    tokens: list[OutputToken] = field(default_factory=list)
    finish: str | None = None
    gave_up: DecodeGaveUp | None = None
    call: Call | None = None
    retry: asyncio.TimerHandle | None = None


def plain_fields(error: KVError) -> dict[str, str | int | float | bool | None]:
    """An error's fields as the wire takes them; what it does not take is shown as text."""

    def plain(value: FieldValue) -> str | int | float | bool | None:
        return value if value is None or isinstance(value, str | int | float | bool) else repr(value)

    return {name: plain(value) for name, value in error.fields.items()}


class TokenOutbox:
    """The way from one node's decode work to all gateways.

    Args:
        on_refused: the gateway does not want this epoch any more, or is out of reach until the deadline.
    """

    def __init__(self, bus: Bus, clock: Clock, on_refused: Callable[[RequestId, int, str], None]) -> None:
        self._bus = bus
        self._clock = clock
        self._on_refused = on_refused
        self._streams: dict[tuple[RequestId, int], _Stream] = {}
        self._closed = False

    def __len__(self) -> int:
        """Requests with something not yet acknowledged."""
        return len(self._streams)

    def tokens(
        self,
        request_id: RequestId,
        epoch: int,
        gateway: NodeId,
        deadline_ns: int,
        first_index: int,
        tokens: tuple[OutputToken, ...],
        finish: str | None,
    ) -> None:
        """Queue tokens that follow those queued before."""
        stream = self._stream(request_id, epoch, gateway, deadline_ns)
        if not stream.tokens:
            stream.first_index = first_index
        stream.tokens += tokens
        stream.finish = finish
        self._send(stream)

    def give_up(self, request_id: RequestId, epoch: int, gateway: NodeId, error: KVError, *, may_retry: bool) -> None:
        """Queue the news that this epoch ends here, after the tokens queued before."""
        stream = self._stream(request_id, epoch, gateway, self._clock.monotonic_ns() + 10 * ACK_TIMEOUT_NS)
        stream.gave_up = DecodeGaveUp(request_id, epoch, error.code, plain_fields(error), may_retry)
        self._send(stream)

    def drop(self, request_id: RequestId, epoch: int) -> None:
        """Nobody wants this epoch any more."""
        stream = self._streams.pop((request_id, epoch), None)
        if stream is not None:
            self._stop(stream)

    def drop_gateway(self, gateway: NodeId) -> None:
        """That gateway is dead."""
        for key in [key for key, stream in self._streams.items() if stream.gateway == gateway]:
            self.drop(*key)

    def close(self) -> None:
        """Stop at once. Idempotent."""
        self._closed = True
        for stream in self._streams.values():
            self._stop(stream)
        self._streams.clear()

    def _stream(self, request_id: RequestId, epoch: int, gateway: NodeId, deadline_ns: int) -> _Stream:
        key = (request_id, epoch)
        if key not in self._streams:
            self._streams[key] = _Stream(request_id, epoch, gateway, deadline_ns)
        return self._streams[key]

    def _stop(self, stream: _Stream) -> None:
        if stream.call is not None:
            stream.call.cancel()
        if stream.retry is not None:
            stream.retry.cancel()
        stream.call = stream.retry = None

    def _send(self, stream: _Stream) -> None:
        if self._closed or stream.call is not None or stream.retry is not None:
            return
        message: Message
        count = min(len(stream.tokens), BATCH_TOKENS_MAX)
        if count:
            finish = stream.finish if count == len(stream.tokens) else None
            tokens = tuple(stream.tokens[:count])
            message = TokenBatch(stream.request_id, stream.epoch, stream.first_index, tokens, finish)
        elif stream.gave_up is not None:
            message = stream.gave_up
        else:
            del self._streams[stream.request_id, stream.epoch]
            return
        try:
            stream.call = self._bus.call(
                stream.gateway,
                message,
                lambda outcome: self._outcome(stream, message, count, outcome),
                timeout_ns=ACK_TIMEOUT_NS,
            )
        except KVError as error:
            self._failed(stream, error)

    def _outcome(self, stream: _Stream, message: Message, count: int, outcome: Message | KVError) -> None:
        stream.call = None
        if self._streams.get((stream.request_id, stream.epoch)) is not stream:
            return
        if isinstance(outcome, KVError):
            self._failed(stream, outcome)
            return
        del stream.tokens[:count]
        stream.first_index += count
        if message is stream.gave_up or (stream.finish is not None and not stream.tokens):
            del self._streams[stream.request_id, stream.epoch]
            return
        self._send(stream)

    def _failed(self, stream: _Stream, error: KVError) -> None:
        key = (stream.request_id, stream.epoch)
        if isinstance(error, BusError) and self._clock.monotonic_ns() < stream.deadline_ns:
            _log.info(
                "tokens not acknowledged request=%s gateway=%s cause=%s", stream.request_id, stream.gateway, error
            )
            stream.retry = asyncio.get_running_loop().call_later(RETRY_PAUSE_S, self._again, stream)
            return
        self._streams.pop(key, None)
        self._on_refused(stream.request_id, stream.epoch, str(error))

    def _again(self, stream: _Stream) -> None:
        stream.retry = None
        if (stream.request_id, stream.epoch) in self._streams:
            self._send(stream)
