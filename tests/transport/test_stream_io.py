"""Bytes between sockets and memory: in order, summed on the way, and never waited for while something else is to do."""

import os
import random
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.checksum import crc64
from kv_transport import stream_io
from kv_transport.backends.payload import Sink
from kv_transport.stream_io import DO_NOT_WAIT, Spans, State, Sums

MEMORY = 1 << 19
Receive = Callable[[int, memoryview, Spans, Sums, State], int]
Send = Callable[[int, bytes, memoryview, Spans, Sums | None, State], bool]


def _compiled_receive(fd: int, memory: memoryview, spans: Spans, checks: Sums, state: State) -> int:
    return stream_io.receive(fd, DO_NOT_WAIT, memory, spans, checks, state)


def _compiled_send(fd: int, head: bytes, memory: memoryview, spans: Spans, checks: Sums | None, state: State) -> bool:
    return stream_io.send(fd, DO_NOT_WAIT, head, memory, spans, checks, state)


needs_compiled = pytest.mark.skipif(not stream_io.COMPILED, reason="installed without a compiler")
both_receive = pytest.mark.parametrize(
    "receive", [pytest.param(_compiled_receive, marks=needs_compiled), stream_io.plain_receive]
)
both_send = pytest.mark.parametrize("send", [pytest.param(_compiled_send, marks=needs_compiled), stream_io.plain_send])


@st.composite
def spans_in_memory(draw: st.DrawFn) -> Spans:
    """Pieces that do not overlap, in any order."""
    size = st.one_of(st.integers(1, 300), st.integers(1_000, 40_000))
    sizes = draw(st.lists(size, min_size=1, max_size=90).filter(lambda found: sum(found) <= MEMORY))
    begins = np.cumsum([0, *sizes[:-1]])
    table = np.stack((begins, sizes), axis=1).astype(np.int64)
    return table[draw(st.permutations(range(len(sizes))))] if draw(st.booleans()) else table


def content_of(memory: memoryview, spans: Spans) -> bytes:
    return b"".join(memory[offset : offset + nbytes] for offset, nbytes in spans.tolist())


def sums_of(memory: memoryview, spans: Spans) -> list[int]:
    return [crc64(memory[offset : offset + nbytes]) for offset, nbytes in spans.tolist()]


