"""The demo reads answers exactly, and says so when one token differs or anything stays behind."""

import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from kv_services.config import HealthSection, Role
from kv_services.config_checks import check_config
from kv_services.kvctl.demo.client import Answer, Fabric, RequestFailedError, ask, heard_of
from kv_services.kvctl.demo.profile import CONCURRENCY, MAX_TOKENS, SLOTS, demo_config
from kv_services.kvctl.demo.prompts import REQUESTS_MAX, SYSTEM_PROMPT, chat
from kv_services.kvctl.demo.reference import ReferenceAnswer
from kv_services.kvctl.demo.report import Outcome, print_outcome
from kv_services.launch import PortReservation
from kv_services.status_report import StatusReport, encode_status

FABRIC = Fabric(
    prefill_node="prefill-1",
    decode_node="decode-2",
    prompt_tokens=400,
    cached_tokens=368,
    kv_bytes_moved=1 << 20,
    transport="shm",
    handover_ms=12.5,
    ttft_ms=99.0,
    tokens_per_s=20.0,
)


def token_event(text: bytes, logprob: float = -0.5) -> str:
    content = [{"token": text.decode(errors="replace"), "logprob": logprob, "bytes": list(text), "top_logprobs": []}]
    choice = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": content}, "finish_reason": None}
    return json.dumps({"object": "chat.completion.chunk", "choices": [choice]})


END = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
TOLD = json.dumps({"choices": [], "kv_fabric": msgspec.to_builtins(FABRIC)})

Ask = Callable[..., Awaitable[Answer]]


@pytest.fixture
async def asked() -> AsyncIterator[Ask]:
    """Asks a gateway that answers with these events, or with this status."""
    servers: list[TestServer] = []
    bodies: list[dict[str, object]] = []

    async def run(*events: str, status: int = 200, on_token: Callable[[str], None] = lambda text: None) -> Answer:
        async def handle(request: web.Request) -> web.StreamResponse:
            bodies.append(await request.json())
            if status != 200:
                return web.json_response({"error": {"message": "too busy"}}, status=status)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                await response.write(f"data: {event}\n\n".encode())
            return response

        application = web.Application()
        application.router.add_post("/v1/chat/completions", handle)
        server = TestServer(application)
        await server.start_server()
        servers.append(server)
        async with aiohttp.ClientSession() as session:
            url = str(server.make_url("")).rstrip("/")
            answer = await ask(session, url, "m", 3, chat(0), 7, on_token)
        assert bodies[-1]["temperature"] == 0
        assert bodies[-1]["max_tokens"] == 7
        return answer

    yield run
    for server in servers:
        await server.close()


async def test_tokens_are_read_as_bytes_with_where_they_came_from(asked: Ask) -> None:
    seen: list[str] = []
    answer = await asked(
        token_event(b"Gr\xc3"), token_event(b"\xbcn", -0.25), END, TOLD, "[DONE]", on_token=seen.append
    )
    assert answer.tokens == [b"Gr\xc3", b"\xbcn"]
    assert answer.text == "Grün"
    assert answer.logprobs == [-0.5, -0.25]
    assert answer.fabric == FABRIC
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("events", "status", "problem"),
    [
        ((token_event(b"a"),), 200, "ended early"),
        ((token_event(b"a"), END, "[DONE]"), 200, "ended early"),
        ((token_event(b"a"), json.dumps({"error": {"message": "node lost"}})), 200, "node lost"),
        (("{",), 200, "DecodeError"),
        ((), 503, "HTTP 503.*too busy"),
    ],
)
async def test_an_answer_that_is_none_is_an_error(
    asked: Ask, events: tuple[str, ...], status: int, problem: str
) -> None:
    with pytest.raises(RequestFailedError, match=f"request 3: .*{problem}"):
        await asked(*events, status=status)


