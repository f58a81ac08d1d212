"""What an answer looks like on the wire, and when it is said."""

import asyncio
import dataclasses
import json

import aiohttp
import openai
import pytest

from kv_services.gateway.completer import FinishReason, GenerationRequest
from kv_services.gateway.errors import NoNodesError
from kv_services.gateway.stream import TokenStream
from tests.gateway.helpers_http import Json, OffsetClock, fail, finish_of, say, serving, token_with, until

FABRIC = {
    "prefill_node": "p1",
    "decode_node": "d1",
    "prompt_tokens": 1,
    "cached_tokens": 0,
    "kv_bytes_moved": 4096,
    "transport": "shm",
    "prefill_ms": 7.0,
    "handover_ms": 2.5,
    "handover_tail_ms": 0.5,
    "attempts": 1,
}


def data_of(events: list[str]) -> list[Json]:
    """The events' JSON; the last must be the end mark."""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


async def test_a_streamed_completion_on_the_wire() -> None:
    async with serving(say("ab")) as served:
        chunks = data_of(await served.stream({"prompt": "x"}))
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
        assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
        assert ["kv_fabric" in chunk for chunk in chunks] == [False, False, True]


async def test_a_streamed_chat_on_the_wire() -> None:
    async with serving(say("ab")) as served:
        body = {"messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": True}}
        chunks = data_of(await served.stream(body, "/v1/chat/completions"))
        assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
            {"content": "b"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        assert "kv_fabric" in chunks[-1]


async def test_what_the_request_cost_is_in_the_answer() -> None:
    async with serving(say("ab")) as served:
        status, answer = await served.complete({"prompt": "x"})
        assert status == 200
        fabric = answer["kv_fabric"]
        assert {key: fabric[key] for key in FABRIC} == FABRIC
        assert fabric["request_id"] == answer["id"]
        assert fabric["ttft_ms"] >= 0
        assert fabric["tokens_per_s"] is None or fabric["tokens_per_s"] > 0


async def test_what_the_request_cost_can_be_kept_back() -> None:
    async with serving(say("ab"), show_fabric=False) as served:
        assert "kv_fabric" not in (await served.complete({"prompt": "x"}))[1]
        assert all("kv_fabric" not in chunk for chunk in data_of(await served.stream({"prompt": "x"})))


@pytest.mark.parametrize("stops", [[], ["wo "], ["o th", "three"]])
async def test_chunks_joined_are_the_whole_answer(stops: list[str]) -> None:
    async with serving(say("one two three 😀")) as served:
        body = {"prompt": "x", "max_tokens": 99, "stop": stops}
        _, whole = await served.complete(body)
        chunks = data_of(await served.stream(body))
        joined = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert joined == whole["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert not any(stop in joined for stop in stops)


async def test_text_is_sent_as_soon_as_it_is_known() -> None:
    async with serving() as served, served.client() as client:
        creating = asyncio.ensure_future(client.completions.create(model="m", prompt="x", stream=True))
        request, tokens = await served.completer.next_request()
        tokens.push([token_with(0, ord("a"), None)])
        stream = await creating
        assert (await anext(stream)).choices[0].text == "a"
        tokens.push([token_with(1, ord("b"), None)])
        assert (await anext(stream)).choices[0].text == "b"
        tokens.finish(finish_of(request, FinishReason.LENGTH, 2))
        assert [chunk.choices[0].finish_reason async for chunk in stream] == ["length"]


async def test_silence_is_filled_with_comments() -> None:
    async with serving(keepalive_s=0.02) as served:
        async with aiohttp.ClientSession() as session:
            body = {"model": "m", "prompt": "x", "stream": True}
            async with session.post(f"{served.url}/v1/completions", json=body) as response:
                assert response.status == 200
                assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
                assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
                request, tokens = await served.completer.next_request()
                tokens.push([token_with(0, ord("a"), None)])
                tokens.finish(finish_of(request, FinishReason.LENGTH, 1))
                rest = (await response.read()).decode()
        assert '"text":"a"' in rest
        assert rest.endswith("data: [DONE]\n\n")


async def test_an_error_before_the_first_text_keeps_its_status() -> None:
    async with serving(fail(NoNodesError(role="prefill", model="m"))) as served:
        for stream in (False, True):
            status, headers, raw = await served.call("/v1/completions", {"model": "m", "prompt": "x", "stream": stream})
            assert status == 503
            assert headers["Retry-After"] == "1"
            assert json.loads(raw)["error"]["code"] == "no_nodes"


async def test_an_error_after_the_first_text_is_the_last_event() -> None:
    async with serving(fail(NoNodesError(role="decode", model="m"), after="a")) as served:
        events = await served.stream({"prompt": "x"})
        last = json.loads(events[-1].removeprefix("data: "))
        assert last["error"]["code"] == "no_nodes"
        assert "data: [DONE]" not in events


async def test_an_error_in_a_whole_answer_is_an_error_whatever_came_before() -> None:
    async with serving(fail(NoNodesError(role="decode", model="m"), after="abc")) as served:
        status, answer = await served.complete({"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "no_nodes")


async def test_a_text_that_is_complete_does_not_wait_long_for_its_costs() -> None:
    async with serving() as served:
        asking = asyncio.ensure_future(served.complete({"prompt": "x", "stop": "b"}))
        request, tokens = await served.completer.next_request()
        tokens.push([token_with(0, ord("a"), None), token_with(1, ord("b"), None)])
        status, answer = await asking
        assert status == 200
        assert answer["choices"][0]["text"] == "a"
        assert answer["usage"]["completion_tokens"] == 2
        assert "kv_fabric" not in answer
        assert served.completer.stopped == [request.request_id]
        await until(lambda: served.completer.cancelled == [request.request_id])


async def test_an_error_after_the_text_is_complete_costs_the_costs_only() -> None:
    async with serving() as served:
        asking = asyncio.ensure_future(served.complete({"prompt": "x", "stop": "b"}))
        _, tokens = await served.completer.next_request()
        tokens.push([token_with(0, ord("a"), None), token_with(1, ord("b"), None)])
        await until(lambda: bool(served.completer.stopped))
        tokens.fail(NoNodesError(role="decode", model="m"))
        status, answer = await asking
        assert (status, answer["choices"][0]["text"]) == (200, "a")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_whose_time_is_over_says_so_and_is_cancelled(streamed: bool) -> None:
    async with serving(timeout_s=0.05) as served:
        status, answer = await served.complete({"prompt": "x", "stream": streamed})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert served.completer.cancelled == [served.completer.requests[0].request_id]
        assert served.records[0].outcome == "deadline_exceeded"


async def test_tokens_that_are_there_do_not_stretch_the_time() -> None:
    clock = OffsetClock()

    def script(request: GenerationRequest, stream: TokenStream) -> None:
        say("late")(request, stream)
        clock.offset_ns = 3600 * 10**9

    async with serving(script, timeout_s=3600, clock=clock) as served:
        status, answer = await served.complete({"prompt": "x"})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_the_time_is_over_in_mid_stream_too() -> None:
    clock = OffsetClock()
    async with serving(timeout_s=3600, keepalive_s=0.02, clock=clock) as served, served.client() as client:
        creating = asyncio.ensure_future(client.completions.create(model="m", prompt="x", stream=True))
        _, tokens = await served.completer.next_request()
        tokens.push([token_with(0, ord("a"), None)])
        stream = await creating
        assert (await anext(stream)).choices[0].text == "a"
        clock.offset_ns = 3600 * 10**9
        with pytest.raises(openai.APIError, match=r"not finished in 3600\.0 s"):
            await anext(stream)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_bug_behind_the_seam_is_one_requests_error(streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    def script(request: object, stream: Json) -> None:
        stream.push([token_with(0, ord("a"), None), token_with(2, ord("b"), None)])

    async with serving(script) as served:
        if streamed:
            events = await served.stream({"prompt": "x"})
            error = json.loads(events[-1].removeprefix("data: "))["error"]
        else:
            status, answer = await served.complete({"prompt": "x"})
            assert status == 500
            error = answer["error"]
        assert error["code"] == "internal_error"
        assert served.records[0].outcome == "internal_error"
        assert len(served.completer.cancelled) == 1


async def test_an_unforeseen_exception_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: object, stream: object) -> None:
        raise RuntimeError("secret detail")

    async with serving(script) as served:
        status, answer = await served.complete({"prompt": "x"})
        assert status == 500
        assert "secret detail" not in json.dumps(answer)
        assert served.records[0].request_id in answer["error"]["message"]
        assert "secret detail" in caplog.text
        assert (await served.complete({"prompt": "x"}))[0] == 500


async def test_a_stream_that_ends_without_an_end_is_an_error() -> None:
    def script(request: object, stream: Json) -> None:
        stream.cancel()

    async with serving(script) as served:
        status, answer = await served.complete({"prompt": "x"})
        assert (status, answer["error"]["message"]) == (500, "the stream ended without an end")


async def test_a_missing_logprob_is_an_error_not_a_made_up_number() -> None:
    def script(request: Json, stream: Json) -> None:
        stream.push([token_with(0, ord("a"), None)])
        stream.finish(finish_of(request, FinishReason.LENGTH, 1))

    async with serving(script) as served:
        assert (await served.complete({"prompt": "x", "logprobs": 1}))[0] == 500


async def test_the_log_probability_of_the_impossible_is_a_number() -> None:
    def script(request: Json, stream: Json) -> None:
        impossible = dataclasses.replace(token_with(0, ord("a"), 1), top_logprobs=((98, float("-inf")),))
        stream.push([impossible])
        stream.finish(finish_of(request, FinishReason.LENGTH, 1))

    async with serving(script) as served:
        _, answer = await served.complete({"prompt": "x", "logprobs": 1})
        assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -9999.0, "a": -0.25}]


async def test_an_ignored_end_token_goes_on_to_the_limit() -> None:
    async with serving(say("ab")) as served:
        _, answer = await served.complete({"prompt": "x", "ignore_eos": True, "max_tokens": 9})
        assert served.completer.requests[0].stop_token_ids == ()
        assert answer["choices"][0]["text"] == "ab"


async def test_each_request_is_recorded_once() -> None:
    async with serving(say("ab", cached=1)) as served:
        await served.complete({"prompt": "xyz", "user": "u-7"})
        await served.stream({"prompt": "xyz"})
        whole, streamed = served.records
        assert (whole.outcome, whole.tenant, whole.model, whole.user) == ("ok", "default", "m", "u-7")
        assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens) == (3, 3, 1)
        assert (streamed.outcome, streamed.completion_tokens, streamed.user) == ("ok", 3, "")
        assert whole.ttft_ns is not None and 0 < whole.ttft_ns <= whole.duration_ns
        assert whole.timings is not None and whole.timings.decode_node == "d1"
        assert served.completer.cancelled == []
