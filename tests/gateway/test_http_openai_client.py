"""The front as the `openai` package sees it, blocking and not."""

import asyncio
from typing import cast

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kv_services.gateway.errors import NoNodesError, OverloadedError
from tests.gateway.helpers_http import fail, say, serving, token_with, until

PROMPT = "Say something"
CHAT: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


async def test_a_completion() -> None:
    async with serving(say("hello é", cached=4)) as served, served.client() as client:
        answer = await client.completions.create(model="m", prompt=PROMPT, max_tokens=40)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == ("hello é", "stop", None)
        assert answer.object == "text_completion"
        assert answer.model == "m"
        assert answer.system_fingerprint == "rev-1"
        assert answer.id == served.completer.requests[0].request_id
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 9)
        assert answer.usage.total_tokens == len(PROMPT) + 9
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_a_completion_of_tokens() -> None:
    async with serving(say("x")) as served, served.client() as client:
        for prompt in ([104, 105], [[104, 105]], ["hi"]):
            await client.completions.create(model="m", prompt=prompt)
        assert {request.prompt_token_ids for request in served.completer.requests} == {(104, 105)}
        assert {request.sampling.max_tokens for request in served.completer.requests} == {16}


async def test_a_chat() -> None:
    async with serving(say("Hello!")) as served, served.client() as client:
        answer = await client.chat.completions.create(model="m", messages=CHAT, max_completion_tokens=20)
        [choice] = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello!")
        assert choice.finish_reason == "stop"
        assert answer.object == "chat.completion"
        prompt = bytes(served.completer.requests[0].prompt_token_ids).decode()
        assert prompt == "<system>Be brief.\n<user>Hi\n<assistant>"


async def test_an_answer_can_be_sent_back_as_it_came() -> None:
    async with serving(say("Hello!")) as served, served.client() as client:
        first = await client.chat.completions.create(model="m", messages=CHAT)
        answer = cast(ChatCompletionMessageParam, first.choices[0].message.model_dump())
        question: ChatCompletionMessageParam = {"role": "user", "content": [{"type": "text", "text": "A"}]}
        await client.chat.completions.create(model="m", messages=[*CHAT, answer, question])
        prompt = bytes(served.completer.requests[1].prompt_token_ids).decode()
        assert prompt.endswith("<assistant>Hello!\n<user>A\n<assistant>")


