"""What the commands print and how they end."""

import io
import json
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from typer.testing import CliRunner, Result

from kv_bus.keys import read_allow_list
from kv_services.config import ClusterConfig, ClusterSection
from kv_services.config_file import parse_config
from kv_services.kvctl import app
from kv_services.kvctl.files import remarks_on
from kv_services.kvctl.output import human_bytes
from kv_services.kvctl.status import NodeStatus, as_object, ask_all, render
from kv_services.launch import PortReservation, ephemeral_low, local_config
from kv_services.status_report import SlotCounts, StatusReport, encode_status
from tests.kvctl.test_config import DECODE, GATEWAY, TENANT


def kvctl(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def size(*arguments: str) -> dict[str, object]:
    result = kvctl("size", "--json", *arguments)
    assert result.exit_code == 0, result.output
    figures: dict[str, object] = json.loads(result.stdout)
    return figures


def test_size_gives_both_figures_that_people_quote_for_llama_3_70b() -> None:
    common = ("--model", "llama-3-70b", "--tokens", "131072", "--dtype", "fp16")
    names = ("bytes_per_token_per_layer", "bytes_per_token", "bytes_per_sequence")
    as_mha = size(*common, "--attention", "mha")
    assert [as_mha[name] for name in names] == [32768, 2621440, 343597383680]
    as_built = size(*common)
    assert [as_built[name] for name in names] == [4096, 327680, 42949672960]
    assert (as_mha["attention"], as_built["attention"]) == ("mha", "gqa")


def test_size_prints_a_table_for_people() -> None:
    result = kvctl("size", "--model", "llama-3-70b", "--tokens", "131072")
    for text in ("80 layers, 64 heads, 8 KV heads", "42,949,672,960", "40 GiB", "131,072 tokens", "320 KiB"):
        assert text in result.stdout


def test_size_reads_a_models_own_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    file.write_text(json.dumps({"model_type": "llama", **fields}))
    assert size("--model", str(file), "--dtype", "fp32")["bytes_per_token"] == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("--model", "llama-9"), 1, "known are llama-2-7b"),
        (("--model", "none.json"), 1, "none.json"),
        (("--model", "llama-3-8b", "--dtype", "bf18"), 2, "bf16"),
        (("--model", "llama-3-8b", "--tokens", "-1"), 2, "--tokens"),
        (("--model", "llama-3-8b", "--attention", "mla"), 1, "dimensions are unknown"),
    ],
)
def test_size_refuses_with_a_sentence(arguments: tuple[str, ...], status: int, told: str) -> None:
    result = kvctl("size", *arguments)
    assert result.exit_code == status
    assert told in result.stderr
    assert "Traceback" not in result.output


def test_sizes_for_people_are_exact_or_say_one_decimal() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, 2621440, 320 << 30, 3 << 50)] == [
        "0 B",
        "1,023 B",
        "1 KiB",
        "1.5 KiB",
        "2.5 MiB",
        "320 GiB",
        "3,072 TiB",
    ]


def test_the_example_file_is_right_and_explains_every_field(tmp_path: Path) -> None:
    text = kvctl("config", "example").stdout
    config = parse_config(text)
    assert all(port < ephemeral_low() for node in config.nodes for _, port in node.ports())
    lines = text.splitlines()
    told = set()
    for number, line in enumerate(lines):
        name = line.removeprefix("# ").partition(" = ")[0]
        if " = " in line and name not in told:
            told.add(name)
            assert lines[number - 1].startswith("# "), f"{line} is not explained"
    # The tenant is a comment that becomes right by taking the signs away and giving it a key.
    tenant = "\n".join(line.removeprefix("# ") for line in lines[lines.index("# [[tenant]]") :] if " = " in line)
    tenant = tenant.replace("put the output of: openssl rand -hex 24", "0" * 48)
    assert parse_config(text + "\n[[tenant]]\n" + tenant).tenants[0].id == "acme"
    assert set(tomllib.loads(text)) == {*ClusterConfig.__struct_encode_fields__} - {"tenant"}


def test_config_check_says_what_is_wrong_or_counts_the_nodes(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GATEWAY + DECODE)
    result = kvctl("config", "check", str(file))
    assert result.exit_code == 0
    assert "1 gateway, 1 decode" in result.stdout
    told = json.loads(kvctl("config", "check", "--json", str(file)).stdout)
    assert told["ok"] and told["nodes"]["decode"] == 1 and told["remarks"] == []
    file.write_text(GATEWAY.replace("20000", "0"))
    result = kvctl("config", "check", str(file))
    assert result.exit_code == 1
    assert f"{file}: $.node[0].bus_port: expected a whole number from 1 to 65535, got 0" in result.stderr


