"""tcp over loopback against plain sockets: one connection, `sendall` of one memory, `recv_into` another, one byte back.

The plain side checks nothing and moves one contiguous run; ours moves the same number of bytes, block by block. Its
sockets are as the host makes them. A host may pace packets even over loopback, and within one host ours ask it not to:
so plain sockets are measured once more with the same wish, for information.
"""

import socket
import time
from collections.abc import Iterator
from functools import partial

from bench import harness
from bench.transport_cases import places
from bench.transport_cases.far import order, receive_all, stop_pacing
from bench.transport_cases.near import Near, connected
from bench.transport_cases.plan import Effort, Outcome
from kv_transport import XferOp

RATIO_NEED = 0.9


def wire_cases(effort: Effort) -> Iterator[Outcome]:
    with connected("tcp") as near:
        mine = near.share_buffers(places.BUFFER_NBYTES)
        near.introduce()
        with _connection(near, unpaced=False) as plain, _connection(near, unpaced=True) as unpaced:
            for pattern in (places.LARGE, places.BLOCKS, places.SMALL_BLOCKS):
                found = harness.interleave(
                    {
                        "put": partial(near.rate, near.xfer(XferOp.WRITE, pattern), effort.seconds),
                        "get": partial(near.rate, near.xfer(XferOp.READ, pattern), effort.seconds),
                        "plain_put": partial(plain_rate, plain, mine[: pattern.nbytes], True, effort.seconds),
                        "plain_get": partial(plain_rate, plain, mine[: pattern.nbytes], False, effort.seconds),
                        "unpaced_put": partial(plain_rate, unpaced, mine[: pattern.nbytes], True, effort.seconds),
                        "unpaced_get": partial(plain_rate, unpaced, mine[: pattern.nbytes], False, effort.seconds),
                    },
                    effort.rounds,
                )
                for name in ("put", "get"):
                    need = RATIO_NEED if pattern is not places.SMALL_BLOCKS else None
                    case, ours, said = f"tcp_{name}_{pattern.name}", found[name], "plain sockets, recv_into"
                    yield harness.compare_samples(case, ours, found[f"plain_{name}"], "GB/s", said, need)
                    theirs = found[f"unpaced_{name}"]
                    yield harness.compare_samples(f"{case}_unpaced", ours, theirs, "GB/s", f"{said}, not paced", None)


def _connection(near: Near, *, unpaced: bool) -> socket.socket:
    sock = plain_connection("127.0.0.1", int(str(near.far.ask("plain_sockets", unpaced=unpaced)["port"])))
    if unpaced:
        stop_pacing(sock)
    return sock


def plain_connection(host: str, port: int) -> socket.socket:
    sock = socket.create_connection((host, port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def plain_rate(sock: socket.socket, view: memoryview, write: bool, seconds: float) -> float:
    """GB/s of moving the view to or from the far process."""
    moved, started = 0, time.perf_counter()
    while True:
        sock.sendall(order(write, len(view)))
        if write:
            sock.sendall(view)
            sock.recv(1)
        else:
            receive_all(sock, view)
        moved += len(view)
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return moved / elapsed / 1e9
