"""From what was measured to the rows of the table, each with the ratio it must reach.

The rounds of the two sides were run in turn, so a ratio is that of each pair of rounds, and the median of those counts.
Bytes are those of all requests, the first included, of whose prefix nothing was known yet.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean, median

from bench import harness
from bench.claim_cases.sides import Answered, Round
from bench.stream_cases.clients import at_quantile

HANDOVER_NEED = 15.0
BYTES_NEED = 1 / 0.22
FIRST_TOKEN_NEED = 4.5
MEMORY_NEED = 1 / 0.8
THROUGHPUT_NEED = 2.5
MB = 1e6


@dataclass(frozen=True, slots=True)
class Measured:
    """One side's run.

    Attributes:
        first: the very first request, alone.
        alone: requests one after the other.
        rounds: requests several at a time.
        wire_nbytes: what went through the link towards the decode process, all of it; 0 without a link.
        resident_mib: of its processes, at the end.
    """

    first: Answered
    alone: Round
    rounds: list[Round]
    wire_nbytes: int
    resident_mib: dict[str, float]

    @property
    def answers(self) -> dict[int, Answered]:
        """Of all requests but the first, by their numbers."""
        found = dict(self.alone.answers)
        for one in self.rounds:
            found |= one.answers
        return found

    @property
    def everything(self) -> list[Answered]:
        return [self.first, *self.answers.values()]

    def loaded(self, figure: Callable[[Answered], float]) -> list[float]:
        """A figure of every request that was asked beside others."""
        return [figure(answer) for one in self.rounds for answer in one.answers.values()]

    def by_round(self, figure: Callable[[Round], float]) -> harness.Samples:
        return harness.Samples(tuple(figure(one) for one in self.rounds))

    def medians(self, figure: Callable[[Answered], float]) -> harness.Samples:
        """The median of a figure in each round."""
        return self.by_round(lambda one: median(figure(answer) for answer in one.answers.values()))

    def single(self, figure: Callable[[Answered], float]) -> float:
        """The median of those asked alone."""
        return median(figure(answer) for answer in self.alone.answers.values())


def differing(ours: Measured, naive: Measured) -> list[int]:
    """Requests to which the sides gave different answers, or none."""
    mine, theirs = {0: ours.first} | ours.answers, {0: naive.first} | naive.answers
    return [n for n in sorted(mine.keys() | theirs.keys()) if not _same(mine.get(n), theirs.get(n))]


def _same(one: Answered | None, other: Answered | None) -> bool:
    return one is not None and other is not None and bool(one.tokens) and list(one.tokens) == list(other.tokens)


def wire_ms(nbytes: float, mbit: int, burst_nbytes: int = 0) -> float:
    """How long the link needs for so many bytes, but for those that pass at once."""
    return max(0.0, nbytes - burst_nbytes) * 8 / mbit / 1e3


def faster_than_wire(side: Measured, mbit: int, burst_nbytes: int) -> list[str]:
    """Requests whose KV is said to have come in less time than the link needs for it: their figures are wrong."""
    return [
        f"{answer.nbytes} bytes in {answer.sending_ms:.1f} ms"
        for answer in side.everything
        if answer.sending_ms < wire_ms(answer.nbytes, mbit, burst_nbytes)
    ]


def rows(ours: Measured, naive: Measured, concurrency: int, mbit: int | None) -> Iterator[harness.Case]:
    """Every row but that of the link. Without a link (`mbit` None) nothing is required: the claim is about one."""

    def need(ratio: float) -> float | None:
        return ratio if mbit else None

    yield _handover(ours, naive, need(HANDOVER_NEED), concurrency, mbit)
    yield _bytes(ours, naive, need(BYTES_NEED), mbit)
    for name, figure in (
        ("time to the first token", _first_ms),
        ("of that, after the prompt is computed", _decode_first_ms),
    ):
        mine, theirs = ours.medians(figure), naive.medians(figure)
        tails = at_quantile(ours.loaded(figure), 0.99), at_quantile(naive.loaded(figure), 0.99)
        yield _in_turn(
            f"{name}, {concurrency} at a time",
            "ms",
            mine,
            theirs,
            need(FIRST_TOKEN_NEED),
            f"p99 {tails[0]:,.0f} and {tails[1]:,.0f}",
        )
        yield harness.compare(
            f"{name}, one alone",
            ours.single(figure),
            "ms",
            reference="naive",
            reference_value=naive.single(figure),
            better="lower",
            ratio_need=need(FIRST_TOKEN_NEED),
            note=f"the very first one {figure(ours.first):,.0f} and {figure(naive.first):,.0f}",
        )
    yield _memory(ours, naive, need(MEMORY_NEED))
    mine, theirs = ours.by_round(_tokens_per_s), naive.by_round(_tokens_per_s)
    yield _in_turn(
        f"throughput, {concurrency} at a time",
        "tokens/s",
        mine,
        theirs,
        need(THROUGHPUT_NEED),
        f"of answers; spread {mine.spread:.0%}, {theirs.spread:.0%}",
        better="higher",
    )


def _in_turn(
    name: str,
    unit: str,
    ours: harness.Samples,
    naive: harness.Samples,
    need: float | None,
    note: str,
    *,
    better: harness.Direction = "lower",
) -> harness.Case:
    """A figure of rounds that the sides had in turn."""
    return harness.compare(
        name,
        ours.median,
        unit,
        reference="naive",
        reference_value=naive.median,
        ratio=harness.paired_ratio(ours, naive, better),
        better=better,
        ratio_need=need,
        note=note,
    )


def _handover(ours: Measured, naive: Measured, need: float | None, concurrency: int, mbit: int | None) -> harness.Case:
    mine, theirs = ours.medians(_handover_ms), naive.medians(_handover_ms)
    each = mean(naive.loaded(_nbytes))
    wire = f"; the wire alone needs {wire_ms(each, mbit):,.0f} ms for naive's {each / MB:.1f} MB" if mbit else ""
    return _in_turn(
        f"hand-over beyond computing, {concurrency} at a time",
        "ms",
        mine,
        theirs,
        need,
        f"alone {ours.single(_handover_ms):.1f} and {naive.single(_handover_ms):,.0f}; the very first one, whose "
        f"prefix is new, {ours.first.handover_ms:.1f} and {naive.first.handover_ms:,.0f}{wire}",
    )


def _bytes(ours: Measured, naive: Measured, need: float | None, mbit: int | None) -> harness.Case:
    mine, theirs = (mean(answer.nbytes for answer in side.everything) / MB for side in (ours, naive))
    count = len(ours.everything)
    wire = f"; through the link {ours.wire_nbytes / count / MB:.1f} and {naive.wire_nbytes / count / MB:.1f}, all told"
    return harness.compare(
        "bytes of KV moved per request",
        mine,
        "MB",
        reference="naive",
        reference_value=theirs,
        better="lower",
        ratio_need=need,
        note=f"{1 - mine / theirs:.0%} less, of {count} requests{wire if mbit else ''}",
    )


def _memory(ours: Measured, naive: Measured, need: float | None) -> harness.Case:
    mine, theirs = ours.by_round(_held_per_live), naive.by_round(_held_per_live)
    peaks = [max((s.nbytes, s.live) for one in side.rounds for s in one.held) for side in (ours, naive)]
    told = " and ".join(f"{nbytes / MB:.0f} MB of {live}" for nbytes, live in peaks)
    resident = "; ".join(
        ", ".join(f"{name} {mib:,.0f}" for name, mib in side.resident_mib.items()) for side in (ours, naive)
    )
    return _in_turn(
        "KV held at the decode node per request that is live there",
        "MB",
        mine,
        theirs,
        need,
        f"most at once {told}; resident MiB: {resident}",
    )


def _first_ms(answer: Answered) -> float:
    return answer.first_ms


def _decode_first_ms(answer: Answered) -> float:
    return answer.decode_first_ms


def _handover_ms(answer: Answered) -> float:
    return answer.handover_ms


def _nbytes(answer: Answered) -> float:
    return answer.nbytes


def _tokens_per_s(one: Round) -> float:
    return one.tokens_per_s


def _held_per_live(one: Round) -> float:
    return one.held_per_live / MB
