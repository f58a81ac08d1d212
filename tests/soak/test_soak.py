"""The short form of `make soak`: every kind of fault at least once, under load, and the schedule's own promises."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.network import Proxies
from tests.soak.run import Plan, soak
from tests.soak.schedule import OF_KV, OF_PROCESSES, schedule
from tests.soak.wires import Wires

KINDS = st.sampled_from([(*OF_PROCESSES, *network.faults) for network in (Proxies(), Wires())])


@given(st.integers(0, 1000), st.floats(1.0, 600.0), KINDS)
def test_a_schedule_is_its_seed_and_has_every_kind_and_one_fault_at_a_time(
    seed: int, seconds: float, kinds: tuple[str, ...]
) -> None:
    faults = schedule(seed, seconds, kinds, ["a", "b"], ["g"], 1.0)
    assert faults == schedule(seed, seconds, kinds, ["a", "b"], ["g"], 1.0)
    assert {fault.kind for fault in faults} == set(kinds)
    assert all(fault.victim != "g" or fault.kind not in OF_KV for fault in faults)
    for one, after in itertools.pairwise(faults):
        assert one.at_s + one.hold_s < after.at_s


@pytest.mark.integration
@pytest.mark.timeout(500)
@pytest.mark.asyncio
async def test_faults_of_every_kind_cost_time_and_never_a_wrong_token(tmp_path: Path) -> None:
    lines: list[str] = []
    report = await soak(Plan(seed=7, seconds=30.0, clients=3, gap_s=0.5), tmp_path, lines.append)
    told = "\n".join([*lines, str(report)])
    assert report["wrong"] == report["ended"] == report["leaked"] == report["leftovers"] == 0, told
    assert isinstance(report["right"], int) and report["right"] > 20, told
    faults, skipped = report["faults"], report["skipped"]
    assert isinstance(faults, dict) and isinstance(skipped, dict)
    # Only root can have a file system of its own to fill; and what is not on disk yet cannot rot there.
    everything = {*OF_PROCESSES, *Proxies().faults}
    assert everything - set(faults) <= {"full disk", "flip at rest"}, told
    assert set(faults) | set(skipped) == everything, told
