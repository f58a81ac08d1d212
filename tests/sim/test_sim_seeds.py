"""Seeds hold, and a seed repeats itself exactly, in every process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kv_services.sim.world import simulate
from tests.sim.other_pythons import environment, interpreters, ready


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.timeout(600)
def test_nothing_wrong_is_served_and_nothing_is_left_over_whatever_fails(seed: int) -> None:
    result = simulate(seed)
    assert result.nodes >= 5
    assert result.virtual_seconds >= 60
    assert result.events >= 5_000
    assert sum(result.faults.values()) >= 20 and len(result.faults) >= 3
    assert result.requests > 2 * result.requests_failed
    assert result.stamps > 2_000 and result.blocks > 100


CALL = (
    "import json, logging; logging.disable(50)\n"
    "from kv_services.sim.world import simulate\n"
    "print(json.dumps([simulate(7, seconds=8.0).digest, simulate(8, seconds=2.0).digest]))"
)


def _digests(python: Path, hash_seed: str = "0") -> list[str]:
    env = {**environment(), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([python, "-c", CALL], env=env, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.timeout(600)
def test_a_seed_repeats_itself_whatever_the_hash_seed() -> None:
    digests = _digests(Path(sys.executable))
    assert digests == _digests(Path(sys.executable), "1")
    assert digests[0] != digests[1]


@pytest.mark.timeout(600)
def test_a_seed_repeats_itself_on_every_python_of_this_machine() -> None:
    others = ready()
    if not others:
        known = ", ".join(interpreters()) or "none"
        pytest.skip(f"no other Python with the dependencies (there are: {known}); `make pythons` gives them these")
    digests = _digests(Path(sys.executable))
    assert {version: _digests(python) for version, python in others.items()} == dict.fromkeys(others, digests)
