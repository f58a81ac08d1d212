"""What a case gives, how much is measured, and how results are told."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from bench.harness import Case


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: rounds of each subject, and how long each lasts."""

    rounds: int
    seconds: float
    quick: bool


@dataclass(frozen=True, slots=True)
class Skipped:
    """A case that cannot be measured here, and why."""

    name: str
    reason: str


Outcome = Case | Skipped
Group = Callable[[Effort], Iterable[Outcome]]
"""Measures cases that share their processes."""

_SUFFIX: Final = {"GB/s": "gbps", "us": "us", "%": "percent", "of the link": "link_use"}


def as_json(outcome: Outcome) -> str:
    """One line; figures are named after their unit: `ours_gbps` in GB/s (1e9 bytes), `ours_us`, ..."""
    if isinstance(outcome, Skipped):
        return json.dumps({"name": outcome.name, "skipped": outcome.reason, "ok": None})
    suffix = _SUFFIX[outcome.unit]
    return json.dumps(
        {
            "name": outcome.name,
            f"ours_{suffix}": round(outcome.ours, 4),
            "reference": outcome.reference,
            f"reference_{suffix}": round(outcome.reference_value, 4),
            "ratio": round(outcome.ratio, 4),
            "need": outcome.need,
            "ok": outcome.ok,
            "note": outcome.note,
        }
    )


def as_text(outcome: Outcome) -> str:
    """One line for people."""
    if isinstance(outcome, Skipped):
        return f"{outcome.name}: skipped, {outcome.reason}"
    verdict = ("ok" if outcome.ok else "MISSED") if outcome.need else "for information"
    against = f"  {outcome.reference} {outcome.reference_value:.4g}" if outcome.reference else ""
    ratio = f"  ratio {outcome.ratio:.2f}" if outcome.reference else ""
    needed = f"  [{outcome.need}]" if outcome.need else ""
    return f"{outcome.name}: {outcome.ours:.4g} {outcome.unit}{against}{ratio}{needed} {verdict}  {outcome.note}"
