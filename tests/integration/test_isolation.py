"""Two clusters on one host, strangers, garbage, and tenants: nobody gets in, nobody falls over, nobody sees more."""

import asyncio
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kv_bus.keys import read_allow_list
from kv_core.ids import NodeId
from kv_services.config import ClusterSection, NodeConfig, TenantConfig
from kv_services.config_file import dump_config
from kv_services.launch import PortReservation, local_config
from tests.integration.helpers_integration import MODEL, Fabric, alive, prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

KEY_A, KEY_B = "key-of-tenant-a-0001", "key-of-tenant-b-0001"
TENANTS = (TenantConfig(id="a", api_keys=[KEY_A]), TenantConfig(id="b", api_keys=[KEY_B]))
OPERATOR = "key-of-the-operator-1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fabric() -> AsyncIterator[Fabric]:
    """With keys, and with every kind of port there is."""
    async with running(backend="tcp", monitor=True, tenants=TENANTS, operator_keys=[OPERATOR]) as fabric:
        yield fabric


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour() -> AsyncIterator[Fabric]:
    async with running() as fabric:
        yield fabric


async def still_serves(fabric: Fabric, seed: int) -> None:
    """Every process is in its first life and well, and a request goes through all of them."""
    for node in fabric.config.nodes:
        assert (await fabric.get(node.id, "/healthz"))[0] == 200, node.id
    tokens = prompt(seed, 60)
    answer = await fabric.ask(tokens, 4, key=KEY_A if fabric.config.tenants else "")
    assert answer.is_right(tokens, 4), answer
    await fabric.settle()


async def test_two_clusters_share_a_host_and_nothing_else(fabric: Fabric, neighbour: Fabric) -> None:
    tokens = prompt(1, 200)
    first = await fabric.ask(tokens, 4, key=KEY_A)
    second = await neighbour.ask(tokens, 4)
    assert first.is_right(tokens, 4) and second.is_right(tokens, 4)
    assert (first.cached, second.cached) == (0, 0)
    for one in (fabric, neighbour):
        names = {node.id for node in one.config.nodes}
        for report in await one.settle():
            assert report.members.keys() == names - {report.node}
            await one.all_alive(report.node, names - {report.node})


async def test_a_tenant_never_finds_the_prefix_of_another(fabric: Fabric) -> None:
    tokens = prompt(2, 200)
    for key, cached in ((KEY_A, False), (KEY_A, True), (KEY_B, False), (KEY_B, True)):
        answer = await fabric.ask(tokens, 4, key=key)
        assert answer.is_right(tokens, 4), answer
        assert answer.cached > 0 if cached else answer.cached == 0
        await fabric.settle()
    assert (await fabric.ask(tokens, 4, key=KEY_A, cache_salt="mine")).cached == 0
    refused = await fabric.ask(tokens, 4, key="key-of-nobody-at-all")
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")


async def test_what_a_process_tells_of_all_tenants_is_for_operators_only(fabric: Fabric) -> None:
    for node in fabric.config.nodes:
        for path in ("/status", "/metrics"):
            async with fabric.session.get(f"{fabric.cluster.url(node.id)}{path}") as response:
                assert response.status == 401, (node.id, path)


def listeners(pid: int) -> Iterator[tuple[str, int]]:
    """Address in hexadecimal and port of each TCP socket on which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                yield address, int(port, 16)


async def test_every_socket_listens_on_loopback_and_on_a_port_of_the_file(fabric: Fabric, neighbour: Fabric) -> None:
    # The kernel prints the address as a number of its own byte order.
    loopback = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"
    for one in (fabric, neighbour):
        for node in one.config.nodes:
            found = set(listeners(one.cluster.pid(node.id)))
            assert {address for address, _ in found} == {loopback}
            assert {port for _, port in found} == {port for _, port in node.ports()}


async def test_without_a_word_about_hosts_a_process_binds_loopback() -> None:
    fields = {field.name: field.default for field in msgspec.structs.fields(NodeConfig)}
    assert fields["host"] == "127.0.0.1"
    assert {field.name: field.default for field in msgspec.structs.fields(ClusterSection)}["allow_remote"] is False


async def test_a_key_that_is_not_on_the_list_is_refused(fabric: Fabric) -> None:
    keys = read_allow_list(fabric.config.allow_list_path).keys
    public, secret = zmq.curve_keypair()
    context = zmq.asyncio.Context()
    try:
        for node in fabric.config.nodes:
            for kind, endpoint in ((zmq.DEALER, node.bus_endpoint), (zmq.SUB, node.events_endpoint)):
                client = context.socket(kind)
                client.linger = 0
                client.curve_publickey, client.curve_secretkey = public, secret
                client.curve_serverkey = keys[NodeId(node.id)].encode()
                monitor = client.get_monitor_socket()
                if kind == zmq.SUB:
                    client.subscribe(b"")
                client.connect(endpoint)
                seen: set[int] = set()
                while not seen & {zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL}:
                    event = await asyncio.wait_for(recv_monitor_message(monitor), 30)
                    seen.add(event["event"])
                    assert event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED, node.id
                client.disable_monitor()
                monitor.close(0)
                client.close(0)
    finally:
        context.destroy(linger=0)
    await still_serves(fabric, 3)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x01"


async def poke(port: int, data: bytes) -> None:
    """Send it and take what comes back, until the other side hangs up or has nothing more to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(0.5):
            while await reader.read(1 << 16):
                pass
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()


