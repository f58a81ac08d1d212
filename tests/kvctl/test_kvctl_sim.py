"""`kvctl sim`: what it writes of each seed, and what it returns when one fails."""

import json
import os
import signal
import subprocess
import sys
import time
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


def _living(group: int) -> list[str]:
    """Processes of that group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own_group = stat.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue
        if int(own_group) == group and state != "Z":
            found.append(stat.parent.name)
    return found


def _semaphores(pid: int) -> set[str]:
    """Names of the semaphores that a process has open."""
    maps = Path(f"/proc/{pid}/maps").read_text().split()
    return {word for word in maps if word.startswith("/dev/shm/sem.")}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whatever_stops_it_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    call = "import sys; from kv_services.kvctl import app; sys.argv = ['kvctl', *sys.argv[1:]]; app()"
    command = [sys.executable, "-c", call, "sim", "--seeds", "500", "--jobs", "2", "--json"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    kvctl = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # Both processes have a run under way.
    while len(list(tmp_path.glob("kv-sims-*/kv-sim-*"))) < 2:
        assert kvctl.poll() is None
        time.sleep(0.05)
    semaphores = _semaphores(kvctl.pid)
    assert semaphores
    if number is signal.SIGINT:
        # A terminal tells everybody, a service manager its own child.
        os.killpg(kvctl.pid, number)
    else:
        kvctl.send_signal(number)
    told, _ = kvctl.communicate()
    assert kvctl.returncode not in (0, -number) and told == b""
    # What multiprocessing keeps for itself ends once the pipe to its parent is closed.
    while _living(kvctl.pid):
        time.sleep(0.05)
    assert [name for name in semaphores if Path(name).exists()] == []
    assert list(tmp_path.iterdir()) == []
