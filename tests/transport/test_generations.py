"""Generations of many slots at once are those of each in turn, or none changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import Generation
from kv_transport import Arena
from kv_transport.errors import StaleGeneration
from tests.transport.helpers_transport import NO_RESERVE, SMALL

SLOTS = 8


@given(
    before=st.lists(st.integers(1, 5), min_size=SLOTS, max_size=SLOTS),
    raised=st.dictionaries(st.integers(0, SLOTS - 1), st.integers(1, 7)),
)
def test_many_at_once_are_raised_as_one_by_one_or_not_at_all(before: list[int], raised: dict[int, int]) -> None:
    slots, to = list(raised), [Generation(target) for target in raised.values()]
    with (
        Arena.create(SMALL, SLOTS, budget=NO_RESERVE) as together,
        Arena.create(SMALL, SLOTS, budget=NO_RESERVE) as in_turn,
    ):
        for arena in (together, in_turn):
            arena.generations[:] = before
            arena.checks[:] = 9
        stale = next((slot for slot, target in zip(slots, to, strict=True) if target <= before[slot]), None)
        if stale is None:
            for slot, target in zip(slots, to, strict=True):
                in_turn.raise_generation(slot, target)
            together.raise_generations(slots, to)
        else:
            with pytest.raises(StaleGeneration) as caught:
                together.raise_generations(slots, to)
            assert caught.value.fields["slot"] == stale and caught.value.fields["expected"] == raised[stale]
        assert together.generations.tolist() == in_turn.generations.tolist()
        assert together.checks.tolist() == in_turn.checks.tolist()