def test_what_may_not_be_meant_is_remarked(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("")
    file.chmod(0o644)

    def remarks(text: str) -> str:
        return "\n".join(remarks_on(parse_config(text), file))

    assert remarks(GATEWAY + DECODE) == ""
    assert "no gateway" in remarks(DECODE)
    assert "bus_port 40000 of gw is in this machine's ephemeral range" in remarks(GATEWAY.replace("20000", "40000"))
    assert "chmod 600" in remarks(TENANT + GATEWAY + DECODE)
    file.chmod(0o600)
    assert remarks(TENANT + GATEWAY + DECODE) == ""


def test_keys_init_makes_what_is_missing_and_keeps_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GATEWAY + DECODE)
    result = kvctl("keys", "init", str(file), "--node", "gw")
    assert result.exit_code == 0, result.output
    assert "none yet" in result.stdout
    first = read_allow_list(tmp_path / "state" / "keys" / "allowed.toml")
    assert kvctl("keys", "init", str(file)).exit_code == 0
    second = read_allow_list(tmp_path / "state" / "keys" / "allowed.toml")
    assert first.keys.items() < second.keys.items()
    assert sorted(second.keys) == ["decode-1", "gw"]
    result = kvctl("keys", "init", str(file), "--node", "nobody")
    assert result.exit_code == 1
    assert "there are: gw, decode-1" in result.stderr
    secret = (tmp_path / "state" / "keys" / "gw.key").read_text().split('secret_key = "')[1].split('"')[0]
    assert secret not in result.output


Answer = Callable[[web.Request], web.Response]
Serve = Callable[[dict[str, Answer]], Awaitable[ClusterConfig]]


@pytest.fixture
async def served() -> AsyncIterator[Serve]:
    """Starts an HTTP server per node that gives those answers on /status; returns the cluster's config."""
    servers: list[TestServer] = []

    async def start(answers: dict[str, Answer]) -> ClusterConfig:
        with PortReservation() as ports:
            config = local_config(ports, prefill=1, decode=1)
        for node_id, answer in answers.items():

            async def handle(request: web.Request, answer: Answer = answer) -> web.Response:
                return answer(request)

            application = web.Application()
            application.router.add_get("/status", handle)
            server = TestServer(application, host="127.0.0.1", port=config.node(node_id).http_port)
            await server.start_server()
            servers.append(server)
        return config

    yield start
    for server in servers:
        await server.close()


def reports(report: StatusReport) -> Answer:
    return lambda request: web.Response(body=encode_status(report))


async def test_status_shows_every_process_whatever_it_answers(
    served: Serve,
) -> None:
    decode = StatusReport(
        node="decode-1",
        role="decode",
        state="ready",
        slots=SlotCounts(total=64, free=40, cached=20, pinned=3, quarantined=1),
        running=2,
        transports={"prefill-1": "shm"},
        members={"prefill-1": "suspect", "gateway": "alive"},
    )
    config = await served(
        {
            "decode-1": reports(decode),
            "gateway": lambda request: web.Response(status=503),
            "monitor": lambda request: web.Response(text="<html>"),
        }
    )
    rows = await ask_all(config)
    by_id = {row.node.id: row for row in rows}
    assert by_id["decode-1"].report == decode
    assert by_id["prefill-1"].problem == "does not listen"
    assert by_id["gateway"].problem == "answers 503"
    assert by_id["monitor"].problem.startswith("wrong answer")

    screen = Console(width=160, record=True, file=io.StringIO())
    screen.print(render(config, rows))
    text = screen.export_text()
    for told in ("40 / 20 / 3 of 64, 1 quarantined", "shm to 1", "decode-1 holds prefill-1 for suspect", "1 of 4"):
        assert told in text
    told_json = as_object(config, rows)
    assert told_json["well"] is False
    assert msgspec.json.decode(msgspec.json.encode(told_json))["nodes"][2]["slots"]["free"] == 40


async def test_status_tells_of_an_upgrade_while_processes_speak_different_wires(served: Serve) -> None:
    def at(node: str, wire: str) -> Answer:
        return reports(StatusReport(node=node, role="decode", state="ready", wire=wire))

    def shown(config: ClusterConfig, rows: Sequence[NodeStatus]) -> str:
        screen = Console(width=160, record=True, file=io.StringIO())
        screen.print(render(config, rows))
        return screen.export_text()

    answers = {"gateway": at("gateway", "1.0"), "prefill-1": at("prefill-1", "1.1")}
    mixed = await served({**answers, "decode-1": at("decode-1", "1.1")})
    text = shown(mixed, await ask_all(mixed))
    assert "these wire versions work together: 1.0 gateway; 1.1 prefill-1, decode-1" in text
    alike = await served({"gateway": at("gateway", "1.1"), "decode-1": at("decode-1", "1.1")})
    assert "upgrade" not in shown(alike, await ask_all(alike))


