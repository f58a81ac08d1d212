"""Many answers at once through a whole cluster on this machine: real processes, the stub engine, real transfers.

Every answer is held against the oracle, which depends on every byte of the KV that was moved. What the control path
adds is the time to the first token less what the same prefill and first step take in one process; beside it, what
vllm-router adds before workers that compute nothing and move nothing (`make bench-peers PEERS=vllm-router`).
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import harness
from bench.stream_cases import router
from bench.stream_cases.clients import Question, Tally, median, questions, resident_mib, stream_for
from kv_core.block import Layout
from kv_services.config import LimitsSection
from kv_services.engine.load import STUB_GEOMETRY
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.single import GenerationRequest, SingleProcess
from kv_services.engine.stub import StubModel
from tests.integration.helpers_integration import GEOMETRY, Fabric, running

STREAMS = (1, 50, 200)
PROMPT = 400
SLOTS = 2048
GROWTH_MIB = 32.0
"""What all processes together may grow by in the second half of the run with most streams."""


def in_one_process(asked: Sequence[Question]) -> float:
    """Milliseconds to the first token without any cluster: prefill and one step."""
    arena = BufferPagedKV(bytearray(64 * GEOMETRY.block_nbytes), GEOMETRY, Layout.LAYER_FIRST, 64)
    took: list[float] = []
    for question in asked:
        single = SingleProcess(StubModel(STUB_GEOMETRY), arena)
        began_s = time.perf_counter()
        single.generate([GenerationRequest(question.tokens, 1)])
        took.append((time.perf_counter() - began_s) * 1e3)
    return median(took)


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
    """Our cluster with each number of streams, then the router."""
    limits = LimitsSection(request_timeout_s=120.0, gateway_queue=256, node_queue=256, max_batch=64)
    direct_ms = in_one_process(asked[:50])
    alone = Tally()
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
            if streams == 1:
                alone = _joined(first, second)
            if streams == max(STREAMS):
                report.add(growth_case(between, after, second.right))
        await fabric.settle()
    _add_router(report, alone.first(0.5) - direct_ms, await _through_router(asked) if router.installed() else None)


def _add_router(report: harness.Report, added_ms: float, theirs: router.RouterTimes | None) -> None:
    report.add(
        harness.compare(
            "1 stream: what gateway, control path and transfer add",
            added_ms,
            "ms",
            reference="vllm-router, which moves no KV" if theirs else "",
            reference_value=theirs.added_ms if theirs else 0.0,
            better="lower",
            ratio_need=0.5 if theirs else None,
            note="" if theirs else "vllm-router is not installed: make bench-peers PEERS=vllm-router",
        )
    )


async def _through_router(asked: Sequence[Question]) -> router.RouterTimes:
    # As text, which is what its workers would be sent: as many characters as the prompts have tokens.
    return await router.measure(["".join(chr(97 + token % 26) for token in q.tokens) for q in asked[:50]], 100)


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
