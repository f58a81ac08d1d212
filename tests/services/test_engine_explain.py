"""What is said of a prompt's blocks at a followed engine: each verdict has a story, and the truth is a plain walk."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.hashing import hash_tokens, token_bytes
from kv_core.ids import Incarnation, NodeId
from kv_core.namespace import Namespace
from kv_prefix.events import Tier
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.kv_events import follow_state
from kv_services.kv_events.engine_explain import EngineBlock, EngineVerdict, explain_followed
from kv_services.kv_events.engine_record import EngineRecord, EventRef, Fate, Gone
from kv_services.kv_events.follow_state import AskReplay, Cleared, Effect, EngineFollower, Removed, Stored
from kv_services.kv_events.wire import AllBlocksCleared, BlockStored, KVEvent
from tests.services.helpers_kv_events import NS, SIZE, removed, stored, tokens

SALTED = Namespace("model", "weights", salt="another tenant", block_size=SIZE)
V = EngineVerdict


class Followed:
    """A follower and its index, without sockets; replays give what `log` has from `kept_from` on, or wait."""

    def __init__(self, namespace: Namespace = NS, loras: dict[str, str] | None = None) -> None:
        self.follower, self.index = EngineFollower(namespace, loras), PrefixIndex()
        self.holder = Holder(NodeId("vllm-1"), Incarnation(1))
        self.asked: list[int] = []

    def hear(self, number: int, *events: KVEvent, replayed: bool = False) -> None:
        self.perform(self.follower.batch(number, events, replayed=replayed, sent_s=1_766_000_000.25))

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Stored(tier, names):
                    self.index.stored(self.holder, tier, names, consecutive=True)
                case Removed(tier, names):
                    self.index.removed(self.holder, tier, names)
                case Cleared():
                    self.index.remove_holder(self.holder)
                    self.holder = Holder(self.holder.node, Incarnation(self.holder.incarnation + 1))
                case AskReplay(start):
                    self.asked.append(start)

    def explain(self, seed: int, blocks: int, namespace: Namespace = NS) -> list[EngineBlock]:
        prompt = token_bytes(tokens(seed, blocks))
        rows = list(explain_followed(self.holder, self.follower, self.index, namespace, prompt))
        assert [row.block_idx for row in rows] == list(range(blocks))
        assert [row.held for row in rows] == [row.verdict in (V.HELD, V.AFTER_GAP) for row in rows]
        return rows

    def verdicts(self, seed: int, blocks: int, namespace: Namespace = NS) -> list[EngineVerdict]:
        return [row.verdict for row in self.explain(seed, blocks, namespace)]


def test_held_removed_by_its_event_and_never_announced() -> None:
    one = Followed()
    one.hear(0, stored(1, 3))
    one.hear(1, removed(102))
    rows = one.explain(1, 4)
    assert [row.verdict for row in rows] == [V.HELD, V.HELD, V.REMOVED, V.NEVER_ANNOUNCED]
    assert [row.detail for row in rows[1:]] == [
        "vllm-1 has it in device",
        "event 1, sent 2025-12-17T19:33:20.250+00:00 by its own clock",
        "no trace of it in 2 batches",
    ]
    one.hear(2, removed(100), stored(1, 3, first=2))
    assert one.verdicts(1, 3) == [V.REMOVED, V.AFTER_GAP, V.AFTER_GAP]
    assert one.explain(1, 2)[1].detail == "vllm-1 has it in device, but not every block before it"


def test_gone_from_one_medium_is_still_held_in_the_other() -> None:
    one = Followed()
    one.hear(0, stored(1, 1), stored(1, 1, medium="cpu"))
    assert one.explain(1, 1)[0].detail == "vllm-1 has it in device and host"
    one.hear(1, removed(100))
    assert one.explain(1, 1)[0].detail == "vllm-1 has it in host"
    one.hear(2, removed(100, medium="cpu"))
    assert one.explain(1, 1)[0].detail.startswith("event 2, ")


def test_cleared_says_by_which_event_and_what_was_never_there_says_since_when() -> None:
    one = Followed()
    one.hear(0, stored(1, 2))
    one.hear(1, AllBlocksCleared())
    rows = one.explain(1, 3)
    assert [row.verdict for row in rows] == [V.CLEARED, V.CLEARED, V.NEVER_ANNOUNCED]
    assert rows[0].detail.startswith("event 1, sent 2025")
    assert rows[2].detail.startswith("no trace of it since it cleared everything: event 1, ")
    one.hear(2, stored(1, 1))
    assert one.verdicts(1, 2) == [V.HELD, V.CLEARED]


def test_a_gap_is_told_of_while_its_replay_is_awaited_and_gone_with_it() -> None:
    one = Followed()
    one.hear(0, stored(1, 2))
    one.hear(4, stored(2, 1))
    assert one.asked == [0], "with the last one that is known"
    rows = one.explain(1, 3)
    assert [row.verdict for row in rows] == [V.HELD, V.HELD, V.MISSED]
    assert rows[0].detail == "vllm-1 has it in device; events 1-3 not here yet"
    assert rows[2].detail == "no trace of it; events 1-3 not here yet, and it may be told of there"
    # What waits behind the gap counts as not heard.
    assert one.verdicts(2, 1) == [V.MISSED]
    for number, event in ((1, stored(1, 3, first=2)), (2, removed(100)), (3, AllBlocksCleared())):
        one.hear(number, event, replayed=True)
    one.perform(one.follower.replay_ended())
    assert one.verdicts(1, 4) == [V.REMOVED, V.CLEARED, V.CLEARED, V.NEVER_ANNOUNCED]
    assert one.verdicts(2, 1) == [V.HELD]


def test_what_no_replay_gave_is_never_called_never_announced() -> None:
    one = Followed()
    one.hear(0, stored(1, 2), stored(3, 1))
    one.hear(1, removed(300))
    one.hear(3, stored(2, 1))
    one.perform(one.follower.replay_ended())
    rows = one.explain(1, 3)
    assert [row.verdict for row in rows] == [V.DROPPED, V.DROPPED, V.LOST]
    assert rows[0].detail.startswith("no replay gave event 2 (event 3, sent ")
    assert rows[2].detail == "no trace of it; no replay gave event 2, and it may be told of there"
    assert one.explain(3, 1)[0].detail.endswith("; no replay gave event 2 after that")
    # A block whose parent was lost is told of, and cannot be named.
    one.hear(4, stored(1, 3, first=2))
    assert one.verdicts(1, 3)[2] is V.LOST
    # An engine that cleared everything holds nothing of the lost events either.
    one.hear(5, AllBlocksCleared())
    assert one.verdicts(5, 1) == [V.NEVER_ANNOUNCED]


def test_an_engine_that_begins_anew_has_its_former_ends_told_as_such() -> None:
    one = Followed()
    one.hear(0, stored(1, 2))
    one.hear(1, removed(101))
    one.hear(2, stored(2, 1))
    one.hear(0, stored(4, 1))
    rows = one.explain(1, 2)
    assert [row.verdict for row in rows] == [V.DROPPED, V.REMOVED]
    assert rows[0].detail.startswith("after event 2 came event 0: it begins anew (event 0, sent ")
    assert rows[1].detail.startswith("before it began anew: event 1, sent ")
    one.perform(one.follower.replay_ended())
    assert one.verdicts(4, 1) == [V.HELD] and one.verdicts(5, 1) == [V.NEVER_ANNOUNCED]


def test_blocks_without_a_known_parent_leave_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_state, "MAX_KNOWN", 3)
    one = Followed()
    one.hear(0, stored(1, 2))
    one.hear(1, stored(2, 2))
    assert one.explain(1, 1)[0].detail.startswith("it told of more than 3 blocks (event 1, ")
    one.hear(2, stored(1, 3, first=2))
    rows = one.explain(1, 3)
    assert rows[2].verdict is V.LOST
    assert rows[2].detail.startswith("no trace of it; it may be among blocks without a known parent: event 2, ")


def test_of_two_blocks_under_one_hash_the_former_is_not_listed_any_more() -> None:
    one = Followed()
    one.hear(0, stored(1, 1), stored(1, 1, medium="cpu"))
    same_hash = BlockStored(block_hashes=[100], token_ids=tokens(2, 1), block_size=SIZE)
    one.hear(1, same_hash)
    (row,) = one.explain(1, 1)
    assert row.verdict is V.DROPPED and row.detail.startswith(
        "the engine told of another block under its hash (event 1, "
    )
    assert one.verdicts(2, 1) == [V.HELD]
    one.hear(2, removed(100))
    assert one.verdicts(2, 1) == [V.REMOVED] and one.verdicts(1, 1) == [V.DROPPED]


def test_nothing_heard_is_not_never_announced() -> None:
    assert Followed().verdicts(1, 1) == [V.UNHEARD]


def test_another_namespace_names_the_field_and_not_the_salt() -> None:
    one = Followed(SALTED)
    one.hear(0, stored(1, 1))
    (row,) = one.explain(1, 1)
    assert row.verdict is V.OTHER_NAMESPACE and row.detail == "vllm-1 holds it where salt differ"
    assert one.verdicts(1, 1, SALTED) == [V.HELD]
    adapted = Followed(NS, {"adapter": "1"})
    adapted.hear(0, stored(1, 1, lora_name="adapter", lora_id=1), stored(2, 1, lora_name="unknown", lora_id=2))
    (row,) = adapted.explain(1, 1)
    assert row.verdict is V.OTHER_NAMESPACE
    assert row.detail == "vllm-1 holds it where lora_name and lora_revision differ"
    assert adapted.explain(2, 1)[0].detail.endswith(
        "; 1 stores of other block sizes, adapters or contents were left out"
    )


def test_another_engine_or_node_does_not_answer_for_it() -> None:
    one = Followed()
    one.hear(0, stored(2, 1))
    one.index.stored(Holder(NodeId("vllm-2"), Incarnation(1)), Tier.HOST, hash_tokens(NS, tokens(1, 2)))
    assert one.verdicts(1, 2) == [V.NEVER_ANNOUNCED] * 2


events = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("grow"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=200)
@given(events)
def test_with_every_event_heard_the_verdicts_are_those_of_a_plain_walk(drawn: list[tuple[str, int, int]]) -> None:
    one, held, ended = Followed(), set[int](), dict[int, tuple[EngineVerdict, int]]()
    for number, (kind, seed, count) in enumerate(drawn):
        event: KVEvent
        match kind:
            case "store":
                event, new = stored(seed, count), set(range(seed * 100, seed * 100 + count))
            case "grow" if seed * 100 in held:
                event, new = stored(seed, 1 + count, first=1), set(range(seed * 100 + 1, seed * 100 + 1 + count))
            case "remove":
                event, new = removed(seed * 100 + count), set()
                if seed * 100 + count in held:
                    ended[seed * 100 + count] = V.REMOVED, number
                held.discard(seed * 100 + count)
            case _:
                event, new = AllBlocksCleared(), set()
                ended |= dict.fromkeys(held, (V.CLEARED, number))
                held.clear()
        held |= new
        one.hear(number, event)
    for seed in range(4):
        run = next((i for i in range(4) if seed * 100 + i not in held), 4)
        for row in one.explain(seed, 4):
            block = seed * 100 + row.block_idx
            if block in held:
                assert row.verdict is (V.HELD if row.block_idx < run else V.AFTER_GAP)
            elif block in ended:
                verdict, number = ended[block]
                assert row.verdict is verdict and row.detail.startswith(f"event {number}, ")
            else:
                assert row.verdict is (V.NEVER_ANNOUNCED if drawn else V.UNHEARD)


@settings(max_examples=200)
@given(st.data())
def test_never_announced_is_said_only_when_no_event_told_of_it(data: st.DataObject) -> None:
    """Any subset of the events arrives, in any order; replays give a part, nothing, or are still awaited."""
    log: list[KVEvent] = [stored(seed, 2) for seed in range(6)]
    one = Followed()
    for number in data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True, max_size=6)):
        one.hear(number, log[number])
        if data.draw(st.booleans()) and one.follower.gap is not None:
            for given_back in range(data.draw(st.integers(0, 5)), 6):
                one.hear(given_back, log[given_back], replayed=True)
            one.perform(one.follower.replay_ended())
    highest = max(n for n in range(6) if one.follower._next > n or n in one.follower._waiting)
    for seed in range(highest + 1):
        assert not {V.NEVER_ANNOUNCED, V.UNHEARD} & set(one.verdicts(seed, 2)), seed


def gone(number: int, fate: Fate = Fate.REMOVED) -> Gone:
    return Gone(fate, EventRef(1, number, 0.0))


def test_the_record_is_bounded_keeps_the_latest_and_says_that_it_forgot() -> None:
    record = EngineRecord(limit=4)
    for number in range(4):
        record.removed(bytes([number]), gone(number))
    assert len(record) == 4 and not record.forgot
    record.removed(bytes([0]), gone(9))
    forgot_before = record.forgot
    record.removed(bytes([8]), gone(11))
    assert (forgot_before, record.forgot) == (False, True) and len(record) == 4 and record.get(bytes([1])) is None
    assert record.get(bytes([0])) == gone(9)
    whole = gone(12, Fate.CLEARED)
    record.all_gone({n: bytes([n]) for n in range(100, 110)}, bytes, whole)
    assert len(record) == 4 and record.get(bytes([109])) == whole and record.get(bytes([105])) is None


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("removed"), st.integers(0, 9)),
            st.tuples(st.just("all"), st.lists(st.integers(0, 9), unique=True)),
            st.tuples(st.just("tidy"), st.integers(0, 5)),
            st.tuples(st.just("get"), st.integers(0, 9)),
        ),
        max_size=30,
    ),
    st.sampled_from((4, 1_000)),
)
def test_ends_that_are_written_down_in_parts_are_those_that_were_told_of(
    acts: list[tuple[str, object]], limit: int
) -> None:
    record, truth = EngineRecord(limit=limit, at_once=2), dict[bytes, Gone]()
    for number, act in enumerate(acts):
        match act:
            case "removed", int(name):
                truth[bytes([name])] = gone(number)
                record.removed(bytes([name]), gone(number))
            case "all", list(names):
                truth |= {bytes([name]): gone(number, Fate.CLEARED) for name in names}
                record.all_gone({name: bytes([name]) for name in names}, bytes, gone(number, Fate.CLEARED))
            case "tidy", int(count):
                record.tidy(count)
            case _, name:
                assert isinstance(name, int)
                found = record.get(bytes([name]))
                assert found == truth.get(bytes([name])) or (found is None and record.forgot)
        assert len(record) <= limit
    while record.tidy(3):
        pass
    assert all(record.get(name) == end or record.forgot for name, end in truth.items())
    if truth:
        # Whatever was forgotten, the latest end is not among it.
        end = max(truth.values(), key=lambda one: one.event.sequence)
        assert any(record.get(key) == end for key, other in truth.items() if other == end)


def test_an_engine_that_clears_many_blocks_has_them_let_go_of_in_parts() -> None:
    """What is kept goes by when it ended: what is written down late does not push out what ended after it."""
    one = Followed()
    one.follower.record = record = EngineRecord(limit=6, at_once=2)
    one.hear(0, stored(1, 8))
    one.hear(1, AllBlocksCleared())
    one.hear(2, stored(2, 3))
    one.hear(3, removed(200), removed(201))
    assert len(record) == 2 and record.tidy(3) and len(record) == 5
    assert [row.verdict for row in one.explain(1, 8)] == [V.NEVER_ANNOUNCED] * 4 + [V.CLEARED] * 4
    assert one.verdicts(2, 3) == [V.REMOVED, V.REMOVED, V.AFTER_GAP]
    assert len(record) == 6 and record.tidy(3) and not record.tidy(3) and len(record) == 6
    one.hear(4, removed(202))
    # Of those that ended together the ones that were told of first are forgotten first.
    assert one.verdicts(1, 8) == [V.NEVER_ANNOUNCED] * 5 + [V.CLEARED] * 3 and len(record) == 6


def test_what_is_forgotten_is_said_beside_never_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Followed()
    one.follower.record = EngineRecord(limit=2)
    one.hear(0, stored(1, 3))
    one.hear(1, AllBlocksCleared())
    rows = one.explain(1, 3)
    assert [row.verdict for row in rows] == [V.NEVER_ANNOUNCED, V.CLEARED, V.CLEARED]
    assert rows[0].detail.endswith(", or one too old to be remembered")


@pytest.mark.parametrize("sent_s", [math.nan, math.inf, -math.inf, 1e300, -1e18])
def test_any_time_that_a_peer_sends_can_be_told(sent_s: float) -> None:
    assert str(EventRef(1, 2, sent_s)).startswith("event 2, sent ")
