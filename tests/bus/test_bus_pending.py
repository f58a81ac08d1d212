"""The pending table against a dict that is searched."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_bus.pending import PendingTable
from kv_core.errors import LocalProtocolError


class PendingAgainstDict(RuleBasedStateMachine):
    """Every operation on both; time only moves forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: PendingTable[str] = PendingTable()
        self.oracle: dict[int, int] = {}
        self.now = 0

    @rule(call_id=st.integers(1, 6), wait=st.integers(0, 50))
    def add(self, call_id: int, wait: int) -> None:
        if call_id in self.oracle:
            with pytest.raises(LocalProtocolError):
                self.table.add(call_id, self.now + wait, str(call_id))
            return
        self.table.add(call_id, self.now + wait, str(call_id))
        self.oracle[call_id] = self.now + wait

    @rule(call_id=st.integers(1, 6), answered=st.booleans())
    def leave(self, call_id: int, answered: bool) -> None:
        found = self.table.resolve(call_id) if answered else self.table.remove(call_id)
        assert found == (str(call_id) if self.oracle.pop(call_id, None) is not None else None)

    @rule(step=st.integers(0, 40))
    def expire(self, step: int) -> None:
        self.now += step
        gone = self.table.expire(self.now)
        due = {call_id: at for call_id, at in self.oracle.items() if at <= self.now}
        assert {call_id for call_id, _ in gone} == set(due)
        assert [due[call_id] for call_id, _ in gone] == sorted(due.values())
        for call_id in due:
            del self.oracle[call_id]

    @precondition(lambda self: len(self.oracle) > 4)
    @rule()
    def take_all(self) -> None:
        assert [call_id for call_id, _ in self.table.take_all()] == list(self.oracle)
        self.oracle.clear()

    @invariant()
    def they_agree(self) -> None:
        self.table.check()
        assert {call_id: at for call_id, at, _ in self.table.entries()} == self.oracle

    @rule()
    def next_deadline(self) -> None:
        # A rule, not part of the invariant: looking at it sweeps deadlines of entries that left.
        assert self.table.next_deadline_ns() == (min(self.oracle.values()) if self.oracle else None)


TestPendingAgainstDict = PendingAgainstDict.TestCase
TestPendingAgainstDict.settings = settings(deadline=None)


@given(st.integers(300, 3000))
@settings(deadline=None, max_examples=10)
def test_deadlines_of_answered_calls_do_not_pile_up(calls: int) -> None:
    table: PendingTable[None] = PendingTable()
    for call_id in range(calls):
        table.add(call_id, 10**12 + call_id, None)
        if call_id >= 10:
            table.resolve(call_id - 10)
        table.check()
    assert len(table) == 10


def test_strays_are_counted() -> None:
    table: PendingTable[None] = PendingTable()
    table.add(1, 5, None)
    assert table.resolve(1) is None and table.resolve(1) is None and table.resolve(2) is None
    assert (table.stats().resolved, table.stats().strays) == (1, 2)
