"""One run: load, faults by schedule, then peace, and what came of it."""

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp

from kv_core.clock import SystemClock
from kv_services.launch.processes import ProcessState
from tests.integration.helpers_integration import until
from tests.soak.cluster import SoakCluster, soak_cluster
from tests.soak.load import Load
from tests.soak.network import Network, Proxies
from tests.soak.questions import PiecesQuestions, Question, Questions, StubQuestions
from tests.soak.schedule import OF_PROCESSES, Fault, schedule
from tests.soak.wires import Wires

PEACE_S = 90.0
_EVENT = re.compile(r"event kind=(\w+) ")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        pieces: requests that no node can hold, of a tiny model.
        netns: over a network of namespaces instead of proxies; only for a process that is `wires.alone`.
        kinds: faults of these kinds only; all that there are without any.
    """

    seed: int
    seconds: float
    clients: int = 4
    prefill: int = 2
    decode: int = 2
    gap_s: float = 1.0
    count: int = 16
    pieces: bool = False
    netns: bool = False
    kinds: tuple[str, ...] = ()


async def soak(plan: Plan, folder: Path, say: Say) -> dict[str, object]:
    """Run it; the report, whose `wrong`, `ended`, `leaked` and `leftovers` must be 0. The processes' logs are left in
    `folder/logs`, also when the run itself fails."""
    questions: Questions = StubQuestions(plan.count)
    if plan.pieces:
        questions = PiecesQuestions(folder / "model", plan.count)
    network: Network = Wires() if plan.netns else Proxies()
    kinds = [kind for kind in (*OF_PROCESSES, *network.faults) if not plan.kinds or kind in plan.kinds]
    async with soak_cluster(folder, plan.seed, plan.prefill, plan.decode, questions, network) as it:
        load = Load(it.fabric, plan.clients, questions)
        applied: Counter[str] = Counter()
        skipped: Counter[str] = Counter()
        faults = schedule(plan.seed, plan.seconds, kinds, it.fabric.kv_nodes, ["gateway"], plan.gap_s)
        clock = SystemClock()
        began_ns = clock.monotonic_ns()
        random = Random(f"{plan.seed}/faults")
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s - (clock.monotonic_ns() - began_ns) / 1e9))
            say(f"{(clock.monotonic_ns() - began_ns) / 1e9:7.1f} s  {fault.kind} of {fault.victim}")
            done = await _inflict(it, fault, random)
            (applied if done else skipped)[fault.kind] += 1
            if load.tally.wrong:
                say(f"wrong so far: {len(load.tally.wrong)}, the last: {load.tally.wrong[-1]}")
            for node in await it.lives.start_again():
                say(f"started {node} again, which had ended by itself")
        left_s = plan.seconds - (clock.monotonic_ns() - began_ns) / 1e9
        await asyncio.sleep(max(plan.gap_s, left_s))
        tally = await load.stop()
        await it.lives.start_again()
        leaked: list[str] = []
        try:
            await _peace(it, questions.question(999, 0))
        except (AssertionError, aiohttp.ClientError) as error:
            leaked.append(f"no rest afterwards: {error}")  # what came before is told all the same
        recoveries = _recoveries(it)
        cluster, ended = it.cluster, it.lives.ended
    for one in tally.wrong[:5]:
        say(f"wrong: {one}")
    for one in ended:
        say(f"ended: {one}")
    for one in tally.told:
        say(f"failed: {one}")
    for one in leaked[:5]:
        say(f"leaked: {one}")
    return {
        "seed": plan.seed,
        "seconds": round(plan.seconds, 1),
        "pieces": plan.pieces,
        "netns": plan.netns,
        "requests": tally.requests,
        "right": tally.right,
        "failed": dict(sorted(tally.failed.items())),
        "wrong": len(tally.wrong),
        "ended": len(ended),
        "longest_stall_ms": round(tally.longest_stall_s * 1e3),
        "longest_request_ms": round(tally.longest_request_s * 1e3),
        "faults": dict(sorted(applied.items())),
        "skipped": dict(sorted(skipped.items())),
        "flipped_in_transit": network.flipped,
        "recoveries": dict(sorted(recoveries.items())),
        "leaked": len(leaked),
        "leftovers": len(cluster.leftovers),
    }


async def _inflict(it: SoakCluster, fault: Fault, random: Random) -> bool:
    """One fault from its beginning to its end; False when this machine cannot do it."""
    victim, cluster = fault.victim, it.cluster
    match fault.kind:
        case "kill" | "restart":
            it.lives.struck.add(victim)
            await (cluster.kill if fault.kind == "kill" else cluster.stop)(victim)
            await asyncio.sleep(fault.hold_s)
            await cluster.restart(victim)
            it.lives.struck.discard(victim)
        case "pause" | "freeze":
            if cluster.state(victim) is ProcessState.EXITED:
                return False  # it ended by itself since the last fault, which the report says
            pid = cluster.pid(victim)
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.hold_s)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        case "power off":
            # Unplugged first: nobody hears of the end of its processes.
            it.lives.struck.add(victim)
            it.network.begin(fault.kind, victim)
            await cluster.kill(victim)
            await asyncio.sleep(fault.hold_s)
            it.network.end(fault.kind, victim)
            await cluster.restart(victim)
            it.lives.struck.discard(victim)
        case "flip at rest":
            flipped = it.disks.flip(victim, random, 64)
            await asyncio.sleep(fault.hold_s)
            return flipped > 0
        case "full disk":
            if not it.disks.can_fill(victim):
                return False
            it.disks.fill(victim)
            await asyncio.sleep(fault.hold_s)
            it.disks.empty(victim)
        case kind:
            it.network.begin(kind, victim)
            await asyncio.sleep(fault.hold_s)
            it.network.end(kind, victim)
    return True


async def _peace(it: SoakCluster, question: Question) -> None:
    """Wait until everybody knows everybody again, requests are right and nothing stays taken.

    Raises:
        AssertionError, aiohttp.ClientError: what does not come to rest.
    """
    fabric, names = it.fabric, {node.id for node in it.fabric.config.nodes}
    for name in sorted(names):
        await fabric.all_alive(name, names - {name})

    async def right() -> bool:
        return (await fabric.stream(question.tokens, question.count)).text == question.answer

    await until(right, timeout_s=PEACE_S)
    await fabric.settle()


def _recoveries(it: SoakCluster) -> Counter[str]:
    """Recoveries by kind, as the processes' logs tell of them: one line an episode."""
    found: Counter[str] = Counter()
    for node in it.fabric.config.nodes:
        found.update(_EVENT.findall(it.cluster.logs(node.id)))
    return found