async def test_status_notices_that_another_process_took_the_port(
    served: Serve,
) -> None:
    config = await served({"gateway": reports(StatusReport(node="decode-7", role="decode", state="ready"))})
    rows = await ask_all(config)
    assert rows[0].problem == "another process answers: decode-7"


async def test_status_sends_the_operators_key(served: Serve) -> None:
    seen: list[str | None] = []

    def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=401)

    config = await served({"gateway": answer})
    keyed = msgspec.structs.replace(config, cluster=ClusterSection(operator_keys=["0123456789abcdef"]))
    rows = await ask_all(config)
    assert rows[0].problem == "answers 401: it asks for one of its own cluster.operator_keys"
    await ask_all(keyed)
    assert seen == [None, "Bearer 0123456789abcdef"]


def test_status_of_a_cluster_that_is_down_ends_with_1(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GATEWAY + DECODE)
    result = kvctl("status", str(file), "--json")
    assert result.exit_code == 1
    assert [node["problem"] for node in json.loads(result.stdout)["nodes"]] == ["does not listen"] * 2


LOOPBACK = "http://127.0.0.1:"


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("drain", "FILE", "decode-1"), 1, f"decode-1 at {LOOPBACK}20012: does not listen"),
        (("drain", "FILE", "gw"), 1, "a gateway holds no KV"),
        (("role", "FILE", "gw", "decode"), 1, "a gateway stays one"),
        (("prefix", "lookup", "FILE", "--tokens", "TOKENS", "--tenant", "x"), 1, "--tenant 'x' is none of"),
        (("prefix", "explain", "OTHERS", "--tokens", "TOKENS"), 1, "none of the cluster file's: acme"),
        (("drain", "FILE", "nobody"), 1, "there are: gw, decode-1"),
        (("drain", "FILE", "decode-1", "--rate", "fast"), 1, "is not a size"),
        (("role", "FILE", "decode-1", "gateway"), 2, "is not one of 'prefill'"),
        (("role", "FILE", "decode-1", "prefill"), 1, "does not listen"),
        (("prefix", "lookup", "FILE", "--tokens", "TOKENS"), 1, "gw: does not listen"),
        (("prefix", "pin", "FILE", "--tokens", "TOKENS", "--name", "x"), 1, "decode-1: does not listen"),
        (("prefix", "lookup", "FILE"), 1, "give one prompt: --text or --tokens"),
        (("prefix", "lookup", "FILE", "--tokens", "FILE"), 1, "expected token ids"),
        (("prefix", "purge", "FILE"), 1, "give one of --tenant, --weights and --all"),
        (("prefix", "warm", "NODES", "--tokens", "TOKENS"), 1, "has no gateway"),
        (("prefix", "lookup", "NODES", "--tokens", "TOKENS"), 1, "has no gateway"),
        (("up", "NOWHERE"), 1, "cannot use the state folder"),
        (("sim", "--record", "TOKENS/below", "--seconds", "1"), 1, "--record "),
        (("workload", "chat", "TOKENS/below", "--requests", "1"), 1, "Not a directory"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], status: int, told: str
) -> None:
    files = {name: tmp_path / f"{name}.toml" for name in ("FILE", "NODES", "NOWHERE", "OTHERS")}
    files["FILE"].write_text(GATEWAY + DECODE)
    files["NODES"].write_text(DECODE)
    files["NOWHERE"].write_text('[cluster]\nstate_dir = "TOKENS/state"\n' + GATEWAY + DECODE)
    files["OTHERS"].write_text(TENANT + GATEWAY + DECODE)
    (tmp_path / "TOKENS").write_text("1, 2, 3")
    given = []
    for word in arguments:
        name, _, rest = word.partition("/")
        path = files.get(name) or (tmp_path / name if name == "TOKENS" else None)
        given.append(word if path is None else str(path / rest if rest else path))
    result = kvctl(*given)
    assert result.exit_code == status, result.output
    assert told in result.stderr.replace("\n", " "), result.stderr
    assert "Traceback" not in result.output and not isinstance(result.exception, OSError | ValueError)
