"""What is refused, with which status, code and parameter; and that a refused request never reaches the completer."""

import asyncio
import json

import pytest

from kv_services.gateway.limits import MAX_BODY_BYTES
from tests.gateway.helpers_gateway import served as served_model
from tests.gateway.helpers_http import say, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}

UNSUPPORTED = [
    (TEXT, {"n": 2}, "n"),
    (TEXT, {"n": True}, "n"),
    (TEXT, {"best_of": 2}, "best_of"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"frequency_penalty": 0.5}, "frequency_penalty"),
    (TEXT, {"presence_penalty": -0.5}, "presence_penalty"),
    (TEXT, {"logit_bias": {"50256": -100}}, "logit_bias"),
    (TEXT, {"top_k": 5}, "top_k"),
    (TEXT, {"nonsense": None}, "nonsense"),
    (TEXT, {"tools": []}, "tools"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt"),
    (TEXT, {"prompt": [[1], [2]]}, "prompt"),
    (TEXT, {"kv_fidelity": "fp8_e4m3/1"}, "kv_fidelity"),
    (TEXT, {"tenant": "other"}, "tenant"),
    (TEXT, {"namespace": "other"}, "namespace"),
    (TEXT, {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
    (CHAT, {"n": 2}, "n"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"function_call": "auto"}, "function_call"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"logit_bias": {"1": 1}}, "logit_bias"),
    (CHAT, {"frequency_penalty": 1}, "frequency_penalty"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"metadata": {"a": "b"}}, "metadata"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"best_of": 1}, "best_of"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
    (CHAT, {"messages": [USER, {"role": "user", "content": [{"type": "file"}]}]}, "messages[1].content[0].type"),
]

INVALID = [
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [1.5]}, "prompt[0]"),
    (TEXT, {"prompt": [True]}, "prompt[0]"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [257]}, "prompt"),
    (TEXT, {"prompt": [1 << 70]}, "prompt"),
    (TEXT, {"model": 5}, "model"),
    (TEXT, {"model": ""}, "model"),
    (TEXT, {"max_tokens": "5"}, "max_tokens"),
    (TEXT, {"max_tokens": 5.0}, "max_tokens"),
    (TEXT, {"max_tokens": True}, "max_tokens"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"max_tokens": -1}, "max_tokens"),
    (TEXT, {"max_tokens": 129}, "max_tokens"),
    (TEXT, {"temperature": 2.1}, "temperature"),
    (TEXT, {"temperature": -0.1}, "temperature"),
    (TEXT, {"temperature": "hot"}, "temperature"),
    (TEXT, {"top_p": 0}, "top_p"),
    (TEXT, {"top_p": 1.01}, "top_p"),
    (TEXT, {"seed": 1.5}, "seed"),
    (TEXT, {"seed": 1 << 63}, "seed"),
    (TEXT, {"stop": ""}, "stop"),
    (TEXT, {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    (TEXT, {"stop": ["a", 1]}, "stop[1]"),
    (TEXT, {"stop": "x" * 257}, "stop"),
    (TEXT, {"logprobs": 6}, "logprobs"),
    (TEXT, {"logprobs": True}, "logprobs"),
    (TEXT, {"stream": "yes"}, "stream"),
    (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"cache_salt": ""}, "cache_salt"),
    (TEXT, {"cache_salt": 5}, "cache_salt"),
    (TEXT, {"user": "u" * 129}, "user"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [5]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [USER] * 1025}, "messages"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": 1}, "logprobs"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 129}, "max_completion_tokens"),
]

NEUTRAL = [
    (TEXT, {"n": 1, "best_of": 1, "echo": False, "suffix": None, "frequency_penalty": 0, "presence_penalty": 0.0}),
    (TEXT, {"logit_bias": {}, "temperature": None, "stop": None, "stream_options": None}),
    (CHAT, {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}),
    (CHAT, {"functions": None, "modalities": ["text"], "service_tier": "auto", "store": False, "metadata": None}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 5, "logprobs": False}),
    (CHAT, {"messages": [{"role": "developer", "content": "x", "name": None}]}),
]


def defaults(path: str) -> dict[str, object]:
    return {"prompt": "x"} if path == TEXT else {"messages": [USER]}


