"""What a prefill node says of a hand-over, and when."""

import asyncio
from typing import Any

import pytest

from kv_services.node.prefill import PrefillActor
from kv_services.node.prefill_state import JobState
from kv_services.sim.world import simulate


@pytest.mark.timeout(300)
def test_the_word_of_a_hand_over_leaves_when_its_blocks_are_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it a short answer may be over, and its end be told, at any time: what was computed must be there."""
    tell = PrefillActor._tell
    states: list[JobState] = []

    def noted(self: PrefillActor, key: Any, *what: Any) -> asyncio.Future[None]:
        job = self.machine.job(*key)
        assert job is not None
        states.append(job.state)
        return tell(self, key, *what)

    monkeypatch.setattr(PrefillActor, "_tell", noted)
    simulate(1, seconds=10.0, kinds=("slow node",))
    assert len(states) > 10 and set(states) == {JobState.SENDING}
