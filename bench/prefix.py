"""Hashing, index and eviction of kv-prefix, beside Dynamo's index where that is installed: `python bench/prefix.py`.

Dynamo's index runs in a process of its own, under `--peer-python` (an environment with `ai-dynamo-runtime`) or, without
it, in the environment that `bench/peers/install.py dynamo` made, if it did; nothing here needs it. Both sides are
measured in turn, from data of the same size and kind, names prepared before. All times but the purge's are processor
time of the process that works, on both sides, so that what else the machine did is not blamed on either.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import Report, Samples, compare, paired_ratio
from bench.prefix_cases.disk_tier import disk_tier_cases
from kv_core.hashing import BlockHashes, hash_packed, hash_tokens
from kv_core.ids import Incarnation, NodeId
from kv_core.namespace import Namespace
from kv_prefix.events import Tier
from kv_prefix.eviction import POLICIES, make_eviction_policy
from kv_prefix.index_table import COMPILED
from kv_prefix.prefix_index import Holder, PrefixIndex

NUM_TOKENS: Final = 131_072
CHAIN: Final = 512
EVENT: Final = 64
NUM_HOLDERS: Final = 8
SWEPT: Final = 64 << 20
PEER: Final = "dynamo"
PEER_PYTHON: Final = Path(__file__).resolve().parent / "peers" / ".envs" / PEER / "bin" / "python"

HOLDERS: Final = [Holder(NodeId(f"node-{i:03}"), Incarnation(1)) for i in range(256)]


class Peer:
    """Dynamo's index in a process of its own."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).parent / "peers" / "dynamo_peer.py"
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._hear()

    def ask(self, name: str, *arguments: object) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _hear(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer's process ended; is ai-dynamo-runtime installed there?")
        answer: list[float] = json.loads(line)
        return answer


def timed(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    began = clock()
    work()
    return clock() - began


def rounds_of(rounds: int, ours: Callable[[], float], theirs: Callable[[], float] | None) -> tuple[Samples, Samples]:
    """Both in turn; the other one's are zero when it is not there."""
    mine: list[float] = []
    other: list[float] = []
    for _ in range(rounds):
        mine.append(ours())
        other.append(theirs() if theirs else 0.0)
    return Samples(tuple(mine)), Samples(tuple(other))


def hashing(report: Report, peer: Peer | None, rounds: int) -> None:
    namespace = Namespace("model", "main", block_size=16)
    listed = random.Random(1).choices(range(1 << 32), k=NUM_TOKENS)
    buffer = array("I", listed)
    theirs = (lambda: min(peer.ask("hash", NUM_TOKENS, 3)) * 1e3) if peer else None
    for name, work, need in (
        ("hash 131,072 tokens, both hashes, from a uint32 buffer", lambda: hash_packed(namespace, buffer), 1.0),
        ("the same, an object a block", lambda: hash_tokens(namespace, buffer), None),
        ("the same, from a list of integers", lambda: hash_packed(namespace, listed), 1 / 1.5),
    ):
        ours, reference = rounds_of(rounds, lambda work=work: min(timed(work) for _ in range(3)) * 1e3, theirs)  # type: ignore[misc]
        report.add(
            compare(
                name,
                ours.median,
                "ms",
                better="lower",
                reference=PEER if peer else "",
                reference_value=reference.median,
                ratio=paired_ratio(ours, reference, "lower") if peer else None,
                ratio_need=need if peer else None,
                note="compiled" if COMPILED else "no compiler: plain twin",
            )
        )


def make_chains(num_blocks: int) -> list[BlockHashes]:
    draw = random.Random(2)
    chains = []
    for _ in range(num_blocks // CHAIN):
        names = draw.randbytes(16 * CHAIN)
        chains.append(BlockHashes.of_columns([names[16 * i : 16 * i + 16] for i in range(CHAIN)], list(range(CHAIN))))
    return chains


def events_of(chain: BlockHashes) -> list[BlockHashes]:
    return [chain[start : start + EVENT] for start in range(0, CHAIN, EVENT)]


def sweep_cache(junk: bytearray) -> None:
    """Reads and writes every cache line of more memory than the caches hold."""
    view = memoryview(junk)
    view[::64] = bytes(len(view[::64]))


def index(report: Report, peer: Peer | None, rounds: int, num_blocks: int) -> None:
    """Growth, lookups and memory, with 1 to 8 holders a chain."""
    size = f"{num_blocks:,} blocks"
    chains = make_chains(num_blocks)
    fed = [(number, events_of(chain)) for number, chain in enumerate(chains)]
    table = PrefixIndex()
    taken: list[float] = []
    for number, events in fed:
        for holder in HOLDERS[: number % NUM_HOLDERS + 1]:
            store = partial(table.stored, holder, Tier.HOST, consecutive=True)
            taken += [timed(partial(store, event)) for event in events]
    applied = EVENT / statistics.fmean(sorted(taken)[: len(taken) * 99 // 100]) / 1e6
    theirs = peer.ask("fill", num_blocks) if peer else []
    their_rate = EVENT / statistics.fmean(sorted(theirs)[: len(theirs) * 99 // 100]) / 1e6 if theirs else 0.0
    report.add(
        compare(
            f"apply events of 64 blocks while growing to {size}",
            applied,
            "M blocks/s",
            reference=PEER if peer else "",
            reference_value=their_rate,
            ours_need=2.0,
            ratio_need=1.0 if peer else None,
            note="mean without the slowest hundredth; the peer reads JSON, ours packed names",
        )
    )
    report.add(compare(f"longest stall while growing to {size}", max(taken) * 1e3, "ms", better="lower", ours_need=5.0))
    report.add(
        compare(
            f"memory for index and holders at {size}", table.nbytes() / num_blocks, "B/block", better="lower",
            ours_need=100.0,
        )
    )  # fmt: skip
    full = chains[NUM_HOLDERS - 1 :: NUM_HOLDERS]
    junk = bytearray(SWEPT)
    draw = random.Random(3)

    def lookup(swept: bool, listed: bool) -> float:
        taken = []
        for _ in range(12 if swept else 40):
            chain = draw.choice(full)
            names = list(chain) if listed else chain
            if swept:
                sweep_cache(junk)
            else:
                table.lookup(names)
            taken.append(timed(lambda names=names: table.lookup(names)))  # type: ignore[misc]
        return statistics.median(taken) * 1e6

    for kind, swept, listed, need in (
        ("hot", False, False, 2.0),
        ("with a swept cache", True, False, 2.0),
        ("hot, names in a list", False, True, None),
    ):
        asked = (lambda s=swept: statistics.median(peer.ask("lookup", 12 if s else 40, s)) * 1e6) if peer else None
        ours, reference = rounds_of(rounds, lambda s=swept, n=listed: lookup(s, n), asked)  # type: ignore[misc]
        report.add(
            compare(
                f"lookup of 512 blocks, 8 holders, at {size}, {kind}",
                ours.median,
                "us",
                better="lower",
                reference=PEER if peer else "",
                reference_value=reference.median,
                ratio=paired_ratio(ours, reference, "lower") if peer else None,
                ratio_need=need if peer else None,
            )
        )


def removal(report: Report, num_blocks: int) -> None:
    """A holder of everything goes, while a loop that sweeps as the services do is watched."""
    table = PrefixIndex()
    chains = make_chains(num_blocks)
    for chain in chains:
        for event in events_of(chain):
            table.stored(HOLDERS[0], Tier.HOST, event, consecutive=True)
    for chain in chains[:8]:
        table.stored(HOLDERS[1], Tier.HOST, chain, consecutive=True)
    full = table.nbytes()
    gone = timed(lambda: table.remove_holder(HOLDERS[0]))
    assert all(match.holder != HOLDERS[0] for chain in chains[:8] for match in table.lookup(chain))
    slices: list[float] = []

    async def purge() -> None:
        more = True
        while more:
            before = time.process_time()
            more = table.sweep()
            slices.append(time.process_time() - before)
            await asyncio.sleep(0)

    took = timed(lambda: asyncio.run(purge()), time.perf_counter)
    size = f"{num_blocks:,} blocks"
    report.add(
        compare(f"a holder of {size} is out of every answer after", gone * 1e3, "ms", better="lower", ours_need=5.0)
    )
    report.add(compare(f"longest slice of purging {size}", max(slices) * 1e3, "ms", better="lower", ours_need=5.0))
    left = table.nbytes()
    report.add(
        compare(
            f"the memory of {size} is back after", took, "s", better="lower", ours_need=5.0,
            note=f"{full / 1e6:.0f} MB before, {left / 1e6:.1f} MB after",
        )
    )  # fmt: skip
    report.add(compare("memory that is left of it", left / full, "of it", better="lower", ours_need=0.1))


def many_holders(report: Report, num_blocks: int) -> None:
    table = PrefixIndex()
    chains = make_chains(num_blocks)
    for holder in HOLDERS:
        for chain in chains:
            table.stored(holder, Tier.HOST, chain, consecutive=True)
    took = min(timed(lambda: table.lookup(chains[0])) for _ in range(20)) * 1e6
    assert len(table.lookup(chains[0])) == len(HOLDERS)
    report.add(
        compare(
            f"lookup of 512 blocks with 256 holders of each of {num_blocks:,} blocks", took, "us", better="lower",
            note=f"{table.nbytes() / num_blocks:.0f} B/block",
        )
    )  # fmt: skip


def eviction(report: Report, num_accesses: int) -> None:
    """What a policy costs an access, in a full cache."""
    draw = random.Random(4)
    names = [b"%016d" % int(60_000 ** draw.random()) for _ in range(num_accesses)]
    for kind in POLICIES:
        took = timed(lambda kind=kind: _access(kind, names))  # type: ignore[misc]
        report.add(compare(f"eviction policy {kind}, an access", took / num_accesses * 1e6, "us", better="lower"))


def _access(kind: str, names: list[bytes], capacity: int = 10_000) -> None:
    policy = make_eviction_policy(kind, capacity)
    slot_of: dict[bytes, int] = {}
    in_slot: list[bytes] = []
    for name in names:
        slot = slot_of.get(name)
        if slot is not None:
            policy.touch(slot)
            continue
        if len(in_slot) < capacity:
            slot = len(in_slot)
            in_slot.append(name)
        else:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim, evicted=True)
            del slot_of[in_slot[victim]]
            slot = victim
            in_slot[slot] = name
        slot_of[name] = slot
        policy.insert(slot, name)
        policy.offer(slot)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hashing, index and eviction of kv-prefix.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each subject (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks")
    parser.add_argument("--peer-python", help="interpreter of an environment with ai-dynamo-runtime")
    options = parser.parse_args()
    python = options.peer_python or (str(PEER_PYTHON) if PEER_PYTHON.exists() else None)
    peer = Peer(python) if python else None
    scale = 10 if options.quick else 1
    report = Report("prefix")
    try:
        hashing(report, peer, options.rounds)
        for num_blocks in (100_000, 1_000_000):
            index(report, peer, options.rounds, num_blocks // scale)
    finally:
        if peer:
            peer.close()
    removal(report, 1_000_000 // scale)
    many_holders(report, 100_000 // scale)
    eviction(report, 200_000 // scale)
    for case in disk_tier_cases(options.rounds):
        report.add(case)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
