"""kv-consistency on one core: clock, updates through `step`, memory, catching up, and how traffic grows with nodes.

Rates are of plain loops over inputs that were made before, in seconds of this process's own CPU time, so that whatever
else the machine does counts little; beside them stands the calibration loop of the harness. An update claims one block.
They come in order in batches of 64, as an answer of anti-entropy brings them, and one to a message, as their origin
publishes them; out of order, one to a message, shuffled within windows of 64.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import harness
from bench.consistency_cases.catching_up import catch_up_cases
from bench.consistency_cases.memory import memory_cases
from bench.consistency_cases.scale import scale_cases
from kv_consistency.events import Instant, Received, Tick
from kv_consistency.hlc import HybridLogicalClock, Timestamp
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import UpdateBatch
from kv_consistency.update import BlocksStored, NamespaceRef, Tier, Update
from kv_consistency.version_vector import Origin
from kv_core.ids import Incarnation, NodeId

NUM_UPDATES = 32_768
BATCH = 64
WINDOW = 64
NUM_STAMPS = 100_000
HERE, PEER = NodeId("here"), NodeId("peer")
ORIGIN = Origin(PEER, Incarnation(1))
NAMESPACE = NamespaceRef(b"bench--namespace", 16)


def updates() -> list[Update]:
    """One block each, in sequences of 64 blocks."""
    return [
        Update(n, n, 0, (BlocksStored(NAMESPACE, 0, Tier.HOST, n % 64, n.to_bytes(16, "little"), b"abcd"),))
        for n in range(1, NUM_UPDATES + 1)
    ]


def batches(made: Sequence[Update], size: int) -> list[UpdateBatch]:
    return [
        UpdateBatch(ORIGIN, min(len(made), first + size), tuple(made[first : first + size]))
        for first in range(0, len(made), size)
    ]


def shuffled(messages: Sequence[UpdateBatch]) -> list[UpdateBatch]:
    """In windows of 64, each in another order."""
    draw = random.Random("bench/consistency")
    out: list[UpdateBatch] = []
    for first in range(0, len(messages), WINDOW):
        window = list(messages[first : first + WINDOW])
        draw.shuffle(window)
        out += window
    return out


def applying(messages: Sequence[UpdateBatch]) -> Callable[[], float]:
    """Updates applied a second by a replica that begins empty."""

    def measure() -> float:
        replica = KvCacheConsistencyManager(HERE)
        replica.step(Tick(Instant(0, 0)))
        events = [Received(Instant(i, NUM_UPDATES + i), PEER, message) for i, message in enumerate(messages)]
        step = replica.step
        started = process_time()
        for event in events:
            step(event)
        elapsed = process_time() - started
        if replica.stats().claims != NUM_UPDATES or replica.stats().parked:
            raise RuntimeError(f"not everything was applied: {replica.stats()}")
        return NUM_UPDATES / elapsed

    return measure


def decoding_and_applying(messages: Sequence[UpdateBatch]) -> Callable[[], float]:
    """The same from the bytes of the messages."""
    raw = [msgspec.msgpack.encode(message) for message in messages]
    decode = msgspec.msgpack.Decoder(UpdateBatch).decode

    def measure() -> float:
        replica = KvCacheConsistencyManager(HERE)
        replica.step(Tick(Instant(0, 0)))
        step = replica.step
        started = process_time()
        for i, data in enumerate(raw):
            step(Received(Instant(i, NUM_UPDATES + i), PEER, decode(data)))
        return NUM_UPDATES / (process_time() - started)

    return measure


def ticking() -> float:
    """Stamps of local events a second; the wall leads in every second one."""
    clock = HybridLogicalClock(HERE)
    tick = clock.tick
    started = process_time()
    for i in range(NUM_STAMPS):
        tick(i // 2)
    return NUM_STAMPS / (process_time() - started)


def merging() -> Callable[[], float]:
    """Receipts a second, of stamps that lead in every second one."""
    remotes = [Timestamp(i + (i & 1) * 1000, i & 7, PEER) for i in range(NUM_STAMPS)]

    def measure() -> float:
        clock = HybridLogicalClock(HERE)
        merge = clock.merge
        started = process_time()
        for i, remote in enumerate(remotes):
            merge(remote, i)
        return NUM_STAMPS / (process_time() - started)

    return measure


def rates(rounds: int) -> list[harness.Case]:
    made = updates()
    single = batches(made, 1)
    subjects: dict[str, tuple[Callable[[], float], float | None, str]] = {
        "clock_ticks": (ticking, 1e6, ""),
        "clock_merges": (merging(), 1e6, ""),
        "updates_in_order": (applying(batches(made, BATCH)), 200_000, f"decoded, {BATCH} to a message"),
        "updates_in_order_with_decoding": (decoding_and_applying(batches(made, BATCH)), None, f"{BATCH} to a message"),
        "updates_in_order_single": (applying(single), None, "decoded, one to a message"),
        "updates_out_of_order": (applying(shuffled(single)), 100_000, f"decoded, one to a message, window {WINDOW}"),
    }
    samples = harness.interleave({name: measure for name, (measure, _, _) in subjects.items()}, rounds)
    return [
        harness.compare(
            name,
            samples[name].median,
            "1/s",
            ours_need=need,
            note=f"{note}{', ' if note else ''}spread {samples[name].spread:.0%}",
        )
        for name, (_, need, note) in subjects.items()
    ]


def main() -> int:
    options = harness.arguments(__doc__.splitlines()[0] if __doc__ else "", rounds=5)
    report = harness.Report("consistency")
    for case in (*rates(options.rounds), *catch_up_cases(), *memory_cases(), *scale_cases()):
        report.add(case)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
