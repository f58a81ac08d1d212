"""A channel of frames whose peer has closed: what the peer said before is heard, whatever of ours it left unread."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from kv_transport.backends.seqpacket import FrameSocket
from kv_transport.poster import LoopPoster
from tests.transport.helpers_transport import eventually

SAID = [b"placed", b"placed again", b"goodbye"]


def channel(sock: socket.socket, on_frame: Callable[[FrameSocket, bytes], None], ends: list[str]) -> FrameSocket:
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    made = FrameSocket(sock, loop, LoopPoster(loop), lambda data, fds: on_frame(made, bytes(data)), ends.append)
    return made


@pytest.mark.parametrize("unread", [0, 1, 3])
@pytest.mark.parametrize("answers", [False, True])
async def test_the_last_words_of_a_peer_that_has_closed_are_heard(unread: int, answers: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard: list[bytes] = []
    ends: list[str] = []

    def hear(made: FrameSocket, data: bytes) -> None:
        heard.append(data)
        if answers:
            made.send(b"acknowledged")

    made = channel(ours, hear, ends)
    for _ in range(unread):
        made.send(b"an answer that is not read")
    for frame in SAID:
        theirs.send(frame)
    theirs.close()
    await eventually(lambda: bool(ends))
    assert heard == SAID and len(ends) == 1 and made.closed


async def test_a_peer_that_reads_no_more_is_the_end_though_it_stays() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard: list[bytes] = []
    ends: list[str] = []
    with theirs:
        made = channel(ours, lambda _, data: heard.append(data), ends)
        theirs.send(SAID[0])
        theirs.shutdown(socket.SHUT_RD)
        made.send(b"nobody takes it")
        await eventually(lambda: bool(ends))
        assert heard == SAID[:1] and made.closed
