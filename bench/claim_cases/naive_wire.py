"""What the processes of the naive side, and their client, say to each other.

KV is one message: the length of a head, the head in MessagePack, and all of the prompt's KV in one piece of memory. Its
receiver says one byte when it has the KV in place. Everything else is one JSON object a line.
"""

import socket
import time
from typing import Final

import msgspec

HEAD_LENGTH: Final = 4
IN_PLACE: Final = b"\x01"
CONNECT_S: Final = 120.0


class Settings(msgspec.Struct, frozen=True):
    """How both processes are started. `near` is where the prefill process is, `far` where the decode process is."""

    engine: str
    kv_dtype: str
    block_size: int
    slots: int
    max_batch: int
    near: str
    far: str
    ask_port: int
    kv_port: int
    token_port: int


class Ask(msgspec.Struct, frozen=True):
    """A client's request, to the prefill process: (role, text) of each message."""

    number: int
    chat: list[tuple[str, str]]
    max_tokens: int


class Head(msgspec.Struct, frozen=True):
    """Before the KV of a prompt's tokens but the last. Times are of the one clock that this host has."""

    number: int
    tokens: list[int]
    max_tokens: int
    num_blocks: int
    nbytes: int
    computed_ns: int


class Token(msgspec.Struct, frozen=True, tag=True):
    """One token of an answer, as the bytes it stands for."""

    number: int
    data: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The end of an answer, and when its KV was in place."""

    number: int
    nbytes: int
    computed_ns: int
    in_place_ns: int


class Counts(msgspec.Struct, frozen=True, tag=True):
    """The answer to any line that a client sends to the decode process."""

    live: int
    slots: int


Line = Token | Ended | Counts


def reach(host: str, port: int) -> socket.socket:
    """A connection to a process that may just be starting.

    Raises:
        OSError: nobody has listened there for `CONNECT_S`.
    """
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
        else:
            return without_delay(sock)


def taken(host: str, port: int) -> socket.socket:
    """The first connection that comes to that port."""
    with socket.create_server((host, port)) as server:
        return without_delay(server.accept()[0])


def without_delay(sock: socket.socket) -> socket.socket:
    """What is sent leaves at once. Buffers are left to the kernel, which lets them grow to megabytes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def fill(sock: socket.socket, into: memoryview) -> None:
    """Receive exactly so many bytes.

    Raises:
        EOFError: the other end closed before.
    """
    done = 0
    while done < len(into):
        count = sock.recv_into(into[done:])
        if not count:
            raise EOFError(f"the connection ended after {done} of {len(into)} bytes")
        done += count
