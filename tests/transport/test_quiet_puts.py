"""Small puts over shared memory that are answered in a page, with nobody woken unless somebody waits."""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from kv_core.errors import KVError
from kv_core.ids import NodeId
from kv_transport import Access, SharedBuffer, XferDesc, XferOp, XferState, doorbell, limits
from kv_transport.backends.shm import ShmBackend
from kv_transport.backends.shm_link import ShmLink
from kv_transport.backends.shm_session import ShmSession
from kv_transport.config import TransportName
from kv_transport.doorbell import PLACES, AnswersGiven, AnswersWanted
from kv_transport.errors import ReplayedNonce
from kv_transport.frames import Acked, Answers, FromOwner, Ping, encode
from tests.transport.helpers_transport import NO_RESERVE, eventually, introduce
from tests.transport.test_direct_posts import LOST, NBYTES, Ready, ready

PREFILL: Final = NodeId("prefill")
needs_compiled = pytest.mark.skipif(not doorbell.COMPILED, reason="installed without a compiler")
NO_HELP: Final = 300_000
"""No timer looks at the page while the test runs."""


def frames_of(it: Ready) -> list[FromOwner]:
    """What the peer sends from now on."""
    frames, received = list[FromOwner](), it.link._received

    def note(frame: FromOwner) -> None:
        frames.append(frame)
        received(frame)

    it.link._received = note  # type: ignore[method-assign]
    return frames


def session_of(it: Ready) -> ShmSession:
    (backend,) = (one for one in it.right.agent._backends if isinstance(one, ShmBackend))
    (session,) = backend._sessions.values()
    return session


async def notified(it: Ready, count: int) -> None:
    await eventually(lambda: it.notified() == count)


@needs_compiled
async def test_nobody_is_woken_for_an_answer_that_nobody_waits_for(tmp_path: Path) -> None:
    async with ready(tmp_path, heartbeat_ms=NO_HELP) as it:
        frames = frames_of(it)
        for count in range(1, 2 * PLACES):
            it.left.agent.transfer(it.put)
            await notified(it, count)
            assert it.put.state is XferState.DONE
            assert (await it.put.done()).units == 1
        assert frames == [] and it.arrived()


async def test_who_waits_is_woken_with_the_answer(tmp_path: Path) -> None:
    async with ready(tmp_path, heartbeat_ms=NO_HELP) as it:
        frames = frames_of(it)
        for _ in range(20):
            it.left.agent.transfer(it.put)
            await it.put.done(20_000)
        assert [type(frame) for frame in frames] == [Acked] * 20
        it.left.agent.transfer(it.put)
        await notified(it, 21)
        if doorbell.COMPILED:
            assert it.put.state is XferState.DONE and len(frames) == 20, "it does not wait any more"


@needs_compiled
async def test_the_last_words_of_a_link_that_breaks_count(tmp_path: Path) -> None:
    async with ready(tmp_path, "auto", heartbeat_ms=NO_HELP) as it:
        it.left.agent.transfer(it.put)
        await notified(it, 1)
        it.link.fail(LOST)
        stats = await it.put.done(20_000)
        assert stats.transports == {"shm": stats.nbytes} and stats.retries == 0 and it.notified() == 1


@needs_compiled
async def test_a_beat_of_the_heart_takes_answers_that_nobody_asked_for(tmp_path: Path) -> None:
    async with ready(tmp_path, heartbeat_ms=20) as it:
        it.left.agent.transfer(it.put)
        await eventually(lambda: it.link._posted == {})
        assert it.put.state is XferState.DONE


@needs_compiled
async def test_puts_that_share_a_place_are_told_apart(tmp_path: Path) -> None:
    """The one that comes to a place which is taken is answered by a frame."""
    async with ready(tmp_path, window_size=64, heartbeat_ms=NO_HELP) as it:
        link = it.link
        assert isinstance(link, ShmLink)
        first, second = it.xfer(XferOp.WRITE), it.xfer(XferOp.WRITE)
        it.left.agent.transfer(first)
        link._seq += PLACES - 1  # so many other questions in between
        it.left.agent.transfer(second)
        assert len(link._quiet) == 1 and link.units_posted == 2
        await notified(it, 2)
        await eventually(lambda: first.state is second.state is XferState.DONE)
        assert link._quiet == {}


