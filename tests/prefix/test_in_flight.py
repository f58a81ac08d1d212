"""Announced blocks against a plain table, and what is proposed against trying every possibility."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.hashing import BlockHash
from kv_prefix import limits
from kv_prefix.errors import InvalidRequestError
from kv_prefix.in_flight import InFlight, Wait

CHAIN = [BlockHash(bytes([i]) * 16, i) for i in range(8)]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["announce", "announce", "ready", "withdraw", "expire"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 7),
        st.integers(1, 8),
        st.integers(0, 60),
    ),
    max_size=20,
)


@given(OPERATIONS, st.integers(0, 8), st.integers(0, 60), st.integers(0, 12), st.integers(0, 20))
def test_the_proposal_is_the_best_of_all_and_nothing_outlives_its_time(
    operations: list[tuple[str, str, int, int, int]], held: int, now: int, per_block: int, fetch: int
) -> None:
    table = InFlight()
    plain: dict[int, tuple[str, int, int]] = {}
    for operation, owner, first, count, at in operations:
        blocks = range(first, min(first + count, 8))
        if operation == "announce":
            plain = {i: said for i, said in plain.items() if said[0] != owner}
            new = [i for i in blocks if i not in plain]
            told = table.announce(owner, [CHAIN[i] for i in blocks], start_ns=at, ns_per_block=5, until_ns=at + 30)
            plain |= {i: (owner, at + (i - first + 1) * 5, at + 30) for i in new}
            assert told == len(new)
        elif operation == "ready":
            table.ready(owner, [CHAIN[i] for i in blocks])
            plain = {i: said for i, said in plain.items() if said[0] != owner or i not in blocks}
        elif operation == "withdraw":
            table.withdraw(owner)
            plain = {i: said for i, said in plain.items() if said[0] != owner}
        else:
            ended = {said[0] for said in plain.values() if said[2] <= at}
            assert set(table.expire(at)) == ended
            plain = {i: said for i, said in plain.items() if said[0] not in ended}
        table.check()
        assert len(table) == len(plain)
    missing = len(CHAIN) - held
    choices: list[tuple[int, int]] = [(0, 0)]
    for end in range(held + 1, 9):
        said = [plain.get(i) for i in range(held, end)]
        if None in said or len({one[0] for one in said if one}) != 1 or any(one[2] <= now for one in said if one):
            break
        _, ready, until = plain[end - 1]
        if ready < until:
            takes = max(ready - now, 0) + fetch + (missing - (end - held)) * per_block
            choices.append((missing * per_block - takes, end))
    proposed = table.ask(CHAIN, held, now_ns=now, ns_per_block=per_block, fetch_ns=fetch)
    assert (proposed.saved_ns if proposed else 0) == max(saved for saved, _ in choices)
    if proposed:
        assert (proposed.saved_ns, proposed.num_blocks) in choices and proposed.until_ns > now


def test_a_second_request_waits_for_what_is_nearly_there_and_computes_what_is_not() -> None:
    table = InFlight()
    table.announce("first", CHAIN, start_ns=0, ns_per_block=100, until_ns=5_000)
    wait = table.ask(CHAIN, 0, now_ns=700, ns_per_block=100)
    assert wait == Wait("first", 8, 800, 5_000, 700)
    # One that computes eight times as fast does it itself.
    assert table.ask(CHAIN, 0, now_ns=0, ns_per_block=12) is None
    # Reading it takes as long as computing it.
    assert table.ask(CHAIN, 0, now_ns=700, ns_per_block=100, fetch_ns=700) is None


def test_a_dead_owner_keeps_nobody_waiting() -> None:
    table = InFlight()
    table.announce("first", CHAIN, start_ns=0, ns_per_block=100, until_ns=5_000)
    table.withdraw("first")
    assert table.ask(CHAIN, 0, now_ns=700, ns_per_block=100) is None
    table.announce("silent", CHAIN, start_ns=0, ns_per_block=100, until_ns=5_000)
    assert table.ask(CHAIN, 0, now_ns=5_000, ns_per_block=100) is None
    assert table.expire(4_999) == [] and table.expire(5_000) == ["silent"]
    assert len(table) == 0


def test_a_name_with_another_check_hash_is_another_block() -> None:
    table = InFlight()
    table.announce("first", CHAIN, start_ns=0, ns_per_block=1, until_ns=5_000)
    assert table.ask([BlockHash(CHAIN[0].sequence, 99)], 0, now_ns=0, ns_per_block=100) is None


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_IN_FLIGHT_BLOCKS", 5)
    table = InFlight()
    assert table.announce("first", CHAIN, start_ns=0, ns_per_block=1, until_ns=9) == 5
    assert table.announce("second", CHAIN, start_ns=0, ns_per_block=1, until_ns=9) == 0
    with pytest.raises(InvalidRequestError):
        table.announce("first", CHAIN, start_ns=9, ns_per_block=1, until_ns=9)
