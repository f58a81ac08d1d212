"""Shelves, pages and sweeping, at sizes where shelves are split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_consistency.claims import SPLIT_AT, ClaimTable
from kv_consistency.effects import ClaimChange, ClaimsAdded, ClaimsRemoved, HolderDropped
from kv_consistency.update import BlocksRemoved, BlocksStored, Tier, pack_hashes
from tests.consistency.helpers_consistency import NAMESPACE, block, life, removal_of, run_of

A = life("a")
KEY = (NAMESPACE.digest, Tier.HOST, b"")


def stored(blocks: range | list[int], epoch: int = 0) -> BlocksStored:
    run = run_of(blocks, start=blocks[0])
    return BlocksStored(run.namespace, epoch, run.tier, run.start, run.hashes, run.checks)


def removed(blocks: range | list[int]) -> BlocksRemoved:
    gone = removal_of(blocks)
    return BlocksRemoved(gone.namespace, gone.tier, gone.hashes)


def table_of(count: int) -> ClaimTable:
    table = ClaimTable()
    out: list[ClaimChange] = []
    for n, first in enumerate(range(0, count, 64), 1):
        table.store(A, n, stored(range(first, min(first + 64, count))), 0, out)
    table.check()
    return table


def held(table: ClaimTable) -> dict[bytes, int]:
    return {name: position for _, _, name, position, _ in table.rows()}


def test_a_large_shelf_is_split_and_answers_as_before() -> None:
    count = 3 * SPLIT_AT
    table = table_of(count)
    assert table.shelves(A)[KEY].parts is not None and table.size == count
    (overlap,) = table.runs([block(i) for i in range(count + 5)], None)
    assert overlap.num_blocks == count
    out: list[ClaimChange] = []
    table.remove(A, 9_999, removed(range(100, 200)), out)
    table.store(A, 10_000, stored(range(150, 151)), 0, out)
    table.check()
    assert held(table) == {block(i): i for i in range(count) if not 100 <= i < 200 or i == 150}


def test_pages_of_every_part_make_the_table_again() -> None:
    for count in (10, SPLIT_AT, 2 * SPLIT_AT):
        source, copy = table_of(count), table_of(5)
        out: list[ClaimChange] = []
        parts = range(-1, 0) if source.shelves(A)[KEY].parts is None else range(256)
        for part in parts:
            copy.take_page(source.page(A, KEY, part), 10**9, 0, out)
            copy.check()
        assert sorted(copy.rows()) == sorted(source.rows())
        names = [name for change in out if isinstance(change, ClaimsAdded) for name in change.hashes]
        assert len(names) == len(set(names)) >= count - 5


steps = st.tuples(st.sampled_from(("store", "remove", "clear")), st.integers(0, 30), st.integers(1, 8))


@settings(deadline=None)
@given(st.lists(steps, max_size=25), st.integers(0, 25), st.integers(0, 25))
def test_replaying_updates_over_a_page_that_already_knew_them_changes_nothing_in_the_end(
    run: list[tuple[str, int, int]], behind: int, ahead: int
) -> None:
    """A copy that stopped at `behind` takes a page made at `ahead`, and then replays everything after `behind`."""
    behind, ahead = sorted((min(behind, len(run)), min(ahead, len(run))))
    tables = ClaimTable(), ClaimTable(), ClaimTable()
    source, copy, truth = tables
    out: list[ClaimChange] = []

    def apply(table: ClaimTable, n: int, replayed: bool) -> None:
        kind, first, length = run[n - 1]
        if kind == "store":
            table.store(A, n, stored(range(first, first + length)), 0, out, replayed)
        elif kind == "remove":
            table.remove(A, n, removed(range(first, first + length)), out, replayed)
        else:
            table.clear(A, n, None, out, replayed)

    for n in range(1, ahead + 1):
        apply(source, n, False)
    for n in range(1, behind + 1):
        apply(copy, n, False)
    for n in range(1, len(run) + 1):
        apply(truth, n, False)
    highest = 0
    if KEY in source.shelves(A):
        highest = copy.take_page(source.page(A, KEY, -1), behind, 0, out)
        assert highest <= ahead
    else:
        copy.drop_unseen(A, set(), behind, out)
    for n in range(behind + 1, len(run) + 1):
        apply(copy, n, n <= ahead)
        copy.check()
    assert sorted(copy.rows()) == sorted(truth.rows())


def test_a_replayed_update_never_undoes_what_a_snapshot_knew_to_be_newer() -> None:
    """Not even for the moment until the rest is replayed: an index would follow."""
    source, copy = ClaimTable(), ClaimTable()
    out: list[ClaimChange] = []
    source.store(A, 1, stored([7]), 0, out)
    source.remove(A, 2, removed([7]), out)
    source.store(A, 3, stored([6, 7]), 0, out)
    copy.take_page(source.page(A, KEY, -1), 0, 0, out)
    out.clear()
    copy.store(A, 1, stored([7]), 0, out, replayed=True)
    copy.remove(A, 2, removed([7]), out, replayed=True)
    copy.clear(A, 2, None, out, replayed=True)
    assert out == [] and held(copy) == held(source) == {block(6): 6, block(7): 7}


def test_a_page_of_a_replica_that_is_further_behind_takes_nothing_back() -> None:
    """As when a second synchronisation goes on after a first that was given up."""
    behind, copy = ClaimTable(), ClaimTable()
    out: list[ClaimChange] = []
    for table in (behind, copy):
        table.store(A, 5, stored([6, 7]), 0, out)
    copy.store(A, 9, stored([7, 8]), 0, out)
    moved = held(copy)
    out.clear()
    copy.take_page(behind.page(A, KEY, -1), 5, 0, out)
    assert out == [] and held(copy) == moved
    copy.check()


def test_what_is_dropped_is_unreadable_at_once_and_freed_in_small_steps() -> None:
    table = table_of(3 * SPLIT_AT)
    out: list[ClaimChange] = []
    table.drop_holder(A, out)
    assert out == [HolderDropped(A)]
    assert table.size == 0 and list(table.rows()) == []
    sizes = []
    while table._garbage:
        before = sum(map(len, table._garbage))
        table.sweep(500)
        sizes.append(before - sum(map(len, table._garbage)))
    assert sum(sizes) == 3 * SPLIT_AT and max(sizes) < 1_000
    table.drop_holder(A, out)
    assert len(out) == 1


def test_a_purge_names_everything_that_goes() -> None:
    table = table_of(2 * SPLIT_AT)
    out: list[ClaimChange] = []
    table.store(A, 1_000, stored([7], epoch=0), 0, out)
    out.clear()
    table.drop_below(NAMESPACE.digest, 1, out)
    gone = [name for change in out if isinstance(change, ClaimsRemoved) for name in change.hashes]
    assert sorted(gone) == sorted(block(i) for i in range(2 * SPLIT_AT))
    table.store(A, 1_001, stored([1], epoch=0), 1, out)
    assert table.size == 0, "a store that did not follow the purge"
    table.store(A, 1_002, stored([1], epoch=1), 1, out)
    assert table.size == 1
    table.check()


def test_a_removal_names_only_what_was_there() -> None:
    table = table_of(4)
    out: list[ClaimChange] = []
    table.remove(A, 9, removed([2, 3, 4, 5]), out)
    (change,) = out
    assert isinstance(change, ClaimsRemoved) and pack_hashes(change.hashes) == pack_hashes([block(2), block(3)])
    table.remove(life("b"), 9, removed([2]), out)
    assert len(out) == 1
