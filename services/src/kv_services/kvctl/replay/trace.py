"""Traces in Mooncake's format: one JSON object a line, a request's prompt as a list of block ids.

An id stands for a block and everything before it, so equal ids mean equal prefixes. A trace in which one id follows two
different ids is refused: replaying it would count hits that no prefix cache can have.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kv_services.kvctl.replay.errors import TraceError

TRACE_BLOCK_TOKENS: Final = 512
"""Tokens of a block in Mooncake's traces."""

MAX_LINE_BYTES: Final = 4 << 20
MAX_REQUESTS: Final = 10_000_000

BlockId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request.

    Attributes:
        timestamp: milliseconds since the beginning of the trace.
        input_length, output_length: tokens.
        hash_ids: one id a block of the prompt; the last block may be partial.
    """

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=0)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[BlockId, ...]


def read_trace(path: Path) -> list[TraceRequest]:
    """Every request of a trace.

    Raises:
        TraceError: the file cannot be read, or a line is not a request; the message names it.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    parents: dict[int, int] = {}
    number = 0
    try:
        with path.open("rb") as stream:
            for line in _lines(stream):
                number += 1
                if not line.strip():
                    continue
                request = decoder.decode(line)
                _require_prefixes(request, parents)
                requests.append(request)
                if len(requests) > MAX_REQUESTS:
                    raise ValueError(f"more than {MAX_REQUESTS} requests")
    except OSError as error:
        raise TraceError(path=str(path), line=number, reason=error.strerror or str(error)) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(path=str(path), line=number, reason=str(error)) from None
    return requests


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace; returns how many requests it has.

    Raises:
        TraceError: it cannot be written.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    try:
        with path.open("wb") as stream:
            for request in requests:
                stream.write(encoder.encode(request) + b"\n")
                count += 1
    except OSError as error:
        raise TraceError(path=str(path), line=count, reason=error.strerror or str(error)) from None
    return count


def _lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    for line in stream:
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
        yield line


def _require_prefixes(request: TraceRequest, parents: dict[int, int]) -> None:
    before = -1
    for block_id in request.hash_ids:
        if parents.setdefault(block_id, before) != before:
            raise ValueError(f"block {block_id} follows {before} here and {parents[block_id]} before")
        before = block_id