@pytest.mark.parametrize(("path", "extra", "param"), UNSUPPORTED)
async def test_what_is_not_honoured_is_refused_by_name(path: str, extra: dict[str, object], param: str) -> None:
    async with serving(say("x")) as served:
        status, answer = await served.complete(defaults(path) | extra, path)
        assert status == 400
        assert (answer["error"]["code"], answer["error"]["param"]) == ("unsupported_parameter", param)
        assert answer["error"]["type"] == "invalid_request_error"
        assert param in answer["error"]["message"]
        assert served.completer.requests == []
        assert served.records[0].outcome == "unsupported_parameter"


@pytest.mark.parametrize(("path", "extra", "param"), INVALID)
async def test_what_is_wrong_is_refused_by_name(path: str, extra: dict[str, object], param: str) -> None:
    async with serving(say("x")) as served:
        status, answer = await served.complete(defaults(path) | extra, path)
        assert status == 400, answer
        assert (answer["error"]["code"], answer["error"]["param"]) == ("invalid_value", param)
        assert served.completer.requests == []


@pytest.mark.parametrize(("path", "extra"), NEUTRAL)
async def test_values_that_ask_for_what_happens_anyway_are_taken(path: str, extra: dict[str, object]) -> None:
    async with serving(say("x")) as served:
        status, answer = await served.complete(defaults(path) | extra, path)
        assert status == 200, answer


@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_a_missing_parameter_is_named(missing: str) -> None:
    async with serving(say("x")) as served:
        body = {"model": "m", "prompt": "x"}
        del body[missing]
        status, _, raw = await served.call(TEXT, body)
        assert (status, json.loads(raw)["error"]["param"]) == (400, missing)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": ""}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": [""]}),
        (TEXT, {"prompt": [[]]}),
        (CHAT, {"messages": []}),
    ],
)
async def test_an_empty_prompt_is_refused(path: str, body: dict[str, object]) -> None:
    async with serving(say("x")) as served:
        status, answer = await served.complete(body, path)
        assert (status, answer["error"]["code"]) == (400, "empty_prompt")


async def test_an_unknown_model_is_not_found_and_says_what_there_is() -> None:
    async with serving(say("x")) as served:
        status, answer = await served.complete({"model": "gpt-4", "prompt": "x"})
        assert status == 404
        assert answer["error"]["code"] == "model_not_found"
        assert "served: m" in answer["error"]["message"]


async def test_a_prompt_over_the_clusters_limit_is_too_long() -> None:
    async with serving(say("x"), max_prompt_tokens=4) as served:
        assert (await served.complete({"prompt": "abcd"}))[0] == 200
        status, answer = await served.complete({"prompt": "abcde"})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["param"] == "prompt"
        assert "5 tokens, 4" in answer["error"]["message"]


async def test_prompt_and_answer_must_fit_the_context() -> None:
    async with serving(say("x"), model=served_model(max_context=10)) as served:
        assert (await served.complete({"prompt": "abcdefg", "max_tokens": 3}))[0] == 200
        for body in ({"prompt": "abcdefg", "max_tokens": 4}, {"prompt": "abcdefghij"}):
            status, answer = await served.complete(body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        # Without a wish of its own the answer gets what is left.
        await served.complete({"prompt": "abcdefgh"})
        assert served.completer.requests[-1].sampling.max_tokens == 2


async def test_a_chat_without_a_limit_may_fill_what_the_cluster_allows() -> None:
    async with serving(say("x"), max_output_tokens=77) as served:
        await served.complete({"messages": [USER]}, CHAT)
        assert served.completer.requests[-1].sampling.max_tokens == 77


BROKEN = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"null",
    b'"text"',
    b"5",
    b'{"model":"m","prompt":"x"}}',
    b'{"model":"m","prompt":"x",}',
    b'{"model":"m","prompt":NaN}',
    b'{"model":"m","prompt":"\xff\xfe"}',
    b'{"model":"m","prompt":"\\ud800"}',
    b'{"model":"m","prompt":"\\udc00\\ud800"}',
    b"\xef\xbb\xbf{}",
    b"{" * 100_000,
    b'{"tools":' + b"[" * 200_000,
    b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b"\x00" * 1000,
    b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
]


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body[:24]))
async def test_broken_json_is_a_bad_request(body: bytes) -> None:
    async with serving(say("x")) as served:
        for path in (TEXT, CHAT):
            status, headers, raw = await served.call(path, body, method="POST")
            assert status == 400
            assert headers["Content-Type"] == "application/json"
            assert json.loads(raw)["error"]["type"] == "invalid_request_error"
        assert served.completer.requests == []


