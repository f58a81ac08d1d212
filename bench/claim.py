"""A prompt's way from prefill to decode: what people do first, against what the cluster does, figure by figure.

    python bench/claim.py [--json] [--quick] [--engine stub] [--mbit 1000] [--requests 6] [--rounds 3]

Both sides answer the same chats with the same engine and model, on as many threads, across the same emulated link (as
root: a namespace, veth, `tc tbf`; without it they run over loopback, and nothing is required), and must say the same
tokens.

naive       computes each prompt whole; then serialises its whole cache into one message, sends it, waits until it is
            in place, and only then takes the next prompt. Its decode process waits for the whole message, copies it
            in, and decodes. No sharing, no pipelining, one transfer at a time, and no gateway, checksum or encryption
            either.
optimised   gateway, prefill and decode node as shipped, by their defaults, over tcp: prefixes are shared, layers leave
            as they are computed, every byte is verified.

A request is a system prompt that all have in common (about 2,000 tokens) and a text of its own with a question (about
300). The first one is asked alone; then a few one after the other; then rounds of several at a time, the sides in turn.
The row of the link is measured by the transport's own case at the same rate, since an engine in NumPy does not fill a
link. Hand-over is counted from the prompt's last layer computed to its KV ready at the decode node: no wire is faster
than itself, and a run in which a side claims to be is no run.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import harness
from bench.claim_cases.cluster_side import cluster_config, cluster_side
from bench.claim_cases.figures import Measured, differing, faster_than_wire, rows
from bench.claim_cases.naive_side import naive_side
from bench.claim_cases.naive_wire import Settings
from bench.claim_cases.questions import Questions, make_questions
from bench.claim_cases.sides import Answered, ClaimError, Round, Side, ask_together
from bench.transport_cases.link_cases import LINK_USE_NEED, link_case
from bench.transport_cases.shaped_link import ShapedLink, burst_nbytes, shaped_link
from kv_core.block import BlockGeometry
from kv_core.errors import KVError
from kv_services.config import ModelSection
from kv_services.engine.load import EngineSpec, open_text
from kv_services.engine.weights import find_weights
from kv_services.launch import PortReservation
from kv_services.launch.signals import run_until_signal
from tests.soak import wires

LOOPBACK = "127.0.0.1"
MAX_BATCH = 8
ALONE = 3
"""Requests asked one after the other, after the very first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of whom."""

    model: ModelSection
    geometry: BlockGeometry
    questions: Questions
    requests: int
    rounds: int
    concurrency: int
    max_tokens: int
    mbit: int
    link: ShapedLink | None

    @property
    def near(self) -> str:
        return self.link.near if self.link else LOOPBACK

    @property
    def far(self) -> str:
        return self.link.far if self.link else LOOPBACK

    @property
    def prefix(self) -> Sequence[str]:
        return self.link.prefix if self.link else ()

    @property
    def slots(self) -> int:
        """Blocks of each node of either side: room for all that can be under way, whole, and as much again."""
        return 2 * self.concurrency * -(-(self.questions.longest + self.max_tokens) // self.model.block_size)

    def carried(self) -> int:
        return self.link.carried_nbytes() if self.link else 0


class Course:
    """One side's run, step by step."""

    def __init__(self, plan: Plan, side: Side) -> None:
        self._plan, self._side = plan, side
        self._first: Answered | None = None
        self._alone: Round | None = None
        self._rounds: list[Round] = []
        self._wire_nbytes = 0

    async def first(self) -> None:
        before = self._plan.carried()
        self._first = await self._side.ask(0, self._plan.questions.chats[0])
        self._wire_nbytes += self._plan.carried() - before

    async def alone(self) -> None:
        self._alone = await self._ask(range(1, ALONE + 1), 1)

    async def together(self) -> None:
        begin = 1 + ALONE + len(self._rounds) * self._plan.requests
        self._rounds.append(await self._ask(range(begin, begin + self._plan.requests), self._plan.concurrency))

    async def _ask(self, numbers: Sequence[int], concurrency: int) -> Round:
        before = self._plan.carried()
        done = await ask_together(self._side, self._plan.questions.chats, numbers, concurrency)
        self._wire_nbytes += self._plan.carried() - before
        return done

    def measured(self) -> Measured:
        assert self._first is not None and self._alone is not None
        return Measured(self._first, self._alone, self._rounds, self._wire_nbytes, self._side.resident_mib())


async def measure(plan: Plan, say: Callable[[str], None]) -> tuple[Measured, Measured]:
    """Ours, and naive's.

    Raises:
        ClaimError, KVError: a side failed.
    """
    async with contextlib.AsyncExitStack() as stack:
        ports = stack.enter_context(PortReservation())
        config = cluster_config(ports, plan.near, plan.far, plan.model, plan.slots, plan.questions.longest)
        settings = Settings(
            plan.model.engine,
            plan.model.kv_dtype,
            plan.model.block_size,
            plan.slots,
            MAX_BATCH,
            plan.near,
            plan.far,
            *(ports.take() for _ in range(3)),
        )
        assert config.limits.max_batch == MAX_BATCH and all(node.compute_threads == 1 for node in config.nodes)
        say("starting both sides")
        block_nbytes = plan.geometry.block_nbytes
        naive = Course(
            plan, await stack.enter_async_context(naive_side(settings, plan.prefix, plan.max_tokens, block_nbytes))
        )
        ours = Course(
            plan, await stack.enter_async_context(cluster_side(config, plan.prefix, plan.max_tokens, block_nbytes))
        )
        for name, course in (("naive", naive), ("ours", ours)):
            say(f"{name}: one request after the other")
            await course.first()
            await course.alone()
        for number in range(plan.rounds):
            order = (("naive", naive), ("ours", ours))
            for name, course in order if number % 2 == 0 else reversed(order):
                say(f"{name}: round {number + 1} of {plan.rounds}, {plan.requests} requests")
                await course.together()
        return ours.measured(), naive.measured()


