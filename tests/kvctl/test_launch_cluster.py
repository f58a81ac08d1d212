"""Processes of a cluster start, are awaited, stop in order, and leave nothing, whatever happens on the way."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kv_bus.keys import key_path, load_key_pair, read_allow_list
from kv_core.ids import NodeId
from kv_services.config import ClusterConfig, ClusterSection, NodeConfig
from kv_services.config_errors import ConfigError
from kv_services.config_file import load_config
from kv_services.launch import (
    LocalCluster,
    ManagedProcess,
    PortReservation,
    ProcessExitedError,
    ProcessNotReadyError,
    ProcessState,
)
from kv_services.launch.cluster import sweep_abandoned
from kv_services.launch.keys import write_keys
from kv_services.launch.local_config import local_config
from kv_services.launch.readiness import wait_ready

DUMMY = Path(__file__).with_name("dummy_service.py")
Command = Callable[[Path, NodeConfig], Sequence[str]]


def dummies(**modes: str) -> Command:
    """A command that runs a dummy for each node, in the mode named for its id (`_` for `-`)."""

    def command(config_file: Path, node: NodeConfig) -> Sequence[str]:
        mode = modes.get(node.id.replace("-", "_"), "")
        return [sys.executable, str(DUMMY), str(node.http_port), *mode.split()]

    return command


@pytest.fixture
def config() -> Iterator[ClusterConfig]:
    with PortReservation() as ports:
        yield local_config(ports, prefill=1, decode=1)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder whose path leaves room for Unix sockets, which pytest's own do not."""
    with tempfile.TemporaryDirectory(prefix="kvt", dir="/tmp") as folder:
        yield Path(folder)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def ended(pid: int) -> bool:
    """Gone, or waiting for a parent that may never ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_every_process_is_ready_inside_and_gone_after(config: ClusterConfig) -> None:
    async with LocalCluster(config, command=dummies()) as cluster:
        pids = [cluster.pid(node.id) for node in config.nodes]
        folder = cluster.folder
        assert all(map(alive, pids))
        assert {cluster.state(node.id) for node in config.nodes} == {ProcessState.READY}
        assert "dummy plain" in cluster.logs("decode-1")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert cluster.config_file.stat().st_mode & 0o777 == 0o600
    assert not any(map(alive, pids))
    assert not folder.exists()
    assert cluster.leftovers == []


async def test_gateways_stop_first_and_the_monitor_last(config: ClusterConfig) -> None:
    exits: list[str] = []

    def note(node: str, state: ProcessState) -> None:
        if state is ProcessState.EXITED:
            exits.append(node)

    async with LocalCluster(config, command=dummies(), on_change=note):
        pass
    assert exits == ["gateway", "prefill-1", "decode-1", "monitor"]


async def test_a_process_that_ignores_sigterm_is_killed(config: ClusterConfig) -> None:
    async with LocalCluster(config, command=dummies(decode_1="ignore-term"), stop_grace_s=0.3) as cluster:
        pid = cluster.pid("decode-1")
    assert not alive(pid)
    assert cluster.leftovers == []


async def test_a_process_that_ends_before_it_is_ready_is_an_error_with_its_last_lines(config: ClusterConfig) -> None:
    cluster = LocalCluster(config, command=dummies(prefill_1="exit 3"))
    with pytest.raises(ProcessExitedError, match=r"(?s)prefill-1 ended with status 3.*cannot go on"):
        await cluster.__aenter__()
    assert cluster.leftovers == []


async def test_a_process_that_never_gets_ready_is_an_error_that_names_it(config: ClusterConfig) -> None:
    only = msgspec.structs.replace(config, nodes=[config.node("monitor")])
    cluster = LocalCluster(only, command=dummies(monitor="never-ready"), start_timeout_s=1.0)
    with pytest.raises(ProcessNotReadyError, match=r"monitor was not ready after 1\.0 s"):
        await cluster.__aenter__()
    assert cluster.leftovers == []


async def test_a_process_that_answers_not_ready_yet_is_told_as_such() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=503)

    app = web.Application()
    app.router.add_get("/healthz", refuse)
    async with TestServer(app) as server:
        process = ManagedProcess("n", ["/bin/sleep", "60"], output=subprocess.DEVNULL)
        try:
            with pytest.raises(ProcessNotReadyError, match=r"/healthz answers 503.*its last lines:\ntail"):
                await wait_ready(process, str(server.make_url("")).rstrip("/"), 1.0, lambda: "tail")
        finally:
            await process.kill()


async def test_cancelling_the_start_stops_what_was_started(config: ClusterConfig) -> None:
    seen = asyncio.Event()
    cluster = LocalCluster(config, command=dummies(decode_1="slow-start 60"), on_change=lambda node, state: seen.set())
    starting = asyncio.create_task(cluster.__aenter__())
    await seen.wait()
    await asyncio.sleep(0.3)
    pids = [cluster.pid(node.id) for node in config.nodes]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(map(alive, pids))
    assert cluster.leftovers == []


async def test_cancelling_the_stop_makes_it_faster_but_not_less_thorough(config: ClusterConfig) -> None:
    cluster = LocalCluster(config, command=dummies(gateway="ignore-term"), stop_grace_s=60)
    await cluster.__aenter__()
    pids = [cluster.pid(node.id) for node in config.nodes]
    stopping = asyncio.create_task(cluster.__aexit__(None, None, None))
    await asyncio.sleep(0.2)
    assert all(map(alive, pids))
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not any(map(alive, pids))
    assert cluster.leftovers == []


async def test_a_node_can_be_killed_and_started_again_on_its_ports(config: ClusterConfig) -> None:
    async with LocalCluster(config, command=dummies()) as cluster:
        first = cluster.pid("decode-1")
        await cluster.kill("decode-1")
        assert not alive(first)
        assert cluster.state("decode-1") is ProcessState.EXITED
        await cluster.restart("decode-1")
        assert cluster.pid("decode-1") != first
        assert cluster.logs("decode-1").count("dummy plain") == 2
        assert await cluster.stop("decode-1") == 0
    assert cluster.leftovers == []


async def test_what_stays_behind_is_found_named_and_ended(config: ClusterConfig) -> None:
    segment = None
    async with LocalCluster(config, command=dummies(prefill_1="grandchild", decode_1="leak-shm")) as cluster:
        segment = Path(f"/dev/shm/kv-dummy-{cluster.pid('decode-1')}")
    try:
        kinds = sorted(left.split()[0] for left in cluster.leftovers)
        assert kinds == ["process", "shared"]
        assert f"shared memory {segment}" in cluster.leftovers
        survivor = int(next(left for left in cluster.leftovers if left.startswith("process")).split()[1])
        async with asyncio.timeout(60):
            while not ended(survivor):  # noqa: ASYNC110  # another's end signals nothing
                await asyncio.sleep(0.05)
    finally:
        segment.unlink(missing_ok=True)


async def test_temporary_files_in_too_deep_a_folder_go_to_a_shorter_one(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    async with LocalCluster(config, command=dummies()) as cluster:
        assert len(str(cluster.folder)) < 40
    assert cluster.leftovers == []


async def test_a_kept_folder_stays_with_its_logs_and_is_not_counted(config: ClusterConfig) -> None:
    async with LocalCluster(config, command=dummies(), keep=True) as cluster:
        pass
    assert cluster.leftovers == []
    assert "dummy stopped" in cluster.logs("gateway")
    assert sweep_abandoned() == []
    for path in sorted(cluster.folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    cluster.folder.rmdir()


KILLED_LAUNCHER = """
import asyncio, sys, pathlib
from kv_services.launch import LocalCluster, ManagedProcess, PortReservation, local_config
from tests.kvctl.test_launch_cluster import dummies

