"""Run tests with one mutant in place, in a process of its own: `python -m tests.mutants.run_one NAME`, or `-` for the
code as it is, with pytest's arguments after it. The last line of the output is a JSON object."""

import json
import sys
from dataclasses import dataclass, field

import pytest

from tests.mutants.catalog import MUTANTS
from tests.mutants.mutant import MutatingFinder

OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.profile", "--hypothesis-profile=mutants")


@dataclass(eq=False)
class _Watcher:
    """Notes which tests ran and which failed."""

    ran: int = 0
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ran += 1
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(report.nodeid)


def main(name: str, arguments: list[str]) -> int:
    finder = None
    if name != "-":
        finder = MutatingFinder(next(mutant for mutant in MUTANTS if mutant.name == name))
        finder.install()
    watcher = _Watcher()
    status = pytest.main([*OPTIONS, *arguments], plugins=[watcher])
    said = {
        "status": int(status),
        "loaded": finder is None or finder.loaded,
        "ran": watcher.ran,
        "failed": watcher.failed,
        "broken": watcher.broken,
    }
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