def link_row(plan: Plan, quick: bool) -> harness.Case:
    """How much of the link a hand-over uses that computes as fast as the link carries."""
    if plan.link is None:
        return harness.compare("link in use", 0.0, "of the link", note="not measured: there is no link")
    found = link_case(plan.link, plan.mbit, slots=2 if quick else 16, rounds=1 if quick else 3)
    return harness.compare(
        "link in use",
        found.ours,
        "of the link",
        reference="naive",
        reference_value=found.reference_value,
        ratio=found.ratio,
        ours_need=LINK_USE_NEED,
        note=f"an engine that keeps up with the link, by transport.py; {found.note}",
    )


def compare_sides(options: argparse.Namespace, link: ShapedLink | None, reason: str | None) -> int:
    """Everything; the exit status."""

    def say(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    report = harness.Report("claim")
    plan = make_plan(options, link)
    if reason is not None:
        say(f"no link: {reason}. Both sides run over loopback, and nothing is required.")
    say(
        f"{len(plan.questions.chats)} requests of up to {plan.questions.longest} tokens, of which the first "
        f"{plan.questions.shared} are the same; {plan.model.engine}, {plan.model.kv_dtype}"
    )
    if link is not None:
        link.shape(plan.mbit)
        say("link in use")
    last = link_row(plan, options.quick)
    found: list[Measured] = []

    async def run(hurry: asyncio.Event) -> int:
        found.extend(await measure(plan, say))
        return 0

    status = run_until_signal(run)
    if status:
        return status
    ours, naive = found
    for case in [*rows(ours, naive, plan.concurrency, plan.mbit if link else None), last]:
        report.add(case)
    status = report.finish(options.json)
    wrong = differing(ours, naive)
    count = len(ours.everything)
    say(
        f"requests that both sides gave the same tokens to: {count - len(wrong)} of {count}"
        + (f", not {wrong}" if wrong else "")
    )
    too_fast = [
        f"{name}: {problem}, faster than the wire"
        for name, side in (("ours", ours), ("naive", naive))
        for problem in (faster_than_wire(side, plan.mbit, burst_nbytes(plan.mbit)) if link else ())
    ]
    for problem in too_fast:
        say(problem)
    # A quick run shows that the script works; its figures are too few to judge by.
    return 1 if wrong or too_fast or (status and not options.quick) else 0


def make_plan(options: argparse.Namespace, link: ShapedLink | None) -> Plan:
    """What the options ask for.

    Raises:
        WeightsMissingError: there is no model.
    """
    stub = options.engine == "stub"
    if not stub:
        find_weights(None)
    model = ModelSection(id="stub", engine="stub") if stub else ModelSection()
    info, tokenizer = open_text(EngineSpec(kind="stub" if stub else "llama"))
    number = 1 + ALONE + options.rounds * options.requests
    questions = make_questions(tokenizer.encode_chat, number, options.shared_tokens, options.own_tokens)
    geometry = info.geometry.block_geometry(model.dtype, model.block_size)
    return Plan(
        model=model,
        geometry=geometry,
        questions=questions,
        requests=options.requests,
        rounds=options.rounds,
        concurrency=options.concurrency,
        max_tokens=options.max_tokens,
        mbit=options.mbit,
        link=link,
    )


def _extend(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=("llama", "stub"), default="llama", help="stub needs no weights (default %(default)s)")
    add("--mbit", type=int, default=1_000, help="rate of the link in Mbit/s (default %(default)s)")
    add("--requests", type=int, default=6, help="of each side in each round (default %(default)s)")
    add("--concurrency", type=int, default=4, help="requests at a time (default %(default)s)")
    add("--shared-tokens", type=int, default=2_048, help="of the system prompt, about (default %(default)s)")
    add("--own-tokens", type=int, default=320, help="of each request's own, about (default %(default)s)")
    add("--max-tokens", type=int, default=64, help="of an answer, at most (default %(default)s)")


def main() -> int:
    options = harness.arguments(__doc__.splitlines()[0] if __doc__ else "", rounds=3, extend=_extend)
    if options.quick:
        options.engine, options.requests = "stub", min(options.requests, 4)
    reason = wires.unavailable()
    try:
        if reason is not None:
            return compare_sides(options, None, reason)
        # From here on in namespaces that end with this process, however it ends.
        wires.alone([sys.executable, *sys.argv])
        with shaped_link() as link:
            return compare_sides(options, link, None)
    except (ClaimError, KVError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
