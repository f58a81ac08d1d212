"""The tool that breaks the code on purpose: every fault still fits, some are run, and one that survives is said so."""

from dataclasses import replace

import pytest

from tests.mutants.__main__ import judge, judge_all, main
from tests.mutants.catalog import CLOCK, FENCING, HOLDERS, LOG, MUTANTS, VECTORS
from tests.mutants.catalog_blocks import POOL, TRANSFER
from tests.mutants.catalog_prefix import PREFIX
from tests.mutants.catalog_shards import SHARDS
from tests.mutants.mutant import Mutant, StaleMutantError, patched, source_of


def test_every_part_has_its_faults_under_names_of_their_own() -> None:
    assert all((CLOCK, VECTORS, LOG, HOLDERS, FENCING, POOL, PREFIX, TRANSFER, SHARDS))
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_fault_fits_the_code_as_it_is(mutant: Mutant) -> None:
    source = source_of(mutant)
    broken = patched(mutant, source)
    assert broken != source
    compile(broken, mutant.module, "exec")


def test_a_fault_that_does_not_fit_is_refused() -> None:
    for source in ("x = 1\n", "y = 2\nif y:\n    y = 2\n"):
        with pytest.raises(StaleMutantError):
            patched(Mutant("m", "module", "y = 2", "y = 3", ()), source)
    inner = patched(
        Mutant("m", "module", "\n    if y:\n        y = 2\n", "\n    pass\n", ()),
        "def f():\n    if y:\n        y = 2\n",
    )
    assert inner == "def f():\n    pass\n"


@pytest.mark.timeout(600)
def test_a_fault_is_caught_by_a_test_that_passes_without_it() -> None:
    test = "tests/consistency/test_version_vector.py::test_comparison_is_inclusion_of_the_dots_covered"
    lines: list[str] = []
    assert judge_all([replace(VECTORS[1], tests=(test,))], 1, lambda line: lines.append(str(line))) == 0
    assert lines[0].startswith("caught") and lines[0].endswith(f"by {test}")
    assert lines[-1] == "1 of 1 mutants caught"


def test_the_command_lists_and_finds_faults_by_a_part_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "replay:", "lease:"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == sum(mutant.name.startswith(("replay:", "lease:")) for mutant in MUTANTS) >= 4
    assert all(line.startswith(("replay:", "lease:")) for line in listed)
    with pytest.raises(SystemExit):
        main(["no such fault"])


@pytest.mark.timeout(600)
def test_what_no_test_notices_survives_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real fault, under tests that do not look there."""
    overlooked = replace(VECTORS[1], tests=("tests/consistency/test_replication.py",))
    verdict = judge(overlooked)
    assert not verdict.by and "tests passed with it" in verdict.why
    lines: list[str] = []
    monkeypatch.setattr("tests.mutants.__main__.judge", lambda mutant: verdict)
    assert judge_all([overlooked], 1, lambda line: lines.append(str(line))) == 1
    assert lines[0].startswith("SURVIVED") and lines[-1] == "0 of 1 mutants caught"
