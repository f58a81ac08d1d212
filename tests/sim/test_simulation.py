"""The simulator: seeds hold, a seed repeats itself exactly, and a broken replica is caught."""

import json
import os
import subprocess
import sys

import pytest

from kv_consistency.version_vector import Origin
from kv_services.replica.service import ReplicaService
from kv_services.sim.world import SimulationFailedError, simulate

SECONDS = 8.0


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.timeout(300)
def test_replicas_agree_and_indexes_tell_the_truth_after_faults(seed: int) -> None:
    result = simulate(seed, seconds=SECONDS)
    assert result.events > 3_000
    assert sum(result.faults.values()) >= 3
    assert result.requests > result.requests_failed


@pytest.mark.timeout(300)
def test_a_seed_repeats_itself_whatever_the_hash_seed() -> None:
    call = "import json, logging; logging.disable(50)\nfrom kv_services.sim.world import simulate\n"
    call += "print(json.dumps([simulate(7, seconds=6.0).digest, simulate(8, seconds=2.0).digest]))"
    digests = []
    for hash_seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", call], env=env, capture_output=True, text=True, check=True)
        digests.append(json.loads(done.stdout))
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[0][1]


@pytest.mark.timeout(300)
def test_an_index_that_misses_removals_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    change = ReplicaService._change_index

    def forgetful(self: ReplicaService, effect: object) -> None:
        if type(effect).__name__ != "ClaimsRemoved" or getattr(effect, "holder", None) == Origin("node-1", 1):  # type: ignore[arg-type]
            change(self, effect)  # type: ignore[arg-type]

    monkeypatch.setattr(ReplicaService, "_change_index", forgetful)
    with pytest.raises(SimulationFailedError, match="repeat it with: make sim SEED=1"):
        simulate(1, seconds=SECONDS)
