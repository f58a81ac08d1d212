"""Break the code on purpose, one fault at a time, and see that a test notices: `python -m tests.mutants [NAME...]`.

Every fault must be caught by one of the tests named for it, which pass without it. The list says by which. A fault that
survives, one that no longer fits the code, or one that keeps the code from being imported fails the run.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalog import MUTANTS
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant. `by`: the test that caught it; else `why` it was not."""

    name: str
    by: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"caught   {self.name:<44} by {self.by}" if self.by else f"SURVIVED {self.name:<44} {self.why}"


def run_tests(name: str, arguments: Sequence[str]) -> dict[str, object]:
    """What the tests say with that mutant in place, in a process of its own."""
    command = [sys.executable, "-m", "tests.mutants.run_one", name, *arguments]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    try:
        said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"status": -1, "why": (done.stderr.strip() or done.stdout.strip())[-400:]}
    return said


def judge(mutant: Mutant) -> Verdict:
    """Run the tests of one mutant."""
    try:
        said = run_tests(mutant.name, mutant.tests)
    except subprocess.TimeoutExpired:
        return Verdict(mutant.name, why=f"its tests did not end within {TIMEOUT_S:.0f} s")
    failed = said.get("failed")
    if said.get("broken") or said["status"] not in (0, 1):
        return Verdict(mutant.name, why=f"its tests could not be run: {said}")
    if not said["loaded"]:
        return Verdict(mutant.name, why=f"its tests never import {mutant.module}")
    if not isinstance(failed, list) or not failed:
        return Verdict(mutant.name, why=f"{said['ran']} tests passed with it")
    return Verdict(mutant.name, by=failed[0])


def judge_all(mutants: Sequence[Mutant], jobs: int, say: Callable[[object], None] = print) -> int:
    """Run every mutant; the exit status."""
    named = sorted({argument for mutant in mutants for argument in mutant.tests})
    sound = run_tests("-", named)
    if sound["status"] != 0:
        say(f"without a mutant the tests do not pass: {sound}")
        return 1
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = []
        for verdict in pool.map(judge, mutants):
            say(verdict)
            verdicts.append(verdict)
    caught = sum(bool(verdict.by) for verdict in verdicts)
    say(f"{caught} of {len(verdicts)} mutants caught")
    return 0 if caught == len(verdicts) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="run those whose name contains one of these (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="list them and run nothing")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if not options.names or any(name in mutant.name for name in options.names)]
    if not chosen:
        parser.error(f"no mutant is called anything like {', '.join(options.names)}")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<44} {mutant.module}")
        return 0
    return judge_all(chosen, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
