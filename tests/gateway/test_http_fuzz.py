"""Whatever a client sends, it is answered or refused: never a 5xx, never a hang, never submitted unchecked."""

import json
import re
from collections.abc import Mapping

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import RequestId, TenantId
from kv_services.gateway.admission import RequestLimits, admit, prompt_tokens
from kv_services.gateway.errors import InvalidRequestError, fault_of
from kv_services.gateway.openai_schema import CHAT, COMPLETIONS, AnyRequest
from kv_services.gateway.tenancy import Caller
from tests.gateway.helpers_gateway import served as served_model
from tests.gateway.helpers_http import Served, say, serving

NAMES = [
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
    ),
    *("stream", "stream_options", "logprobs", "top_logprobs", "user", "ignore_eos", "cache_salt", "kv_fidelity"),
    *("tools", "tool_choice", "response_format", "logit_bias", "best_of", "echo", "suffix", "store", "metadata", "x"),
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "m", "x", "user", "system", "text", "exact", "\x00", "é😀", "none"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
GOOD: dict[str, object] = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "hi"}]}
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
LIMITS = RequestLimits(max_prompt_tokens=64, max_output_tokens=32, timeout_s=1.0)


def admitted(request: AnyRequest) -> None:
    """Check what a completer may rely on."""
    model = served_model(max_context=80)
    made = admit(
        request,
        prompt_tokens(request, model.tokenizer),
        model,
        caller=Caller(TenantId("t")),
        limits=LIMITS,
        request_id=RequestId("r"),
        received_ns=5,
        drawn_seed=7,
    )
    prompt, sampling = made.prompt_token_ids, made.sampling
    assert 1 <= len(prompt) <= 64
    assert all(0 <= token < model.tokenizer.vocab_size for token in prompt)
    assert 1 <= sampling.max_tokens <= 32
    assert len(prompt) + sampling.max_tokens <= 80
    assert 0.0 <= sampling.temperature <= 2.0
    assert 0.0 < sampling.top_p <= 1.0
    assert 0 <= sampling.seed < 1 << 63
    assert sampling.top_logprobs is None or 0 <= sampling.top_logprobs <= 20
    assert all(0 < len(stop) <= 256 for stop in request.stop_strings)
    assert made.deadline_ns == 5 + 10**9
    assert re.fullmatch("[0-9a-f]{16}[.][0-9a-f]{32}", made.kv.salt)
    assert made.kv.fidelity == "exact"


def parse_and_admit(body: bytes, path: str) -> None:
    try:
        admitted(COMPLETIONS.parse(body) if path == "text" else CHAT.parse(body))
    except InvalidRequestError as error:
        assert 400 <= fault_of(error).status < 500
        str(error).encode()


@given(BODIES, st.sampled_from(["text", "chat"]))
def test_any_json_object_is_admitted_within_its_bounds_or_refused(extra: Mapping[str, object], path: str) -> None:
    only = {name: value for name, value in GOOD.items() if name != ("messages" if path == "text" else "prompt")}
    parse_and_admit(json.dumps({**only, **extra}).encode(), path)


@given(st.binary(max_size=60), st.sampled_from(["text", "chat"]))
def test_any_bytes_are_refused_or_admitted(body: bytes, path: str) -> None:
    parse_and_admit(body, path)


@given(st.data())
def test_a_damaged_request_is_refused_or_admitted(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(["text", "chat"]))
    name = "prompt" if path == "text" else "messages"
    good = json.dumps({"model": "m", name: GOOD[name], "stop": ["a\u00e9"], "seed": 5, "stream": True}).encode()
    at = data.draw(st.integers(0, len(good) - 1))
    parse_and_admit(good[:at] + data.draw(st.binary(max_size=3)) + good[at + data.draw(st.integers(0, 3)) :], path)


@given(VALUES)
def test_the_same_value_is_taken_by_every_spelling_of_its_json(value: object) -> None:
    body = {"model": "m", "prompt": "x", "seed": value}
    outcomes = []
    for text in (json.dumps(body), json.dumps(body, indent=1), json.dumps(body, ensure_ascii=False)):
        try:
            outcomes.append(str(COMPLETIONS.parse(text.encode())))
        except InvalidRequestError as error:
            # What is no JSON, as an infinity, lies at another byte of each text.
            outcomes.append(re.sub(r"\(byte \d+\)", "", str(error)))
    assert len(set(outcomes)) == 1


async def answer_of(served: Served, path: str, body: bytes) -> None:
    status, _, raw = await served.call(path, body, method="POST")
    assert status < 500, (body, raw)
    if status != 200:
        error = json.loads(raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}


@given(st.lists(BODIES, min_size=1, max_size=5), st.lists(st.binary(max_size=40), max_size=2))
async def test_over_http_nothing_is_a_server_error_and_the_front_goes_on(
    bodies: list[dict[str, object]], junk: list[bytes]
) -> None:
    async with serving(say("ok"), model=served_model(max_context=80), max_prompt_tokens=64) as served:
        for path in ("/v1/completions", "/v1/chat/completions"):
            name = "prompt" if path == "/v1/completions" else "messages"
            for extra in bodies:
                await answer_of(served, path, msgspec.json.encode({"model": "m", name: GOOD[name], **extra}))
            for raw in junk:
                await answer_of(served, path, raw)
        assert (await served.complete({"prompt": "x"}))[0] == 200
        assert served.front.stats().running == 0