async def main():
    with PortReservation() as ports:
        config = local_config(ports, prefill=1, decode=1)
        async with LocalCluster(config, command=dummies()) as cluster:
            print(cluster.folder, *(cluster.pid(node.id) for node in config.nodes), flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


def test_processes_die_with_a_killed_launcher_and_the_next_one_removes_its_folder(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder of its own for temporary files: other launchers on this machine sweep too.
    monkeypatch.setenv("TMPDIR", str(short_tmp))
    monkeypatch.setattr(tempfile, "tempdir", str(short_tmp))
    with subprocess.Popen([sys.executable, "-c", KILLED_LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        folder, *pids = launcher.stdout.readline().split()
        launcher.kill()
    deadline = time.monotonic() + 60
    while not all(ended(int(pid)) for pid in pids):
        assert time.monotonic() < deadline, "a process outlived its launcher"
        time.sleep(0.05)
    assert Path(folder).exists()
    assert Path(folder).parent == short_tmp
    assert Path(folder) in sweep_abandoned()
    assert not Path(folder).exists()


def test_a_sweep_leaves_a_living_launcher_and_a_link_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "lock").touch()
    link = Path(tempfile.gettempdir()) / f"kv-fabric-link-{os.getpid()}"
    link.symlink_to(precious)
    try:
        assert link not in sweep_abandoned()
        assert precious.exists()
    finally:
        link.unlink()


INTERRUPTED = """
import asyncio, sys
from kv_services.launch import run_until_signal

async def main(hurry):
    print("started", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaning", flush=True)
        await hurry.wait()
        print("cleaned", flush=True)
    return 0

sys.exit(run_until_signal(main))
"""


def test_the_first_ctrl_c_cleans_up_and_the_second_hurries() -> None:
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaning\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaned\n"
        assert process.wait(60) == 130


async def test_every_process_finds_its_key_and_the_list_of_all(config: ClusterConfig) -> None:
    async with LocalCluster(config, command=dummies()) as cluster:
        loaded = load_config(cluster.config_file)
        allowed = read_allow_list(loaded.allow_list_path)
        assert allowed.cluster == config.cluster.name
        for node in config.nodes:
            assert allowed.keys[node.node_id] == load_key_pair(loaded.keys_path, node.node_id).public_key


def test_keys_are_kept_added_and_revoked_with_the_file(config: ClusterConfig, tmp_path: Path) -> None:
    here = msgspec.structs.replace(config, cluster=ClusterSection(name="k", state_dir=str(tmp_path / "state")))
    first = write_keys(here, ["gateway", "monitor"])
    assert sorted(first.keys) == ["gateway", "monitor"]
    second = write_keys(here)
    assert sorted(second.keys) == sorted(node.id for node in config.nodes)
    assert first.keys.items() <= second.keys.items()
    # A node on another machine: its secret is not here, its public key stays listed.
    key_path(here.keys_path, NodeId("decode-1")).unlink()
    third = write_keys(here, ["gateway"])
    assert third.keys == second.keys
    without = msgspec.structs.replace(here, nodes=[node for node in here.nodes if node.id != "decode-1"])
    assert "decode-1" not in write_keys(without).keys
    with pytest.raises(ConfigError, match="no node has the id 'nobody'"):
        write_keys(here, ["nobody"])
