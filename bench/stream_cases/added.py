"""What the cluster adds to the first token of one stream, part by part, beyond the same engine behind bare HTTP.

Gateway and control path: one node computes and decodes. The hand-over: a prefill and a decode node, every prompt moved.
By cost: the same two, where a prompt is computed where it is decoded if that is quicker (`routing.decode_alone_ms`).
vllm-router, which moves no KV, is compared with the first, and so is the shortest path that Python has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench import harness
from bench.stream_cases import bare, router, shortest
from bench.stream_cases.clients import Question, stream_for
from kv_services.config import LimitsSection, RoutingSection
from tests.integration.helpers_integration import Fabric, running

ALONE_MS = 20.0
"""More than the stub needs for any of the prompts, once its rate was measured."""
WARM_UP_MAX = 200


@dataclass(frozen=True, slots=True)
class Part:
    """Medians in milliseconds: the first token through a cluster, and of the engine beside it, measured in turn."""

    first_ms: float
    bare_ms: float
    moved: int

    @property
    def added_ms(self) -> float:
        return self.first_ms - self.bare_ms


async def measure(report: harness.Report, seconds: float, asked: Sequence[Question], slots: int) -> None:
    """Each part for so long, then the router."""
    limits = LimitsSection(request_timeout_s=120.0)
    async with running(prefill=0, decode=1, slots=slots, limits=limits) as fabric:
        one = await part(fabric, seconds, asked)
    async with running(prefill=1, decode=1, slots=slots, limits=limits) as fabric:
        moved = await part(fabric, seconds, asked)
    by_cost = RoutingSection(decode_alone_ms=ALONE_MS)
    async with running(prefill=1, decode=1, slots=slots, limits=limits, routing=by_cost) as fabric:
        # Until the prefill node has measured its rate, and has said so, prompts are handed over.
        for question in asked[:WARM_UP_MAX]:
            if not (await fabric.ask(question.tokens, 1)).moved:
                break
        near = await part(fabric, seconds, asked)
    theirs = await _through_router(asked) if router.installed() else None
    report.add(
        harness.compare(
            "1 stream: what gateway and control path add",
            one.added_ms,
            "ms",
            reference="vllm-router" if theirs else "",
            reference_value=theirs.added_ms if theirs else 0.0,
            better="lower",
            ratio_need=0.5 if theirs else None,
            note=f"a node that computes and decodes; {one.bare_ms:.2f} ms without a cluster"
            + ("" if theirs else "; vllm-router is not installed: make bench-peers PEERS=vllm-router"),
        )
    )
    report.add(
        harness.compare(
            "1 stream: the same, beside the shortest path through Python",
            one.added_ms,
            "ms",
            reference="HTTP, one message there and one back, nothing decided",
            reference_value=await shortest.added_ms(asked[:200]),
            better="lower",
            note="no cluster of Python processes joined by ZeroMQ with CURVE adds less",
        )
    )
    report.add(
        harness.compare(
            "1 stream: what the hand-over of KV adds to that",
            moved.added_ms - one.added_ms,
            "ms",
            note=f"between two nodes, {moved.moved >> 10} KiB; together {moved.added_ms:.2f} ms",
        )
    )
    report.add(
        harness.compare(
            f"1 stream: what two nodes add with decode_alone_ms = {ALONE_MS:g}",
            near.added_ms,
            "ms",
            note=f"the last prompt moved {near.moved >> 10} KiB",
        )
    )


async def part(fabric: Fabric, seconds: float, asked: Sequence[Question]) -> Part:
    """One stream through a cluster for so long, and the bare engine before and after it."""
    await stream_for(fabric, asked, 1, min(1.0, seconds))
    before_ms = await bare.behind_http(asked[:52])
    tally = await stream_for(fabric, asked, 1, seconds)
    after_ms = await bare.behind_http(asked[:52])
    last = await fabric.ask(asked[-1].tokens, 1)
    await fabric.settle()
    return Part(tally.first(0.5), (before_ms + after_ms) / 2, last.moved)


async def _through_router(asked: Sequence[Question]) -> router.RouterTimes:
    # As text, which is what its workers would be sent: as many characters as the prompts have tokens.
    return await router.measure(["".join(chr(97 + token % 26) for token in q.tokens) for q in asked[:50]], 100)