async def test_a_streamed_completion_says_what_the_whole_one_says() -> None:
    async with serving(say("hello é")) as served, served.client() as client:
        stream = await client.completions.create(
            model="m", prompt=PROMPT, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "hello é"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 9
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert {chunk.id for chunk in chunks} == {served.completer.requests[0].request_id}


async def test_a_streamed_chat_opens_with_the_role() -> None:
    async with serving(say("Hello!")) as served, served.client() as client:
        stream = await client.chat.completions.create(model="m", messages=CHAT, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello!"
        assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_blocking_client_works_as_well() -> None:
    async with serving(say("hello")) as served:

        def talk() -> tuple[str, str]:
            http_client = openai.DefaultHttpxClient(trust_env=False)
            with openai.OpenAI(
                base_url=f"{served.url}/v1", api_key="x", max_retries=0, http_client=http_client
            ) as client:
                whole = client.completions.create(model="m", prompt="a")
                stream = client.completions.create(model="m", prompt="a", stream=True)
                return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)

        assert await asyncio.to_thread(talk) == ("hello", "hello")


async def test_models_are_listed_and_shown() -> None:
    async with serving() as served, served.client() as client:
        listed = await client.models.list()
        assert [(model.id, model.object, model.created) for model in listed.data] == [("m", "model", 7)]
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other/model")


async def test_sampling_parameters_reach_the_completer() -> None:
    async with serving(say("x")) as served, served.client() as client:
        await client.completions.create(
            model="m", prompt="a", temperature=0, top_p=0.5, seed=-7, max_tokens=3, stop=["q"]
        )
        await client.completions.create(model="m", prompt="a")
        first, second = (request.sampling for request in served.completer.requests)
        assert (first.temperature, first.top_p, first.max_tokens, first.top_logprobs) == (0.0, 0.5, 3, None)
        assert first.seed == (1 << 63) - 7
        assert (second.temperature, second.top_p) == (1.0, 1.0)
        assert 0 <= second.seed < 1 << 63


async def test_a_length_limit_is_a_finish_of_its_own() -> None:
    async with serving(say("hello")) as served, served.client() as client:
        answer = await client.completions.create(model="m", prompt="a", max_tokens=3)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hel", "length")


async def test_stop_strings_end_the_answer_and_the_request() -> None:
    async with serving(say("one two three", end=False)) as served, served.client() as client:
        answer = await client.completions.create(model="m", prompt="a", max_tokens=99, stop=[" three", "wo t"])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one t", "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("one two t")


async def test_logprobs_of_a_completion() -> None:
    async with serving(say("é!")) as served, served.client() as client:
        answer = await client.completions.create(model="m", prompt="a", logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!"]
        assert logprobs.token_logprobs == [-0.25, -0.25, -0.25]
        assert logprobs.text_offset == [0, 0, 1]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[2] == {"!": -0.25, '"': -1.25}


async def test_logprobs_of_a_chat() -> None:
    async with serving(say("é!")) as served, served.client() as client:
        answer = await client.chat.completions.create(model="m", messages=CHAT, logprobs=True, top_logprobs=2)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [token.bytes for token in logprobs.content] == [[0xC3], [0xA9], [0x21]]
        assert [token.token for token in logprobs.content] == ["\\xc3", "\\xa9", "!"]
        assert [(top.token, top.logprob) for top in logprobs.content[2].top_logprobs] == [("!", -0.25), ('"', -1.25)]


@pytest.mark.parametrize("path", ["completion", "chat"])
async def test_streamed_logprobs_are_those_of_the_whole_answer(path: str) -> None:
    async with serving(say("né!")) as served, served.client() as client:
        if path == "completion":
            whole = (await client.completions.create(model="m", prompt="a", logprobs=1)).choices[0].logprobs
            stream = await client.completions.create(model="m", prompt="a", logprobs=1, stream=True)
            parts = [chunk.choices[0].logprobs async for chunk in stream]
            assert whole is not None
            assert [name for part in parts if part for name in part.tokens or []] == whole.tokens
            assert [at for part in parts if part for at in part.text_offset or []] == whole.text_offset
        else:
            chat = (await client.chat.completions.create(model="m", messages=CHAT, logprobs=True)).choices[0].logprobs
            chunks = await client.chat.completions.create(model="m", messages=CHAT, logprobs=True, stream=True)
            pieces = [chunk.choices[0].logprobs async for chunk in chunks]
            assert chat is not None
            assert [token for piece in pieces if piece for token in piece.content or []] == chat.content


async def test_errors_arrive_as_the_clients_own_exceptions() -> None:
    script = fail(OverloadedError(what="decode", limit=2, retry_after_s=2.2))
    async with serving(script) as served, served.client() as client:
        with pytest.raises(openai.RateLimitError) as overload:
            await client.completions.create(model="m", prompt="a")
        assert overload.value.code == "overloaded"
        assert overload.value.response.headers["retry-after"] == "3"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="a")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        assert unknown.value.request_id is not None
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="m", prompt="a", n=2)
        assert (bad.value.code, bad.value.param, bad.value.type) == (
            "unsupported_parameter",
            "n",
            "invalid_request_error",
        )


async def test_an_error_in_mid_stream_is_raised_by_the_client_after_the_text() -> None:
    async with serving(fail(NoNodesError(role="decode", model="m"), after="hel")) as served, served.client() as client:
        stream = await client.completions.create(model="m", prompt="a", stream=True)
        got = ""
        with pytest.raises(openai.APIError, match="no decode node"):
            async for chunk in stream:
                got += chunk.choices[0].text
        assert got == "hel"
        assert [record.outcome for record in served.records] == ["no_nodes"]


async def test_leaving_a_stream_cancels_the_request() -> None:
    async with serving() as served, served.client() as client:
        creating = asyncio.ensure_future(client.completions.create(model="m", prompt="a", stream=True))
        request, tokens = await served.completer.next_request()
        tokens.push([token_with(0, ord("a"), None)])
        stream = await creating
        assert (await anext(stream)).choices[0].text == "a"
        await stream.close()
        await until(lambda: served.completer.cancelled == [request.request_id])
        await until(lambda: bool(served.records))
        assert served.records[0].outcome == "disconnected"
        assert served.records[0].completion_tokens == 1
