"""The stream between completer and reader: bounded, in order, ended once."""

import asyncio
import weakref

import pytest

from kv_services.gateway.completer import GenerationEvent, GenerationStream
from kv_services.gateway.errors import NoNodesError, SlowReaderError, StreamProtocolError
from kv_services.gateway.stream import TokenStream
from tests.gateway.helpers_gateway import finished, tokens_of


async def drain(stream: GenerationStream) -> list[GenerationEvent]:
    return [event async for event in stream]


async def test_tokens_come_in_order_then_the_end_then_nothing() -> None:
    stream = TokenStream()
    assert stream.push(tokens_of("ab"))
    stream.finish(finished())
    assert await drain(stream) == [*tokens_of("ab"), finished()]
    assert await drain(stream) == []


async def test_a_reader_that_waits_is_woken() -> None:
    stream = TokenStream()
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.push(tokens_of("a"))
    assert await reader == tokens_of("a")[0]


async def test_an_error_is_raised_once_after_the_tokens_before_it() -> None:
    stream = TokenStream()
    stream.push(tokens_of("a"))
    stream.fail(NoNodesError(role="decode", model="m"))
    stream.finish(finished())
    assert await anext(stream) == tokens_of("a")[0]
    with pytest.raises(NoNodesError):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_the_producer_hears_how_far_the_reader_is() -> None:
    taken: list[int] = []
    stream = TokenStream(window=4, on_taken=taken.append)
    stream.push(tokens_of("abc"))
    assert stream.room == 1
    await anext(stream)
    await anext(stream)
    assert taken == [1, 2]
    assert stream.room == 3


async def test_a_producer_that_overruns_the_window_ends_the_request_and_grows_nothing() -> None:
    cancelled: list[bool] = []
    stream = TokenStream(window=2, on_cancel=lambda: cancelled.append(True))
    assert stream.push(tokens_of("ab"))
    assert not stream.push(tokens_of("c", start=2))
    assert not stream.push(tokens_of("d", start=3))
    assert stream.room == 0
    assert [await anext(stream), await anext(stream)] == tokens_of("ab")
    with pytest.raises(SlowReaderError):
        await anext(stream)
    assert cancelled == []


async def test_a_cancelled_wait_takes_nothing() -> None:
    stream = TokenStream()
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.push(tokens_of("a"))
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()
    assert await anext(stream) == tokens_of("a")[0]


async def test_cancel_is_told_once_and_ends_the_reader() -> None:
    cancelled: list[bool] = []
    stream = TokenStream(on_cancel=lambda: cancelled.append(True))
    stream.push(tokens_of("ab"))
    stream.cancel()
    stream.cancel()
    assert cancelled == [True]
    assert stream.ended
    assert not stream.push(tokens_of("c", start=2))
    assert await drain(stream) == []


async def test_cancel_wakes_a_reader() -> None:
    stream = TokenStream()
    reader = asyncio.ensure_future(drain(stream))
    await asyncio.sleep(0)
    stream.cancel()
    assert await reader == []


async def test_cancel_after_the_end_is_not_told() -> None:
    cancelled: list[bool] = []
    stream = TokenStream(on_cancel=lambda: cancelled.append(True))
    stream.finish(finished())
    stream.cancel()
    assert cancelled == []


async def test_stop_drops_what_is_unread_and_still_gives_the_end() -> None:
    stopped: list[bool] = []
    stream = TokenStream(on_stop=lambda: stopped.append(True))
    stream.push(tokens_of("ab"))
    stream.stop()
    stream.stop()
    assert stopped == [True]
    assert stream.push(tokens_of("c", start=2))
    stream.finish(finished())
    assert await drain(stream) == [finished()]


async def test_stop_after_the_end_or_cancel_is_not_told() -> None:
    stopped: list[bool] = []
    ended, gone = (TokenStream(on_stop=lambda: stopped.append(True)) for _ in range(2))
    ended.finish(finished())
    ended.stop()
    gone.cancel()
    gone.stop()
    assert stopped == []


async def test_two_readers_of_one_stream_are_a_bug_that_shows() -> None:
    stream = TokenStream()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(StreamProtocolError, match="two readers"):
        await anext(stream)
    stream.finish(finished())
    assert await first == finished()


@pytest.mark.parametrize("end", ["finish", "fail", "cancel"])
async def test_a_stream_that_is_over_lets_go_of_whoever_made_it(end: str) -> None:
    class Maker:
        def __init__(self) -> None:
            self.stream = TokenStream(on_taken=self.hear, on_stop=self.stop, on_cancel=self.stop)

        def hear(self, taken: int) -> None:
            pass

        def stop(self) -> None:
            pass

    maker = Maker()
    gone = weakref.ref(maker)
    stream = maker.stream
    match end:
        case "finish":
            stream.finish(finished())
        case "fail":
            stream.fail(NoNodesError(role="decode", model="m"))
        case _:
            stream.cancel()
    del maker
    assert gone() is None  # by counting references, without a collection
