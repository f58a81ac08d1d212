"""The entry register against a plain maximum, and its memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_consistency.entries import EntryTable, Outcome
from kv_consistency.update import UNOWNED, EntryWritten, OwnerEpoch
from kv_consistency.version_vector import Dot, VersionVector
from kv_core.ids import RequestId
from tests.consistency.helpers_consistency import NAMESPACE, life

ORIGINS = [life("a"), life("b")]
EPOCHS = [UNOWNED, OwnerEpoch(1, life("a")), OwnerEpoch(1, life("b")), OwnerEpoch(2, life("a"))]
Write = tuple[Dot, int, int, EntryWritten]


@st.composite
def writes(draw: st.DrawFn) -> list[Write]:
    out: list[Write] = []
    count = draw(st.integers(0, 12))
    for n in range(1, count + 1):
        op = EntryWritten(
            RequestId(draw(st.sampled_from(("r", "s")))),
            draw(st.sampled_from(EPOCHS)),
            0,
            draw(st.integers(0, 3)),
            draw(st.integers(0, 9)),
            (),
            NAMESPACE,
            draw(st.integers(0, 2)),
            draw(st.booleans()),
        )
        out.append((Dot(draw(st.sampled_from(ORIGINS)), n), draw(st.integers(0, 3)), draw(st.integers(0, 2)), op))
    return out


def order(write: Write) -> tuple[object, ...]:
    dot, wall, logical, op = write
    owner = op.epoch.owner
    return (
        op.epoch.number,
        ("", 0) if owner is None else (owner.node, owner.incarnation),
        op.ended,
        op.namespace_epoch,
        op.seq_len,
        wall,
        logical,
        dot,
    )


@settings(deadline=None)
@given(writes(), st.data())
def test_an_entry_is_the_greatest_write_in_whatever_order_they_come(run: list[Write], data: st.DataObject) -> None:
    table = EntryTable()
    for dot, wall, logical, op in data.draw(st.permutations([*run, *run[::2]])):
        table.apply(dot, wall, logical, op, 0)
        table.check()
    for request in ("r", "s"):
        mine = [write for write in run if write[3].request_id == request]
        row = table.get(RequestId(request))
        if not mine:
            assert row is None
            continue
        dot, wall, logical, op = max(mine, key=order)
        assert row is not None
        assert (row.dot, row.seq_len, row.checksum, row.ended) == (dot, op.seq_len, op.checksum, op.ended)
        assert (row.stamp.wall_ns, row.stamp.logical, row.purges) == (wall, logical, op.namespace_epoch)
        assert row.home.epoch == op.epoch


def test_an_ended_entry_is_kept_until_it_is_stable_and_remembered_after() -> None:
    table = EntryTable()
    name = RequestId("r")
    table.apply(Dot(life("a"), 1), 0, 0, EntryWritten(name, UNOWNED, 0, 5), 0)
    assert table.apply(Dot(life("a"), 2), 1, 0, EntryWritten(name, UNOWNED, 0, 5, ended=True), 0) is Outcome.ENDED
    table.collect(VersionVector({life("a"): 1}))
    assert table.size == 1 and not table.forgotten(name)
    assert table.apply(Dot(life("b"), 1), 9, 0, EntryWritten(name, UNOWNED, 0, 99), 0) is Outcome.LOST
    table.collect(VersionVector({life("a"): 2}))
    assert table.size == 0 and table.forgotten(name)
    table.check()


def test_rows_name_what_a_vector_does_not_cover() -> None:
    table = EntryTable()
    for i in range(50):
        table.apply(Dot(life("a"), i + 1), i, 0, EntryWritten(RequestId(f"r{i}"), UNOWNED, 0, i), 0)
    rows = [row for shard in range(table.num_shards) for row in table.rows(shard, VersionVector({life("a"): 30}))]
    assert sorted(row.dot.n for row in rows) == list(range(31, 51))
    again = EntryTable()
    for row in rows:
        again.apply(row.dot, row.wall_ns, row.logical, row.entry, 0)
    assert all(again.get(row.entry.request_id) == table.get(row.entry.request_id) for row in rows)