@contextmanager
def connected(buffer_nbytes: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setblocking(False)
            if buffer_nbytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
        yield ours, theirs


@both_receive
@given(spans=spans_in_memory(), cuts=st.lists(st.integers(1, 30_000), max_size=6))
def test_received_spans_hold_and_sum_what_was_sent(receive: Receive, spans: Spans, cuts: list[int]) -> None:
    """However the bytes come in pieces, and with more spans than one call takes; not a byte beside them."""
    total = int(spans[:, 1].sum())
    content, memory = random.Random(total).randbytes(total), memoryview(bytearray(MEMORY))
    checks, state = np.zeros(len(spans), np.uint64), stream_io.receive_state()
    with connected() as (ours, theirs):
        with pytest.raises(BlockingIOError):
            receive(ours.fileno(), memory, spans, checks, state)
        sent = got = 0
        for cut in [*cuts, *[100_000] * (total // 100_000 + 1)]:
            sent += theirs.send(content[sent : sent + cut]) if sent < total else 0
            while got < sent:
                got += receive(ours.fileno(), memory, spans, checks, state)
    assert content_of(memory, spans) == content and sent == total
    assert not any(memory[total:])
    assert checks.tolist() == sums_of(memory, spans)
    assert state.tolist() == [len(spans), 0]


@both_send
@given(spans=spans_in_memory(), head=st.binary(max_size=400), summed=st.booleans())
def test_head_and_spans_leave_in_order_and_summed(send: Send, spans: Spans, head: bytes, summed: bool) -> None:
    """Through a socket that is full again and again."""
    memory = memoryview(random.Random(len(spans)).randbytes(MEMORY))
    checks, state = np.zeros(len(spans), np.uint64), stream_io.send_state()
    arrived, turns = bytearray(), 0
    with connected(buffer_nbytes=8192) as (ours, theirs):
        while not send(ours.fileno(), head, memory, spans, checks if summed else None, state):
            arrived += theirs.recv(3_000)
            turns += 1
        while len(arrived) < len(head) + int(spans[:, 1].sum()):
            arrived += theirs.recv(1 << 16)
    assert bytes(arrived) == head + content_of(memory, spans)
    assert checks.tolist() == (sums_of(memory, spans) if summed else [0] * len(spans))


@both_receive
def test_receiving_tells_the_end_of_the_stream_and_refuses_full_spans(receive: Receive) -> None:
    memory, spans = memoryview(bytearray(8)), np.array([[4, 4]], np.int64)
    checks, state = np.zeros(1, np.uint64), stream_io.receive_state()
    with connected() as (ours, theirs):
        theirs.send(b"abcd")
        assert receive(ours.fileno(), memory, spans, checks, state) == 4
        assert state.tolist() == [1, 0] and bytes(memory) == bytes(4) + b"abcd"
        with pytest.raises(IndexError):
            receive(ours.fileno(), memory, spans, checks, state)
        theirs.close()
        assert receive(ours.fileno(), memory, spans, checks, stream_io.receive_state()) == 0


@both_send
def test_a_peer_that_is_gone_is_an_error(send: Send) -> None:
    with connected() as (ours, theirs):
        theirs.close()
        with pytest.raises(BrokenPipeError):
            send(ours.fileno(), b"head", memoryview(b""), np.zeros((0, 2), np.int64), None, stream_io.send_state())


@pytest.mark.parametrize("span", [(-1, 4), (5, 4), (0, 9), (1 << 62, 1 << 62)])
@both_receive
def test_no_byte_is_taken_for_a_span_outside_its_memory(receive: Receive, span: tuple[int, int]) -> None:
    with connected() as (ours, theirs):
        theirs.send(b"abcd")
        with pytest.raises(IndexError):
            receive(
                ours.fileno(),
                memoryview(bytearray(8)),
                np.array([span], np.int64),
                np.zeros(1, np.uint64),
                stream_io.receive_state(),
            )
        assert ours.recv(8) == b"abcd"


@needs_compiled
@pytest.mark.parametrize(
    ("spans", "checks", "state"),
    [
        (np.zeros(3, np.int64), np.zeros(1, np.uint64), np.zeros(2, np.int64)),
        (np.array([[0, 4]], np.int64), np.zeros(2, np.uint64), np.zeros(2, np.int64)),
        (np.array([[0, 4]], np.int64), np.zeros(1, np.uint64), np.zeros(1, np.int64)),
        (np.array([[0, 4]], np.int64), np.zeros(1, np.uint64), np.array([0, 4])),
        (np.array([[0, 0]], np.int64), np.zeros(1, np.uint64), np.zeros(2, np.int64)),
    ],
)
def test_tables_that_do_not_fit_are_refused(spans: Spans, checks: Sums, state: State) -> None:
    with connected() as (ours, _), pytest.raises((ValueError, IndexError)):
        stream_io.receive(ours.fileno(), DO_NOT_WAIT, memoryview(bytearray(8)), spans, checks, state)


@needs_compiled
def test_it_waits_for_its_socket_until_the_thread_is_wanted() -> None:
    """One call sends and one receives what does not fit the socket; and both give up when there is other work."""
    memory = memoryview(random.Random(1).randbytes(MEMORY))
    into, spans = memoryview(bytearray(MEMORY)), np.array([[0, MEMORY]], np.int64)
    wanted, others = os.eventfd(0), select.epoll()
    others.register(wanted, select.EPOLLIN)
    try:
        with connected(buffer_nbytes=8192) as (ours, theirs):
            sent: list[bool] = []
            sending = threading.Thread(
                target=lambda: sent.append(
                    stream_io.send(ours.fileno(), others.fileno(), b"", memory, spans, None, stream_io.send_state())
                )
            )
            sending.start()
            checks, state = np.zeros(1, np.uint64), stream_io.receive_state()
            assert stream_io.receive(theirs.fileno(), others.fileno(), into, spans, checks, state) == MEMORY
            sending.join(20)
            assert sent == [True] and into == memory
            os.eventfd_write(wanted, 1)
            assert not stream_io.send(ours.fileno(), others.fileno(), b"", memory, spans, None, stream_io.send_state())
            with pytest.raises(BlockingIOError):
                while theirs.recv(1 << 20):
                    pass
            state[:] = 0
            with pytest.raises(BlockingIOError):
                stream_io.receive(theirs.fileno(), others.fileno(), into, spans, checks, state)
    finally:
        others.close()
        os.close(wanted)


@contextmanager
def connected_by_tcp() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


@contextmanager
def receiving(
    memory: memoryview, spans: Spans, checks: Sums, state: State
) -> Iterator[tuple[socket.socket, socket.socket, int, Callable[[], int]]]:
    """A thread that receives over tcp into those spans: its socket, the other end, an eventfd that wants it elsewhere,
    and a function that waits for what it gives."""
    wanted, others, found = os.eventfd(0), select.epoll(), list[int]()
    others.register(wanted, select.EPOLLIN)
    with connected_by_tcp() as (ours, theirs):
        thread = threading.Thread(
            target=lambda: found.append(
                stream_io.receive(ours.fileno(), others.fileno(), memory, spans, checks, state)
            ),
            daemon=True,
        )
        thread.start()

        def result() -> int:
            thread.join(60)
            return found[0]

        try:
            yield ours, theirs, wanted, result
        finally:
            os.eventfd_write(wanted, 1)
            thread.join(60)
            others.close()
            os.close(wanted)


def woken_at(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def came(state: State, spans: Spans, nbytes: int) -> None:
    """Wait until so many bytes were received, which others do meanwhile."""
    for _ in range(20_000):
        if int(spans[: state[0], 1].sum()) + int(state[1]) == nbytes:
            return
        threading.Event().wait(0.001)
    pytest.fail(f"{nbytes} bytes were not taken, but {state}")


@needs_compiled
@pytest.mark.parametrize("until", ["all is there", "the end", "it is wanted"])
def test_whoever_waits_for_much_is_woken_for_what_there_is(until: str) -> None:
    """The kernel is asked to wake it seldom: never beyond what is to come, nor for what others read after it."""
    total, early = (1 << 20) + 77, (1 << 20) + 70
    content, memory = random.Random(1).randbytes(total), memoryview(bytearray(total))
    spans, checks = np.array([[0, 3], [3, total - 3]], np.int64), np.zeros(2, np.uint64)
    state = stream_io.receive_state()
    with receiving(memory, spans, checks, state) as (ours, theirs, wanted, result):
        theirs.sendall(content[:early])
        came(state, spans, early)
        assert woken_at(ours) in (1, total - early)
        if until == "all is there":
            theirs.sendall(content[early:])
        elif until == "the end":
            theirs.close()
        else:
            os.eventfd_write(wanted, 1)
        assert result() == (total if until == "all is there" else early)
        assert woken_at(ours) == 1
        assert memory[: result()] == content[: result()]


@needs_compiled
def test_what_comes_before_a_pause_is_taken_in_the_pause() -> None:
    """However little it is: a sender may have no more for now, and on some kernels cannot send more before that."""
    total, parts = 4 << 20, (100_000, 1, 300_000, 5)
    content, memory = random.Random(2).randbytes(total), memoryview(bytearray(total))
    spans, checks = np.array([[0, total]], np.int64), np.zeros(1, np.uint64)
    state = stream_io.receive_state()
    with receiving(memory, spans, checks, state) as (_, theirs, _, result):
        sent = 0
        for nbytes in parts:
            theirs.sendall(content[sent : sent + nbytes])
            sent += nbytes
            came(state, spans, sent)
        theirs.sendall(content[sent:])
        assert result() == total and memory == content and int(checks[0]) == crc64(content)


@pytest.mark.parametrize("when", ["never", "at once", "under way"])
@given(spans=spans_in_memory(), seed=st.integers(0, 1 << 30))
def test_what_is_dropped_or_diverted_reaches_no_memory(when: str, spans: Spans, seed: int) -> None:
    rng = random.Random(seed)
    dropped = [rng.random() < 0.4 for _ in range(len(spans))]
    total = int(spans[:, 1].sum())
    content, memory = rng.randbytes(total), memoryview(bytearray(MEMORY))
    turn_at = {"never": total + 1, "at once": 0, "under way": rng.randrange(total) + 1}[when]
    sink = Sink(memory, spans, dropped, lambda: total - sink.left >= turn_at)
    with connected() as (ours, theirs):
        sent = turned = 0
        while sink.left:
            if sent == total - sink.left:
                sent += theirs.send(content[sent : sent + rng.randint(1, 50_000)])
            turned = turned or (total - sink.left >= turn_at and total - sink.left)
            assert sink.receive(ours, DO_NOT_WAIT) > 0
    at = 0
    for (offset, nbytes), gone, check in zip(spans.tolist(), dropped, sink.checks, strict=True):
        cell = memory[offset : offset + nbytes]
        diverted = when != "never" and (when == "at once" or bool(turned))
        if diverted:
            assert check is None
            kept = max(0, min(nbytes, int(turned) - at)) if when == "under way" and not gone else 0
            assert bytes(cell) == content[at : at + kept] + bytes(nbytes - kept)
        elif gone:
            assert check is None and not any(cell)
        else:
            assert bytes(cell) == content[at : at + nbytes] and check == crc64(cell)
        at += nbytes


@pytest.mark.parametrize("missing", ["_kernels", "_stream_io"])
def test_without_a_compiled_part_the_twins_stand_in(missing: str) -> None:
    """In a process where an extension cannot be imported, the same calls move the same bytes."""
    program = f"""
import socket, sys
sys.modules["kv_transport.{missing}"] = None
import numpy as np
from kv_transport import stream_io
assert not stream_io.COMPILED
ours, theirs = socket.socketpair()
spans, checks, state = np.array([[1, 2], [0, 1]]), np.zeros(2, np.uint64), stream_io.send_state()
assert stream_io.send(ours.fileno(), stream_io.DO_NOT_WAIT, b"head", memoryview(b"abc"), spans, checks, state)
into, found = memoryview(bytearray(7)), np.zeros(1, np.uint64)
whole, state = np.array([[0, 7]]), stream_io.receive_state()
assert stream_io.receive(theirs.fileno(), stream_io.DO_NOT_WAIT, into, whole, found, state) == 7
print(bytes(into))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "b'headbca'\n")
