"""The causal buffer against a naive one that tries everything again after each arrival."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_consistency.causal_buffer import CausalBuffer, dots_of
from kv_consistency.update import Update
from kv_consistency.version_vector import Dot, Origin
from kv_core.ids import Incarnation, NodeId
from tests.consistency.helpers_consistency import life

ORIGINS = [life("a"), life("b"), life("c")]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Origin, Update]]:
    """Updates in an order in which they could have been issued, each depending on some issued before."""
    issued: list[tuple[Origin, Update]] = []
    counts = dict.fromkeys(ORIGINS, 0)
    for origin in draw(st.lists(st.sampled_from(ORIGINS), max_size=25)):
        others = [o for o in ORIGINS if o != origin and counts[o]]
        deps = [
            Dot(other, draw(st.integers(1, counts[other])))
            for other in (draw(st.lists(st.sampled_from(others), unique=True)) if others else [])
        ]
        counts[origin] += 1
        issued.append((origin, Update(counts[origin], 1, 0, (), tuple(deps))))
    return issued


class Naive:
    """Every arrival is kept; whatever can be applied is, over and over."""

    def __init__(self) -> None:
        self.applied: dict[Origin, int] = {}
        self.waiting: list[tuple[Origin, Update]] = []

    def offer(self, origin: Origin, update: Update) -> None:
        self.waiting.append((origin, update))
        progress = True
        while progress:
            progress = False
            for o, u in self.waiting:
                if u.n == self.applied.get(o, 0) + 1 and all(self.applied.get(d.origin, 0) >= d.n for d in u.deps):
                    self.applied[o] = u.n
                    progress = True


@settings(deadline=None)
@given(histories(), st.data())
def test_it_hands_out_what_a_naive_buffer_applies_once_and_in_causal_order(
    issued: list[tuple[Origin, Update]], data: st.DataObject
) -> None:
    arrivals = data.draw(st.permutations([*issued, *issued[::3]]))
    buffer, naive = CausalBuffer(), Naive()
    handed: list[Dot] = []
    for origin, update in arrivals:
        handed += dots_of(buffer.offer(origin, (update,)))
        naive.offer(origin, update)
        buffer.check()
        assert {o: buffer.applied(o) for o in naive.applied} == naive.applied
    assert len(set(handed)) == len(handed) == len(issued)
    updates = {Dot(origin, update.n): update for origin, update in issued}
    seen: set[Dot] = set()
    for dot in handed:
        assert dot.n == 1 or Dot(dot.origin, dot.n - 1) in seen
        assert seen.issuperset(updates[dot].deps)
        seen.add(dot)
    assert buffer.parked == 0 and buffer.parked_bytes == 0


@settings(deadline=None)
@given(histories(), st.data())
def test_batches_give_the_same_as_single_updates(issued: list[tuple[Origin, Update]], data: st.DataObject) -> None:
    arrivals: Sequence[tuple[Origin, Update]] = data.draw(st.permutations(issued))
    one, many = CausalBuffer(), CausalBuffer()
    position = 0
    while position < len(arrivals):
        origin = arrivals[position][0]
        size = data.draw(st.integers(1, 6))
        batch = [u for o, u in arrivals[position : position + size] if o == origin]
        rest = [(o, u) for o, u in arrivals[position : position + size] if o != origin]
        many.offer(origin, batch)
        for other, update in rest:
            many.offer(other, (update,))
        position += size
    for origin, update in arrivals:
        one.offer(origin, (update,))
    many.check()
    assert one.vector() == many.vector()


@settings(deadline=None)
@given(histories(), st.data(), st.integers(1, 4))
def test_a_full_buffer_drops_and_names_the_gap_and_ends_up_the_same(
    issued: list[tuple[Origin, Update]], data: st.DataObject, parked_max: int
) -> None:
    log: dict[Origin, list[Update]] = {}
    for origin, update in issued:
        log.setdefault(origin, []).append(update)
    buffer = CausalBuffer(parked_max=parked_max)
    for origin, update in data.draw(st.permutations(issued)):
        buffer.offer(origin, (update,))
        buffer.check()
    for origin, updates in log.items():
        buffer.note_head(origin, len(updates))
    rounds = 0
    while behind := buffer.behind():
        for origin in behind:
            gap = buffer.gap(origin)
            if gap is not None:
                buffer.offer(origin, log[origin][gap[0] - 1 : gap[1]])
                buffer.check()
        rounds += 1
        assert rounds <= len(issued) + 1, "every round makes progress"
    assert all(buffer.applied(origin) == len(updates) for origin, updates in log.items())


def update(n: int, *deps: Dot) -> Update:
    return Update(n, 1, 0, (), deps)


def test_a_gap_before_the_first_update_is_seen() -> None:
    buffer = CausalBuffer()
    buffer.offer(life("a"), (update(4),))
    assert buffer.gap(life("a")) == (1, 3)
    assert dots_of(buffer.offer(life("a"), (update(1), update(2), update(3)))) == [
        Dot(life("a"), n) for n in (1, 2, 3, 4)
    ]
    buffer.offer(life("a"), (update(6), update(9)))
    assert buffer.gap(life("a")) == (5, 5)
    assert buffer.gap(life("b")) is None


def test_a_dependency_that_is_missing_is_a_gap_of_its_origin() -> None:
    buffer = CausalBuffer()
    assert buffer.offer(life("a"), (update(1, Dot(life("b"), 3)),)) == []
    assert buffer.waits_for(life("a")) == Dot(life("b"), 3)
    assert buffer.gap(life("b")) == (1, 3)
    buffer.offer(life("b"), (update(1), update(2)))
    assert buffer.applied(life("a")) == 0
    assert dots_of(buffer.offer(life("b"), (update(3),))) == [Dot(life("b"), 3), Dot(life("a"), 1)]


def test_a_frozen_origin_hands_out_nothing_and_goes_on_above_its_base() -> None:
    buffer = CausalBuffer()
    buffer.offer(life("a"), (update(1),))
    buffer.freeze(life("a"), 5)
    assert buffer.offer(life("a"), (update(2), update(6))) == []
    assert buffer.available(life("a")) == 6
    assert dots_of(buffer.thaw(advance=True)) == [Dot(life("a"), 6)]
    assert buffer.applied(life("a")) == 6
    buffer.check()


def test_an_abandoned_freeze_goes_on_from_where_it_was() -> None:
    buffer = CausalBuffer()
    buffer.offer(life("a"), (update(1),))
    buffer.freeze(life("a"), 5)
    buffer.offer(life("a"), (update(6),))
    assert buffer.thaw(advance=False) == []
    assert buffer.gap(life("a")) == (2, 5)
    buffer.check()


def test_a_retired_life_counts_as_applied_by_whatever_depends_on_it() -> None:
    buffer = CausalBuffer()
    buffer.offer(life("b"), (update(1, Dot(life("a"), 9)),))
    gone, woken = buffer.retire(NodeId("a"), Incarnation(2))
    assert gone == [life("a")]
    assert dots_of(woken) == [Dot(life("b"), 1)]
    assert buffer.covers(Dot(life("a"), 9)) and not buffer.covers(Dot(life("a", 2), 1))
    assert not buffer.knows(life("a"))
    assert buffer.retire(NodeId("a"), Incarnation(2)) == ([], [])
    buffer.check()


def test_a_retired_life_of_which_nothing_is_known_any_more_lets_go_of_what_waits_for_it() -> None:
    """A life that is over is forgotten but for what waits for it; then everybody is found to have all of it."""
    buffer = CausalBuffer()
    buffer.offer(life("b"), (update(1, Dot(life("a"), 9)),))
    buffer.forget_parked(life("a"))
    assert not buffer.knows(life("a"))
    gone, woken = buffer.retire(NodeId("a"), Incarnation(2))
    assert gone == [life("a")]
    assert dots_of(woken) == [Dot(life("b"), 1)]
    assert buffer.applied(life("b")) == 1 and buffer.waits_for(life("b")) is None
    buffer.check()
