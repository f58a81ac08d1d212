"""Nodes in processes of their own, killed, frozen and replaced."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import uvloop

from kv_bus.errors import BusTimeout, ConnectionLost, PeerUnreachable
from kv_bus.interface import GapDetected, PeerAddress, PeerDown, PeerRestarted, PeerUp
from kv_bus.keys import AllowList, AllowListFile, create_key_pair, load_key_pair, write_allow_list
from kv_bus.lag import LoopLagProbe
from kv_bus.ports import pick_ports
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_core.ids import Incarnation, NodeId
from tests.bus.helpers_bus import MS, NAMES, REGISTRY, A, B, C, Echo, Echoed, Listener, S, Slow

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """Node A here, others as processes; everything ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "keys"
        pairs = [create_key_pair(self.folder, name) for name in NAMES]
        write_allow_list(self.folder / "cluster.keys", AllowList("test", {p.node_id: p.public_key for p in pairs}))
        ports = pick_ports(6)
        self.ports = {name: (ports[2 * i], ports[2 * i + 1]) for i, name in enumerate(NAMES)}
        self.processes: dict[NodeId, subprocess.Popen[str]] = {}

    def address(self, name: NodeId) -> PeerAddress:
        requests, events = self.ports[name]
        return PeerAddress(name, f"tcp://127.0.0.1:{requests}", f"tcp://127.0.0.1:{events}")

    def here(self) -> ZmqBus:
        address = self.address(A)
        config = ZmqBusConfig(
            A,
            Incarnation(1),
            address.requests,
            address.events,
            load_key_pair(self.folder, A),
            AllowListFile(self.folder / "cluster.keys"),
        )
        bus = ZmqBus(config, REGISTRY, stamper=LamportStamper(A))
        for name in (B, C):
            bus.add_peer(self.address(name))
        return bus

    async def begin(self, name: NodeId, incarnation: int = 1) -> None:
        stdout = self._spawn(name, incarnation).stdout
        assert stdout is not None
        assert await asyncio.get_running_loop().run_in_executor(None, stdout.readline) == "ready\n"

    def _spawn(self, name: NodeId, incarnation: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.bus.bus_peer_process", str(self.folder), name, str(incarnation)]
        process = subprocess.Popen(
            [*command, *map(str, self.ports[name])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.processes[name] = process
        return process

    def kill(self, name: NodeId) -> None:
        process = self.processes.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        self._reap(process)

    def signal(self, name: NodeId, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

    def close(self) -> None:
        for process in self.processes.values():
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            self._reap(process)

    @staticmethod
    def _reap(process: subprocess.Popen[str]) -> None:
        process.wait(10)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come; the test's own time-out is the bound."""
    while not condition():  # noqa: ASYNC110  # what is waited for signals nothing
        await asyncio.sleep(0.01)


Scenario = Callable[[Cluster, ZmqBus], Awaitable[None]]


def run(folder: Path, scenario: Scenario) -> None:
    async def main() -> None:
        cluster = Cluster(folder)
        bus = cluster.here()
        await bus.start()
        try:
            async with asyncio.timeout(60):
                await scenario(cluster, bus)
        finally:
            await bus.close()
            cluster.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_a_killed_peer_fails_its_calls_at_once_and_its_successor_is_reached_by_the_next(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, bus: ZmqBus) -> None:
        await cluster.begin(B)
        listener = Listener()
        bus.watch_peers(listener.peers.append)
        assert await bus.request(B, Echo(b"1"), timeout_ns=20 * S) == Echoed(b"1")
        stuck = asyncio.ensure_future(bus.request(B, Slow(), timeout_ns=3000 * S))
        await asyncio.sleep(0.05)
        cluster.kill(B)
        with pytest.raises(ConnectionLost):
            await stuck
        with pytest.raises(PeerUnreachable):
            await bus.request(B, Echo(b""), timeout_ns=100 * MS)
        await cluster.begin(B, 2)
        assert await bus.request(B, Echo(b"2"), timeout_ns=20 * S) == Echoed(b"2")
        assert [type(event) for event in listener.peers] == [PeerUp, PeerDown, PeerRestarted, PeerUp]

    run(tmp_path, scenario)


def test_a_replacement_behind_the_same_address_is_met_as_a_new_life(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, bus: ZmqBus) -> None:
        for incarnation in (1, 2, 3):
            await cluster.begin(B, incarnation)
            assert await bus.request(B, Echo(b""), timeout_ns=20 * S) == Echoed(b"")
            (status,) = [peer for peer in bus.peers() if peer.address.node_id == B]
            assert status.incarnation == incarnation
            cluster.kill(B)
            # Not waiting until the loss is noticed: calls may fail, but end.
            try:
                await bus.request(B, Echo(b""), timeout_ns=S)
            except (ConnectionLost, PeerUnreachable):
                pass

    run(tmp_path, scenario)


def test_a_frozen_peer_times_out_and_delays_nobody_else(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, bus: ZmqBus) -> None:
        await cluster.begin(B)
        await cluster.begin(C)
        for name in (B, C):
            await bus.request(name, Echo(b""), timeout_ns=20 * S)
        cluster.signal(B, signal.SIGSTOP)
        stuck = [asyncio.ensure_future(bus.request(B, Echo(bytes(10_000)), timeout_ns=100 * S)) for _ in range(500)]
        for number in range(50):
            reply = await bus.request(C, Echo(b"", number), expect=Echoed, timeout_ns=20 * S)
            assert reply.number == number
        assert not any(call.done() for call in stuck), "the healthy peer waited for the frozen one"
        late = [bus.request(B, Echo(b""), timeout_ns=S) for _ in range(50)]
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BusTimeout}
        cluster.signal(B, signal.SIGCONT)
        # Unless it was away so long that it was given up.
        outcomes = await asyncio.gather(*stuck, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {Echoed, ConnectionLost}
        assert await bus.request(B, Echo(b"awake"), timeout_ns=20 * S) == Echoed(b"awake")

    run(tmp_path, scenario)


def test_an_address_that_swallows_connections_delays_nobody_else(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, bus: ZmqBus) -> None:
        # A listener that never accepts nor speaks: the connection stands, the hand-shake never comes.
        with socket.create_server(("127.0.0.1", cluster.ports[B][0])):
            await cluster.begin(C)
            stuck = asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=S))
            for number in range(20):
                reply = await bus.request(C, Echo(b"", number), expect=Echoed, timeout_ns=20 * S)
                assert reply.number == number
            with pytest.raises(PeerUnreachable):
                await stuck

    run(tmp_path, scenario)


def test_a_subscriber_counts_every_event_of_a_publisher_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, bus: ZmqBus) -> None:
        listener = Listener()
        restarts: list[int] = []
        await cluster.begin(B)
        bus.subscribe(
            B, listener.on_event, listener.on_gap, on_restart=lambda event: restarts.append(event.incarnation)
        )
        for incarnation in (1, 2):
            await until(partial(_heard, listener, incarnation))
            cluster.kill(B)
            await cluster.begin(B, incarnation + 1)
        await until(lambda: listener.count(3) > 0)
        assert restarts == [2, 3]
        for incarnation in (1, 2, 3):
            got = [event.sequence for event in listener.events if event.incarnation == incarnation]
            gone = _numbers([gap for gap in listener.gaps if gap.incarnation == incarnation])
            assert sorted(got + gone) == list(range(1, got[-1] + 1))

    run(tmp_path, scenario)


def test_an_idle_link_is_still_up_after_three_heartbeat_timeouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_bus.zmq_bus.sockets.HEARTBEAT_INTERVAL_MS", 100)
    monkeypatch.setattr("kv_bus.zmq_bus.sockets.HEARTBEAT_TIMEOUT_MS", 700)

    async def scenario(cluster: Cluster, bus: ZmqBus) -> None:
        listener = Listener()
        bus.watch_peers(listener.peers.append)
        await cluster.begin(B)
        await bus.request(B, Echo(b""), timeout_ns=20 * S)
        await asyncio.sleep(2.2)
        assert [type(event) for event in listener.peers] == [PeerUp]
        # And one that gives no sign of life is given up.
        cluster.signal(B, signal.SIGSTOP)
        with pytest.raises(ConnectionLost):
            await bus.request(B, Echo(b""), timeout_ns=30 * S)

    run(tmp_path, scenario)


class BusyTime:
    """A clock that stands while this thread does, whoever else has the processor."""

    def wall_ns(self) -> int:
        return 0

    def monotonic_ns(self) -> int:
        return time.thread_time_ns()


def test_the_loop_stays_responsive_under_a_flood(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster, bus: ZmqBus) -> None:
        await cluster.begin(B)
        await bus.request(B, Echo(b""), timeout_ns=20 * S)
        probe = LoopLagProbe(BusyTime(), interval_ns=2 * MS)
        await probe.start()
        asked, answered = 0, asyncio.Event()
        done = 0

        def outcome(result: object) -> None:
            nonlocal done
            assert isinstance(result, Echoed)
            done += 1
            ask()

        def ask() -> None:
            nonlocal asked
            if asked < 10_000:
                asked += 1
                bus.call(B, Echo(bytes(64)), outcome, timeout_ns=30 * S)
            elif done == asked:
                answered.set()

        for _ in range(256):
            ask()
        await answered.wait()
        lag = probe.snapshot()
        await probe.close()
        # The mean; a reader that drained all at once would show twice this, in few turns.
        assert lag.samples > 20 and lag.total_ns / lag.samples < 2 * MS, lag

    run(tmp_path, scenario)


def _heard(listener: Listener, incarnation: int) -> bool:
    return listener.count(incarnation) >= 20


def _numbers(gaps: list[GapDetected]) -> list[int]:
    return [number for gap in gaps for number in range(gap.first_missing, gap.last_missing + 1)]