async def test_what_a_client_sent_is_repeated_in_short() -> None:
    long = "y" * 100_000
    async with serving(say("x")) as served:
        for body in ({"prompt": "x", long: 1}, {"prompt": "x", "model": long[:255]}, {"prompt": [[1], long]}):
            _, answer = await served.complete(body)
            assert len(json.dumps(answer)) < 600
        _, answer = await served.complete({"messages": [{"role": long, "content": "x"}]}, CHAT)
        assert len(json.dumps(answer)) < 600


async def test_a_body_of_ten_megabytes_is_too_large() -> None:
    async with serving(say("x")) as served:
        status, headers, raw = await served.call(TEXT, {"model": "m", "prompt": "x" * (10 << 20)})
        assert (status, json.loads(raw)["error"]["code"]) == (413, "request_too_large")
        assert headers["X-Request-Id"].startswith("cmpl-")
        assert served.completer.requests == []
        assert (await served.complete({"prompt": "x"}))[0] == 200


async def test_a_long_body_is_tokenised_whole() -> None:
    async with serving(say("x"), model=served_model(max_context=1 << 20), max_prompt_tokens=1 << 20) as served:
        status, _ = await served.complete({"prompt": "xy" * 100_000})
        assert status == 200
        assert len(served.completer.requests[0].prompt_token_ids) == 200_000


async def test_the_largest_body_is_taken_and_one_byte_more_is_not() -> None:
    frame = len(json.dumps({"model": "m", "prompt": ""}))
    room = MAX_BODY_BYTES - frame
    big = served_model(max_context=1 << 24)
    async with serving(say("x"), model=big, max_prompt_tokens=1 << 24) as served:
        assert (await served.call(TEXT, {"model": "m", "prompt": "x" * room}))[0] == 200
        assert (await served.call(TEXT, {"model": "m", "prompt": "x" * (room + 1)}))[0] == 413


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Encoding": "gzip"},
    ],
)
async def test_a_body_that_is_not_plain_json_is_refused(headers: dict[str, str]) -> None:
    async with serving(say("x")) as served:
        status, _, raw = await served.call(TEXT, b'{"model":"m","prompt":"x"}', headers=headers)
        assert (status, json.loads(raw)["error"]["code"]) == (415, "unsupported_media_type")


async def test_unknown_paths_and_methods_are_refused_in_the_same_form() -> None:
    async with serving(say("x")) as served:
        for path in ("/", "/v1", "/v1/completions/", "/v1/embeddings", "/V1/models", "/v1/../etc/passwd"):
            status, _, raw = await served.call(path)
            assert (status, json.loads(raw)["error"]["code"]) == (404, "unknown_url")
        for method, path, allowed in (
            ("GET", TEXT, "POST"),
            ("DELETE", "/v1/models/m", "GET"),
            ("PUT", "/healthz", "GET"),
        ):
            status, headers, raw = await served.call(path, method=method)
            assert (status, json.loads(raw)["error"]["code"]) == (405, "method_not_allowed")
            assert headers["Allow"] == allowed


async def test_a_full_gateway_says_when_to_come_again() -> None:
    async with serving(max_requests=1) as served:
        first = asyncio.ensure_future(served.complete({"prompt": "x"}))
        _, tokens = await served.completer.next_request()
        status, headers, raw = await served.call(TEXT, {"model": "m", "prompt": "x"})
        assert (status, json.loads(raw)["error"]["code"], headers["Retry-After"]) == (429, "overloaded", "1")
        say("a")(served.completer.requests[0], tokens)
        assert (await first)[0] == 200
        served.completer.script = say("b")
        assert (await served.complete({"prompt": "x"}))[0] == 200
