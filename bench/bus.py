"""Request-replies a second between two processes: our bus against zmq.asyncio.

Both sides: loopback TCP, CURVE with ZAP, uvloop, bodies of 64 B, 256 requests outstanding.

Ours: the whole path. The asking process runs an actor whose machine decides each request; every request goes through
`Bus.call`, is stamped, encoded, validated on arrival, handed to a handler, posted to the answering process's actor,
answered by its machine, encoded, validated again, and comes back as a completion in the asking actor's mailbox.

zmq.asyncio: the shortest loop that does the same echo, `recv` then `send`, with plain frames: no envelope, no
validation, no matching of replies, no deadline.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio
import zmq.auth.asyncio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import harness
from kv_bus.actor import Actor
from kv_bus.interface import DEFERRED, Deferred, PeerAddress, Request
from kv_bus.keys import AllowList, AllowListFile, create_key_pair, load_key_pair, write_allow_list
from kv_bus.lag import LoopLagProbe
from kv_bus.ports import pick_ports
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_core.clock import SystemClock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message, Registry

BODY = bytes(range(64))
OUTSTANDING = 256
ASKER, ANSWERER = NodeId("asker"), NodeId("answerer")
NODES = (ASKER, ANSWERER)


class Echo(Message, frozen=True, tag="bench.echo"):
    """A request."""

    body: bytes


class Echoed(Message, frozen=True, tag="bench.echoed"):
    """Its reply."""

    body: bytes


REGISTRY = Registry(Echo, Echoed)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request arrived."""

    request: Request[Echo]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a request."""

    request: Request[Echo]
    reply: Echoed


class AnsweringMachine:
    """Answers what is asked."""

    def step(self, event: Asked) -> list[Answer]:
        return [Answer(event.request, Echoed(event.request.message.body))]


class AnsweringActor(Actor[Asked, Answer]):
    """Sends the answers."""

    def perform(self, effect: Answer) -> None:
        effect.request.reply(effect.reply)


@dataclass(frozen=True, slots=True)
class Begin:
    """Ask until told to stop."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask no more."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request ended."""

    outcome: Message | KVError


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request."""

    body: bytes


class AskingMachine:
    """Keeps `OUTSTANDING` requests in flight and counts the good answers."""

    def __init__(self) -> None:
        self.completed = 0
        self.outstanding = 0
        self._asking = False
        self.idle = asyncio.Event()

    def step(self, event: Begin | Stop | Answered) -> list[Ask]:
        match event:
            case Answered(Echoed(body)):
                if body != BODY:
                    raise ValueError("another body came back")
                self.completed += 1
                self.outstanding -= 1
            case Answered(outcome):
                raise ValueError(f"a request failed: {outcome}")
            case Begin():
                self._asking = True
            case Stop():
                self._asking = False
        missing = OUTSTANDING - self.outstanding if self._asking else 0
        if not self._asking and not self.outstanding:
            self.idle.set()
        self.outstanding += missing
        return [Ask(BODY)] * missing


class AskingActor(Actor[Begin | Stop | Answered, Ask]):
    """Sends the requests."""

    def __init__(self, machine: AskingMachine, bus: ZmqBus) -> None:
        super().__init__("asker", machine, clock=SystemClock())
        self._bus = bus

    def perform(self, effect: Ask) -> None:
        self._bus.call(ANSWERER, Echo(effect.body), self._answered, timeout_ns=10_000_000_000)

    def _answered(self, outcome: Message | KVError) -> None:
        self.complete(Answered(outcome))


def make_bus(folder: Path, node_id: NodeId, ports: list[int]) -> ZmqBus:
    at = {name: [f"tcp://127.0.0.1:{port}" for port in ports[2 * i : 2 * i + 2]] for i, name in enumerate(NODES)}
    allow_list = AllowListFile(folder / "cluster.keys")
    requests, events = at[node_id]
    keys = load_key_pair(folder, node_id)
    config = ZmqBusConfig(node_id, Incarnation(1), requests, events, keys, allow_list)
    bus = ZmqBus(config, REGISTRY, stamper=LamportStamper(node_id))
    for name in NODES:
        if name != node_id:
            bus.add_peer(PeerAddress(name, *at[name]))
    return bus


async def next_line() -> str:
    """The next command of the parent; empty when it is gone."""
    line: str = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return line.strip()


def say(line: object) -> None:
    print(line, flush=True)


async def answer_ours(folder: Path, ports: list[int]) -> None:
    bus = make_bus(folder, ANSWERER, ports)
    actor = AnsweringActor("answerer", AnsweringMachine(), clock=SystemClock())

    def on_echo(request: Request[Echo]) -> Deferred:
        actor.post(Asked(request))
        return DEFERRED

    bus.handle(Echo, on_echo)
    await bus.start()
    say("ready")
    await next_line()
    await actor.close()
    await bus.close()


async def ask_ours(folder: Path, ports: list[int]) -> None:
    bus = make_bus(folder, ASKER, ports)
    await bus.start()
    machine = AskingMachine()
    actor = AskingActor(machine, bus)
    probe = LoopLagProbe(interval_ns=5_000_000)
    await bus.request(ANSWERER, Echo(BODY), expect=Echoed)

    async def one_round(seconds: float) -> float:
        actor.post(Begin())
        await asyncio.sleep(0.1)
        rate = await counted(lambda: machine.completed, seconds)
        actor.post(Stop())
        await machine.idle.wait()
        machine.idle.clear()
        return rate

    await probe.start()
    await serve_rounds(one_round, lambda: probe.snapshot().total_ns / max(1, probe.snapshot().samples) / 1e6)
    await probe.close()
    await actor.close()
    await bus.close()