@needs_compiled
async def test_a_put_that_nobody_waits_for_holds_no_place_in_the_window(tmp_path: Path) -> None:
    async with ready(tmp_path, window_size=1, heartbeat_ms=NO_HELP) as it:
        large = it.xfer(XferOp.WRITE, 4 * limits.INLINE_COPY_BYTES_MAX)
        it.left.agent.transfer(it.put)
        it.left.agent.transfer(large)
        assert it.peer.units_waiting == 1
        await large.done(20_000)
        it.left.agent.transfer(it.put)
        await notified(it, 3)
        other = it.xfer(XferOp.WRITE)
        it.left.agent.transfer(other)
        assert it.peer.flows == [] and it.put.state is XferState.DONE, "it went at once"
        await other.done(20_000)


@needs_compiled
async def test_memory_of_a_put_that_was_accepted_can_be_taken_away(tmp_path: Path) -> None:
    async with ready(tmp_path, heartbeat_ms=NO_HELP) as it:
        it.left.agent.transfer(it.put)
        await notified(it, 1)
        it.left.agent.deregister_memory(it.mine.region)
        assert it.left.agent.inventory().work == ()


def take_page_from(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections from now on have none at one side."""
    if side == "writer":
        monkeypatch.setattr(AnswersWanted, "create", lambda: None)
    else:
        monkeypatch.setattr(AnswersGiven, "of", lambda fd: os.close(fd))


@pytest.mark.parametrize("without", ["writer", "owner"])
async def test_a_side_without_a_page_is_answered_by_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    take_page_from(without, monkeypatch)
    async with ready(tmp_path, heartbeat_ms=NO_HELP) as it:
        frames = frames_of(it)
        for _ in range(3):
            it.left.agent.transfer(it.put)
            await it.put.done(20_000)
        assert [type(frame) for frame in frames] == [Acked] * 3 and it.notified() == 3


@needs_compiled
async def test_a_repeated_message_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = ShmSession._put

    def twice(self: ShmSession, data: memoryview) -> None:
        once(self, data)
        once(self, data)

    async with ready(tmp_path, heartbeat_ms=NO_HELP) as it:
        monkeypatch.setattr(ShmSession, "_put", twice)
        it.left.agent.transfer(it.put)
        assert (await it.put.done(20_000)).retries == 0
        assert it.notified() == 1 and it.right.agent.stats().units_refused == 1


async def test_an_attempt_that_is_refused_says_why(tmp_path: Path) -> None:
    async with ready(tmp_path, heartbeat_ms=NO_HELP) as it:
        it.left.agent._nonce -= 1
        it.left.agent.transfer(it.put)
        with pytest.raises(ReplayedNonce):
            await it.put.done(20_000)
        assert it.put.state is XferState.FAILED and it.notified() == 0


@pytest.mark.parametrize(
    ("data", "beside"),
    [
        (bytes([doorbell.MARK]) * 20, "nothing"),
        (encode(Answers()), "nothing"),
        pytest.param(encode(Answers()), "a pipe", marks=needs_compiled),  # else it is closed unseen
        (encode(Ping()), "a pipe"),
        (bytes(doorbell.message(1, 0, 1, b"")), "a pipe"),
    ],
)
async def test_what_is_no_put_and_no_page_ends_the_connection(tmp_path: Path, data: bytes, beside: str) -> None:
    """As the first words of a connection, where a page is taken."""
    async with ready(tmp_path) as it:
        session = session_of(it)
        if session._page is not None:
            session._page.close()
            session._page = None
        session._socket.takes_descriptors = True
        link = it.link
        assert isinstance(link, ShmLink)
        fds = os.pipe() if beside == "a pipe" else ()
        link._socket.send(data, fds[:1])
        await eventually(lambda: session.over and link.lost is not None)
        for fd in fds:
            os.close(fd)
        assert len(os.listdir("/proc/self/fd")) < 200


@pytest.mark.parametrize("transport", ["auto", "shm"])
async def test_whatever_breaks_a_put_is_announced_once_if_it_is_done_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: TransportName
) -> None:
    """Links and sessions that end before or after the answer, answers that stay away, messages that come twice."""
    rng = random.Random(7)
    once = ShmSession._put

    def sometimes_twice(self: ShmSession, data: memoryview) -> None:
        for _ in range(rng.choice([1, 1, 2])):
            if not self.over:
                once(self, data)

    monkeypatch.setattr(ShmSession, "_put", sometimes_twice)
    async with ready(tmp_path, transport, window_size=4) as it:
        agent, heard, outcomes = it.left.agent, Counter[bytes](), dict[bytes, bool]()

        async def listen() -> None:
            async for notif in it.right.agent.notifs():
                heard[notif.payload] += 1

        async def one(number: int) -> None:
            payload = b"%d" % number
            put = it.xfer(XferOp.WRITE, rng.choice([64, 4096, 2 * limits.INLINE_COPY_BYTES_MAX, 3 << 20]), payload)
            await asyncio.sleep(rng.uniform(0, 0.02))
            agent.transfer(put)
            try:
                await put.done(20_000)
                outcomes[payload] = True
            except KVError:
                outcomes[payload] = False
            await put.__aexit__(None, None, None)

        async def trouble(end: asyncio.Event) -> None:
            while not end.is_set():
                await asyncio.sleep(rng.uniform(0, 0.004))
                link = next(iter(it.peer.links), None)
                backend = next(one for one in it.right.agent._backends if isinstance(one, ShmBackend))
                session = next(iter(backend._sessions.values()), None)
                kind = rng.choice(["break", "cut", "mute", "none"])
                if kind == "break" and link is not None:
                    link.fail(LOST)
                elif kind == "cut" and session is not None:
                    session._lost("cut")
                elif kind == "mute" and isinstance(link, ShmLink) and link.lost is None:
                    link.take_answers = lambda: None  # type: ignore[method-assign]
                    await asyncio.sleep(rng.uniform(0, 0.004))
                    link.fail(LOST)

        listener, end = asyncio.create_task(listen()), asyncio.Event()
        troubler = asyncio.create_task(trouble(end))
        for begin in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 20)))
        end.set()
        await troubler
        # What was sent before is heard before.
        await eventually(lambda: all(heard[payload] for payload, done in outcomes.items() if done))
        listener.cancel()
        assert len(outcomes) == 200 and any(outcomes.values())
        assert max(heard.values()) == 1
        assert agent.inventory().work == ()


@needs_compiled
async def test_an_answer_that_somebody_waits_for_needs_no_frame_where_a_put_goes_back_at_once(tmp_path: Path) -> None:
    async with ready(tmp_path, heartbeat_ms=NO_HELP) as it:
        with SharedBuffer.create(NBYTES, "three", budget=NO_RESERVE) as third:
            left, right = it.left.agent, it.right.agent
            region = left.register_memory(third, Access.WRITE).region
            introduce(it.left, it.right)
            back = right.initialize_xfer(
                XferOp.WRITE, [XferDesc(it.theirs.region, 0, 64)], [XferDesc(region, 0, 64)], PREFILL, notif=b"back"
            )
            right.transfer(back)
            await back.done(20_000)
            await anext(left.notifs())
            (link,) = right.peer(PREFILL).links
            frames, received = list[FromOwner](), link._received

            def note(frame: FromOwner) -> None:
                frames.append(frame)
                received(frame)

            link._received = note  # type: ignore[method-assign]

            async def echo() -> None:
                async for _ in right.notifs():
                    right.transfer(back)
                    await back.done(20_000)

            task, answers = asyncio.create_task(echo()), left.notifs()
            async with asyncio.timeout(60):
                for _ in range(50):
                    left.transfer(it.put)
                    await anext(answers)
                    await it.put.done()
            # Only the last one, after which nothing goes back.
            await eventually(lambda: [type(frame) for frame in frames] == [Acked])
            task.cancel()
            link._received = received  # type: ignore[method-assign]
