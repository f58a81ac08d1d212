"""`kvctl sim`: what it writes of each seed, and what it returns when one fails."""

import json
from pathlib import Path
from typing import Any

import pytest

from kv_services.kvctl.sim import run
from kv_services.sim.world import SimResult, SimulationFailedError, simulate


def test_every_seed_is_recorded_with_what_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "runs.jsonl"
    record.write_text("before\n")
    assert run(3, 2, 1.0, 3, ("loss",), True, 2, record) == 0
    told = json.loads(capsys.readouterr().out)
    first, *lines = record.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert first == "before"
    assert [(row["seed"], row["ok"]) for row in rows] == [(3, True), (4, True)]
    assert told["events"] == sum(row["events"] for row in rows) > 500
    assert told["failures"] == 0 and told["seeds"] == 2


def test_a_seed_that_fails_is_told_and_the_next_ones_still_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(seed: int, **options: Any) -> SimResult:
        if seed == 5:
            raise SimulationFailedError(seed=5, seconds=1.0, what="slots are lost", command="make sim SEED=5")
        return simulate(seed, **options)

    monkeypatch.setattr("kv_services.kvctl.sim.simulate", fail_once)
    record = tmp_path / "runs.jsonl"
    assert run(5, 2, 1.0, 3, ("loss",), True, 1, record) == 1
    told = json.loads(capsys.readouterr().out)
    failed, held = (json.loads(line) for line in record.read_text().splitlines())
    assert not failed["ok"] and failed["seed"] == 5 and failed["error"].endswith("make sim SEED=5")
    assert held["ok"] and held["seed"] == 6
    assert told["failures"] == 1 and told["failed"] == [failed["error"]]