async def test_garbage_on_any_port_is_refused_and_nobody_falls_over(fabric: Fabric, tmp_path: Path) -> None:
    path = tmp_path / "touched"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)
    pickled = pickle.dumps(Touch(path))
    huge = 1 << 30
    payloads = [
        pickled,
        struct.pack("!I", len(pickled)) + pickled,
        b"\x80\x04" + b"\xff" * 4096,
        nested(100_000),
        # A length of 1 GiB: as two usual prefixes, as a frame of ZeroMQ, as msgpack, as a body of HTTP.
        struct.pack("!I", huge) + b"x" * 64,
        struct.pack("<Q", huge) + b"x" * 64,
        greeting + b"\x02" + struct.pack("!Q", huge) + b"x" * 64,
        b"\xc6" + struct.pack("!I", huge) + b"x" * 64,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n{",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 200_000 + b"\r\n\r\n",
        os.urandom(4096),
        b"",
    ]
    ports = [port for node in fabric.config.nodes for _, port in node.ports()]
    lives = {node.id: (await fabric.status(node.id)).incarnation for node in fabric.config.nodes}
    for payload in payloads:
        await asyncio.gather(*(poke(port, payload) for port in ports))
    assert not path.exists()
    await still_serves(fabric, 4)
    for name, incarnation in lives.items():
        assert (await fabric.status(name)).incarnation == incarnation


async def kvctl(*args: str) -> tuple[int, str]:
    program = Path(sys.executable).with_name("kvctl")
    process = await asyncio.create_subprocess_exec(
        str(program), *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_kvctl_shows_the_running_cluster(fabric: Fabric) -> None:
    _, text = await kvctl("status", "--json", str(fabric.cluster.config_file))
    shown = msgspec.json.decode(text)
    assert {row["node"] for row in shown["nodes"]} == {node.id for node in fabric.config.nodes}
    for row in shown["nodes"]:
        assert row["problem"] == "" and row["incarnation"] >= 1
        if row["slots"]:
            assert sum(row["slots"][state] for state in ("free", "cached", "pinned", "quarantined")) == 256
    _, table = await kvctl("status", str(fabric.cluster.config_file))
    assert all(node.id in table for node in fabric.config.nodes)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room for the name of a socket in it, which pytest's may not."""
    with tempfile.TemporaryDirectory(prefix="kv-up-") as folder:
        yield Path(folder)


async def test_ctrl_c_ends_what_kvctl_started(short_folder: Path) -> None:
    file = short_folder / "cluster.toml"
    with PortReservation() as ports:
        config = local_config(ports, prefill=1, decode=1, slots=64, monitor=False, model=MODEL)
        file.write_text(dump_config(config))
        program = Path(sys.executable).with_name("kvctl")
        up = await asyncio.create_subprocess_exec(
            str(program), "up", str(file), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert up.stdout is not None
        seen = b""
        while b"3 processes are ready" not in seen:
            line = await asyncio.wait_for(up.stdout.readline(), 90)
            assert line, seen.decode()
            seen += line
        children = children_of(up.pid)
        assert len(children) == 3
        up.send_signal(signal.SIGINT)
        rest = await asyncio.wait_for(up.stdout.read(), 60)
        assert await up.wait() == 128 + signal.SIGINT, (seen + rest).decode()
        assert not any(map(alive, children))
        for node in config.nodes:
            for _, port in node.ports():
                with socket.socket() as probe:
                    assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert [path.name for path in (short_folder / "state").rglob("*") if path.is_socket()] == []
