"""Runs that once failed hold now."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kv_services.sim.world import simulate

FILE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("regressions.toml").read_text())
RUNS: list[dict[str, Any]] = FILE["run"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"seed-{run['seed']}")
@pytest.mark.timeout(300)
def test_a_run_that_once_failed_holds(run: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    kinds = run.get("kinds", "first")
    if isinstance(kinds, str):
        kinds = FILE["kinds"][kinds]
    result = simulate(run["seed"], seconds=run.get("seconds", 60.0), kinds=kinds)
    assert result.events > 1_000 and run["cause"]