def outcome(*tokens: list[bytes] | None, leftovers: tuple[str, ...] = ()) -> Outcome:
    answers = [
        None if one is None else Answer(number, one, [-0.5] * len(one), FABRIC) for number, one in enumerate(tokens)
    ]
    return Outcome(answers, [ReferenceAnswer([b"a", b"b"], [-0.5, -0.5])] * len(tokens), 6, leftovers, 10.0)


def test_equal_tokens_and_nothing_left_is_success() -> None:
    done = outcome([b"a", b"b"], [b"a", b"b"])
    assert done.succeeded
    assert done.as_object() == {
        "requests": 2,
        "identical": 2,
        "prefix_hit_tokens": 736,
        "bytes_moved": 2 << 20,
        "processes": 6,
        "left_behind": 0,
    }


@pytest.mark.parametrize(
    "tokens",
    [[b"a", b"c"], [b"a"], [b"a", b"b", b"c"], [b"ab"], None],
    ids=["other token", "one fewer", "one more", "same text cut otherwise", "failed"],
)
def test_one_differing_answer_is_failure(tokens: list[bytes] | None) -> None:
    done = outcome([b"a", b"b"], tokens)
    assert not done.succeeded
    assert done.as_object()["identical"] == 1


def test_something_left_behind_is_failure_and_is_named() -> None:
    done = outcome([b"a", b"b"], leftovers=("process 7", "socket /x"))
    assert not done.succeeded
    assert done.as_object()["left_behind"] == 2
    screen = Console(record=True, width=150, file=io.StringIO())
    print_outcome(screen, done)
    text = screen.export_text()
    assert "left behind: process 7; socket /x" in text
    assert "identical to single-process: 1/1" in text


def test_the_table_has_what_was_promised_per_request() -> None:
    screen = Console(record=True, width=150, file=io.StringIO())
    print_outcome(screen, outcome([b"a", b"b"], [b"x"], None))
    text = screen.export_text()
    for told in (
        "prefill-1",
        "decode-2",
        "400",
        "368",
        "1 MiB",
        "shm",
        "12 ms",
        "99 ms",
        "20.0",
        "yes",
        "NO",
        "failed",
    ):
        assert told in text
    assert "found in the prefix cache 736 (92%)" in text


def test_every_request_of_the_demo_is_different_and_shares_the_system_prompt() -> None:
    chats = [chat(number) for number in range(REQUESTS_MAX)]
    assert len({messages[1].content for messages in chats}) == REQUESTS_MAX
    assert {messages[0].content for messages in chats} == {SYSTEM_PROMPT}


def test_the_profile_is_a_right_cluster_file_with_room_for_all_requests() -> None:
    with PortReservation() as ports:
        config = demo_config(ports, None)
    check_config(config)
    assert [len(config.by_role(role)) for role in Role] == [1, 2, 2, 0, 1]
    assert CONCURRENCY * (400 + MAX_TOKENS) // config.model.block_size < SLOTS
    # The demo's own thresholds leave the defaults of production as they are.
    assert HealthSection().kv_staleness_ms == 10 < config.health.kv_staleness_ms


@pytest.mark.model
def test_the_system_prompt_has_300_tokens_or_more() -> None:
    from kv_services.engine.tokenizer import open_tokenizer

    assert len(open_tokenizer().encode(SYSTEM_PROMPT)) >= 300


@pytest.mark.parametrize("silent", [False, True], ids=["tells", "does not tell"])
async def test_the_first_request_waits_until_the_gateway_has_heard_of_every_node(silent: bool) -> None:
    asked = 0

    async def status(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        wires = {f"node-{number}": "1.1" for number in range(asked)}
        report = StatusReport(node="gateway", role="gateway", state="ready", wires=wires)
        return web.Response(status=503) if silent else web.Response(body=encode_status(report))

    application = web.Application()
    application.router.add_get("/status", status)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        await heard_of(session, str(server.make_url("")).rstrip("/"), ["node-0", "node-2"])
    assert asked == (1 if silent else 3)