async def answer_reference(folder: Path, ports: list[int]) -> None:
    context = zmq.asyncio.Context()
    # Its own ZAP handler, as its documentation has it: keys of a folder of certificates.
    authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve(domain="*", location=str(folder / "certificates"))
    keys = load_key_pair(folder, ANSWERER)
    router = context.socket(zmq.ROUTER)
    router.curve_server = True
    router.curve_secretkey = keys.secret_key.encode()
    router.bind(f"tcp://127.0.0.1:{ports[4]}")

    async def echo() -> None:
        while True:
            await router.send_multipart(await router.recv_multipart())

    echoing = asyncio.get_running_loop().create_task(echo())
    say("ready")
    await next_line()
    echoing.cancel()
    await asyncio.gather(echoing, return_exceptions=True)
    authenticator.stop()
    context.destroy(linger=0)


async def ask_reference(folder: Path, ports: list[int]) -> None:
    context = zmq.asyncio.Context()
    keys, peer = load_key_pair(folder, ASKER), load_key_pair(folder, ANSWERER)
    dealer = context.socket(zmq.DEALER)
    dealer.curve_publickey = keys.public_key.encode()
    dealer.curve_secretkey = keys.secret_key.encode()
    dealer.curve_serverkey = peer.public_key.encode()
    dealer.connect(f"tcp://127.0.0.1:{ports[4]}")
    completed, asking = 0, False

    async def pump() -> None:
        nonlocal completed
        outstanding = 0
        while asking or outstanding:
            while asking and outstanding < OUTSTANDING:
                await dealer.send(BODY)
                outstanding += 1
            if await dealer.recv() != BODY:
                raise ValueError("another body came back")
            outstanding -= 1
            completed += 1

    async def one_round(seconds: float) -> float:
        nonlocal asking
        asking = True
        pumping = asyncio.get_running_loop().create_task(pump())
        await asyncio.sleep(0.1)
        rate = await counted(lambda: completed, seconds)
        asking = False
        await pumping
        return rate

    await serve_rounds(one_round, lambda: 0.0)
    context.destroy(linger=0)


async def counted(completed: Callable[[], int], seconds: float) -> float:
    loop = asyncio.get_running_loop()
    before, started = completed(), loop.time()
    await asyncio.sleep(seconds)
    return (completed() - before) / (loop.time() - started)


async def serve_rounds(one_round: Callable[[float], Awaitable[float]], lag_ms: Callable[[], float]) -> None:
    say("ready")
    while command := await next_line():
        rate = await one_round(float(command))
        say(json.dumps({"rate": rate, "lag_ms": lag_ms()}))


class Pair:
    """An answering and an asking process."""

    def __init__(self, side: str, folder: Path, ports: list[int]) -> None:
        self.lag_ms = 0.0
        self._processes: list[subprocess.Popen[str]] = []
        for role in ("answer", "ask"):
            command = [sys.executable, __file__, f"{role}_{side}", str(folder), *map(str, ports)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            if self._said(process) != "ready":
                raise RuntimeError(f"{role}_{side} did not start")

    def measure(self, seconds: float) -> float:
        asker = self._processes[1]
        assert asker.stdin is not None
        asker.stdin.write(f"{seconds}\n")
        asker.stdin.flush()
        found: dict[str, float] = json.loads(self._said(asker))
        self.lag_ms = found["lag_ms"]
        return found["rate"]

    def close(self) -> None:
        for process in reversed(self._processes):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    @staticmethod
    def _said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()


def prepare(folder: Path) -> None:
    """Keys for both sides: our allow-list, and zmq's certificates."""
    pairs = [create_key_pair(folder, node_id) for node_id in NODES]
    write_allow_list(folder / "cluster.keys", AllowList("bench", {pair.node_id: pair.public_key for pair in pairs}))
    certificates = folder / "certificates"
    certificates.mkdir()
    for pair in pairs:
        text = f'metadata\ncurve\n    public-key = "{pair.public_key}"\n'
        (certificates / f"{pair.node_id}.key").write_text(text)


def main() -> int:
    options = harness.arguments(__doc__.splitlines()[0] if __doc__ else "", rounds=7)
    report = harness.Report("bus")
    pairs: dict[str, Pair] = {}
    with tempfile.TemporaryDirectory(prefix="bench-bus-") as name:
        folder = Path(name)
        prepare(folder)
        ports = pick_ports(5)
        try:
            for side in ("ours", "reference"):
                pairs[side] = Pair(side, folder, ports)
            samples = harness.interleave(
                {side: partial(pair.measure, options.seconds) for side, pair in pairs.items()}, options.rounds
            )
            lag_ms = pairs["ours"].lag_ms
        finally:
            for pair in pairs.values():
                pair.close()
    ours, reference = samples["ours"], samples["reference"]
    report.add(
        harness.compare(
            "request_replies",
            ours.median,
            "1/s",
            reference="zmq.asyncio plain echo",
            reference_value=reference.median,
            ratio=harness.paired_ratio(ours, reference),
            ours_need=25_000,
            ratio_need=3.0,
            note=f"{OUTSTANDING} outstanding, {len(BODY)} B, CURVE; spread {ours.spread:.0%}, {reference.spread:.0%}",
        )
    )
    report.add(
        harness.compare("loop_lag_mean", lag_ms, "ms", better="lower", note="of the asking process while it asks")
    )
    return report.finish(options.json)


ROLES: dict[str, Callable[[Path, list[int]], Coroutine[object, object, None]]] = {
    "answer_ours": answer_ours,
    "ask_ours": ask_ours,
    "answer_reference": answer_reference,
    "ask_reference": ask_reference,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ROLES:
        uvloop.run(ROLES[sys.argv[1]](Path(sys.argv[2]), [int(port) for port in sys.argv[3:]]))
    else:
        sys.exit(main())
