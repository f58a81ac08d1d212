"""What every benchmark here shares: interleaved rounds, medians, ratios, a calibration loop, JSON out.

A figure alone says little on a machine that others use too. So what is compared is measured in turn (a round of each,
again and again), the median of each counts, and the ratio is taken within one run. `calibration` is the speed of a
fixed loop in this process, before and after: two runs whose calibrations differ are not to be compared by absolute
figures, and one whose two differ much was disturbed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Direction = Literal["higher", "lower"]


@dataclass(frozen=True, slots=True)
class Samples:
    """What the rounds of one subject gave, in the order measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the highest and the lowest, as a part of the median."""
        return (max(self.values) - min(self.values)) / 2 / self.median if self.median else 0.0


def paired_ratio(ours: Samples, reference: Samples, better: Direction = "higher") -> float:
    """How many times better than the reference: the median over the rounds of the ratio within each round.

    The two figures of one round were taken next to each other, so what else the machine did weighs on both.
    """
    pairs = zip(ours.values, reference.values, strict=True)
    return statistics.median(a / b if better == "higher" else b / a for a, b in pairs)


def interleave(subjects: Mapping[str, Callable[[], float]], rounds: int, warmups: int = 1) -> dict[str, Samples]:
    """Measure each subject once a round, in turn; every second round backwards, so that none always comes first."""
    for _ in range(warmups):
        for measure in subjects.values():
            measure()
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds):
        order = list(subjects) if number % 2 == 0 else list(reversed(list(subjects)))
        for name in order:
            taken[name].append(subjects[name]())
    return {name: Samples(tuple(values)) for name, values in taken.items()}


def rate_of(work: Callable[[], int], seconds: float = 0.2) -> float:
    """How many items a second `work` handles; each call returns how many it handled."""
    done, started = 0, time.perf_counter()
    while True:
        done += work()
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return done / elapsed


def calibrate(seconds: float = 0.2) -> float:
    """Millions of steps a second of a fixed loop: how fast this machine is for plain Python just now."""

    def steps() -> int:
        total = 0
        for number in range(10_000):
            total += number & 7
        return 10_000 if total else 0

    return rate_of(steps, seconds) / 1e6


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `ratio` is above 1 where ours is better; without a reference it is 0."""

    name: str
    ours: float
    unit: str
    reference: str
    reference_value: float
    ratio: float
    need: str
    ok: bool
    note: str = ""


def compare(
    name: str,
    ours: float,
    unit: str,
    *,
    reference: str = "",
    reference_value: float = 0.0,
    ratio: float | None = None,
    better: Direction = "higher",
    ours_need: float | None = None,
    ratio_need: float | None = None,
    note: str = "",
) -> Case:
    """Judge one figure against what it must reach.

    Args:
        ratio: from `paired_ratio`; without it the ratio of the two figures given.
        better: whether a higher or a lower figure is the better one.
        ours_need: bound on our own figure.
        ratio_need: how many times better than the reference.
    """
    if ratio is None:
        ratio = 0.0
    if not ratio and reference_value and ours:
        ratio = ours / reference_value if better == "higher" else reference_value / ours
    needs, ok = [], True
    if ours_need is not None:
        sign = ">=" if better == "higher" else "<="
        needs.append(f"ours {sign} {ours_need:g}")
        ok = ok and (ours >= ours_need if better == "higher" else ours <= ours_need)
    if ratio_need is not None:
        needs.append(f"ratio >= {ratio_need:g}")
        ok = ok and ratio >= ratio_need
    return Case(name, ours, unit, reference, reference_value, ratio, " and ".join(needs), ok, note)


def compare_samples(
    name: str, ours: Samples, theirs: Samples, unit: str, reference: str, ratio_need: float | None = None
) -> Case:
    """Judge the medians of interleaved rounds, by the ratio of the pairs (`paired_ratio`), where more is better."""
    return compare(
        name,
        ours.median,
        unit,
        reference=reference,
        reference_value=theirs.median,
        ratio=paired_ratio(ours, theirs),
        ratio_need=ratio_need,
        note=f"spread {ours.spread:.0%}, {theirs.spread:.0%}",
    )


@dataclass(slots=True)
class Report:
    """What one benchmark found."""

    benchmark: str
    cases: list[Case] = field(default_factory=list)
    calibration_before: float = field(default_factory=calibrate)

    def add(self, case: Case) -> None:
        self.cases.append(case)

    def finish(self, as_json: bool) -> int:
        """Print it; the exit status: 1 when a case is not ok."""
        calibration = {"before": self.calibration_before, "after": calibrate(), "unit": "Msteps/s"}
        if as_json:
            cases = [asdict(case) for case in self.cases]
            print(json.dumps({"benchmark": self.benchmark, "calibration": calibration, "cases": cases}))
        else:
            for case in self.cases:
                against = (
                    f"  {case.reference} {case.reference_value:,.4g}  ratio {case.ratio:.2f}" if case.reference else ""
                )
                verdict = ("ok" if case.ok else "MISSED") if case.need else "for information"
                print(f"{case.name}: {case.ours:,.4g} {case.unit}{against}  [{case.need or '-'}] {verdict} {case.note}")
            print(f"calibration {calibration['before']:.1f} / {calibration['after']:.1f} Msteps/s")
        return 0 if all(case.ok for case in self.cases) else 1


def arguments(
    description: str,
    argv: Sequence[str] | None = None,
    rounds: int = 5,
    seconds: float = 1.0,
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """The options every benchmark has: `--json`, `--quick`, `--rounds`, `--seconds`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each subject (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=seconds, help="length of one round (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few short rounds: to see that it runs, not how fast")
    if extend is not None:
        extend(parser)
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if options.quick:
        options.rounds, options.seconds = min(options.rounds, 2), min(options.seconds, 0.1)
    return options
