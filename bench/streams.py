"""Many answers at once through a whole cluster on this machine: real processes, the stub engine, real transfers.

Every answer is held against the oracle, which depends on every byte of the KV that was moved. What is added to the
first token of one stream is measured part by part (`stream_cases.added`), beside what vllm-router adds before workers
that compute nothing and move nothing (`make bench-peers PEERS=vllm-router`).
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import harness
from bench.stream_cases import added, bare
from bench.stream_cases.clients import Question, Tally, median, questions, resident_mib, stream_for
from kv_services.config import LimitsSection
from tests.integration.helpers_integration import Fabric, running

STREAMS = (1, 50, 200)
PROMPT = 400
SLOTS = 2048
GROWTH_MIB = 32.0
"""What all processes together may grow by in the second half of the run with most streams."""


def cases_of(streams: int, tally: Tally, direct_ms: float, seconds: float) -> list[harness.Case]:
    """What one run with that many streams says."""
    name = f"{streams} stream{'s' if streams > 1 else ''}"
    failed = sum(tally.errors.values()) + tally.wrong
    said = ", ".join(f"{code} {count}" for code, count in sorted(tally.errors.items()))
    return [
        harness.compare(
            f"{name}: requests that failed or were wrong",
            failed,
            "requests",
            better="lower",
            ours_need=0,
            note=f"{tally.right} right, {tally.wrong} wrong{', ' + said if said else ''}",
        ),
        harness.compare(f"{name}: answers a second", tally.right / seconds, "answers/s", note=f"{seconds:.0f} s"),
        harness.compare(
            f"{name}: time to the first token",
            tally.first(0.5),
            "ms",
            reference="prefill and one step in one process",
            reference_value=direct_ms,
            better="lower",
            note=f"p99 {tally.first(0.99):.1f} ms; between tokens {median(tally.gap_ms):.2f} ms",
        ),
    ]


def memory(fabric: Fabric) -> dict[str, float]:
    """MiB resident, by process."""
    return {node.id: resident_mib(fabric.cluster.pid(node.id)) for node in fabric.config.nodes}


def growth_case(before: dict[str, float], after: dict[str, float], requests: int) -> harness.Case:
    """What all processes grew by while so many requests ended, and which of them by how much."""
    each = ", ".join(f"{name} {after[name] - before[name]:+.0f}" for name in before)
    return harness.compare(
        f"{max(STREAMS)} streams: memory grown in the second half",
        sum(after.values()) - sum(before.values()),
        "MiB",
        better="lower",
        ours_need=GROWTH_MIB,
        note=f"all processes together, {sum(before.values()):.0f} MiB before; in {requests} requests: {each}",
    )


async def measure(report: harness.Report, seconds: float, asked: Sequence[Question]) -> None:
    """Two nodes of each role with each number of streams, then what is added to one."""
    limits = LimitsSection(request_timeout_s=120.0, gateway_queue=256, node_queue=256, max_batch=64)
    direct_ms = bare.alone(asked[:50])
    async with running(prefill=2, decode=2, slots=SLOTS, limits=limits) as fabric:
        await stream_for(fabric, asked, 8, min(2.0, seconds))
        for streams in STREAMS:
            half_s = seconds / 2 if streams == max(STREAMS) else min(seconds, 10.0) / 2
            first = await stream_for(fabric, asked, streams, half_s)
            between = memory(fabric)
            second = await stream_for(fabric, asked, streams, half_s)
            after = memory(fabric)
            for case in cases_of(streams, _joined(first, second), direct_ms, 2 * half_s):
                report.add(case)
            if streams == max(STREAMS):
                report.add(growth_case(between, after, second.right))
        await fabric.settle()
    await added.measure(report, min(seconds, 4.0), asked, SLOTS)


def _joined(one: Tally, other: Tally) -> Tally:
    return Tally(
        one.right + other.right,
        one.wrong + other.wrong,
        one.errors + other.errors,
        one.first_ms + other.first_ms,
        one.gap_ms + other.gap_ms,
        one.total_ms + other.total_ms,
    )


def main() -> int:
    options = harness.arguments(__doc__ or "", seconds=60.0)
    seconds = 4.0 if options.quick else options.seconds
    report = harness.Report("streams")
    asked = questions(300 if options.quick else 2_000, PROMPT)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(report, seconds, asked))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
