"""What the demo found: one row per request, the totals, and whether a single process would have said the same."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kv_services.kvctl.demo.client import Answer
from kv_services.kvctl.demo.reference import ReferenceAnswer
from kv_services.kvctl.output import human_bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished demo.

    Attributes:
        answers: by request; None for one that failed.
        reference: what the single process answered, in the same order; empty when it was not asked.
        processes: how many the cluster had.
        leftovers: what was still there after the stop.
        wall_s: from the first request sent to the last one answered.
    """

    answers: Sequence[Answer | None]
    reference: Sequence[ReferenceAnswer]
    processes: int
    leftovers: Sequence[str]
    wall_s: float

    @property
    def identical(self) -> int:
        """Requests whose every token is the single process's."""
        return sum(
            answer is not None and answer.tokens == single.tokens
            for answer, single in zip(self.answers, self.reference, strict=False)
        )

    @property
    def succeeded(self) -> bool:
        """All answered, all identical, nothing left behind."""
        return self.identical == len(self.answers) and not self.leftovers

    def as_object(self) -> dict[str, object]:
        """The object that `--json` prints."""
        given = [answer.fabric for answer in self.answers if answer is not None]
        return {
            "requests": len(self.answers),
            "identical": self.identical,
            "prefix_hit_tokens": sum(fabric.cached_tokens for fabric in given),
            "bytes_moved": sum(fabric.kv_bytes_moved for fabric in given),
            "processes": self.processes,
            "left_behind": len(self.leftovers),
        }


def print_outcome(out: Console, outcome: Outcome) -> None:
    """The table and the totals."""
    table = Table(title="requests", title_justify="left")
    for name in ("", "prefill", "decode"):
        table.add_column(name)
    for name in ("prompt", "found", "KV moved", "by", "hand-over", "first token", "tokens/s", "same"):
        table.add_column(name, justify="right")
    for number, answer in enumerate(outcome.answers):
        table.add_row(f"{number + 1}", *_cells(outcome, number, answer))
    out.print(table)
    for line in _totals(outcome):
        out.print(line, markup=False)


def _cells(outcome: Outcome, number: int, answer: Answer | None) -> list[str]:
    if answer is None:
        return ["failed"]
    fabric = answer.fabric
    same = number < len(outcome.reference) and answer.tokens == outcome.reference[number].tokens
    return [
        fabric.prefill_node or "none needed",
        fabric.decode_node,
        f"{fabric.prompt_tokens}",
        f"{fabric.cached_tokens}",
        human_bytes(fabric.kv_bytes_moved),
        fabric.transport,
        f"{fabric.handover_ms:,.0f} ms",
        f"{fabric.ttft_ms:,.0f} ms",
        f"{fabric.tokens_per_s:.1f}" if fabric.tokens_per_s is not None else "",
        "yes" if same else "[red]NO[/red]",
    ]


def _totals(outcome: Outcome) -> list[str]:
    given = [answer for answer in outcome.answers if answer is not None]
    prompt = sum(answer.fabric.prompt_tokens for answer in given)
    found = sum(answer.fabric.cached_tokens for answer in given)
    moved = sum(answer.fabric.kv_bytes_moved for answer in given)
    tokens = sum(len(answer.tokens) for answer in given)
    by = sorted({answer.fabric.transport for answer in given if answer.fabric.kv_bytes_moved})
    share = f" ({found / prompt:.0%})" if prompt else ""
    lines = [
        f"prompt tokens {prompt:,}, found in the prefix cache {found:,}{share}",
        f"KV moved between processes {human_bytes(moved)}{' by ' + ', '.join(by) if by else ''}",
        f"{tokens:,} tokens from {outcome.processes} processes in {outcome.wall_s:.1f} s",
    ]
    if outcome.reference:
        lines.append(f"identical to single-process: {outcome.identical}/{len(outcome.answers)}")
        lines.append(f"largest difference of a log-probability: {_largest_difference(outcome):.1e}")
    left = "; ".join(outcome.leftovers) or "nothing"
    return [*lines, f"left behind: {left}"]


def _largest_difference(outcome: Outcome) -> float:
    return max(
        (
            abs(ours - theirs)
            for answer, single in zip(outcome.answers, outcome.reference, strict=False)
            if answer is not None and answer.tokens == single.tokens
            for ours, theirs in zip(answer.logprobs, single.logprobs, strict=False)
        ),
        default=0.0,
    )
