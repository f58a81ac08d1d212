"""The tool that breaks the code on purpose: every fault still fits, some are run, and one that survives is said so."""

import pytest

from tests.mutants.__main__ import judge, judge_all, main
from tests.mutants.catalog import CLOCK, FENCING, HOLDERS, LOG, MUTANTS, POOL, TRANSFER, VECTORS
from tests.mutants.mutant import Mutant, StaleMutantError, patched, source_of


def test_every_part_has_its_faults_under_names_of_their_own() -> None:
    assert all((CLOCK, VECTORS, LOG, HOLDERS, FENCING, POOL, TRANSFER))
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


def test_a_fault_is_caught_by_a_test_that_passes_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CLOCK[0].name, "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "by tests/consistency/test_hlc.py::" in said and "1 of 1 mutants caught" in said


def test_what_no_test_notices_survives_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real fault, under tests that do not look there."""
    overlooked = Mutant(
        VECTORS[1].name, VECTORS[1].module, VECTORS[1].old, VECTORS[1].new, ("tests/consistency/test_replication.py",)
    )
    verdict = judge(overlooked)
    assert not verdict.by and "tests passed with it" in verdict.why
    lines: list[str] = []
    monkeypatch.setattr("tests.mutants.__main__.judge", lambda mutant: verdict)
    assert judge_all([overlooked], 1, lambda line: lines.append(str(line))) == 1
    assert lines[0].startswith("SURVIVED") and lines[-1] == "0 of 1 mutants caught"
