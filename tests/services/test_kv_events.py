"""KV events in vLLM's form: the state of a followed engine against plain sets, then both ends over real sockets."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bus.ports import pick_ports
from kv_core.clock import SystemClock
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.events import Tier
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.kv_events import follow, follow_state, publish
from kv_services.kv_events.follow import ASKS_MAX, EngineEvents
from kv_services.kv_events.follow_state import AskReplay, Cleared, Effect, EngineFollower, Removed, Stored
from kv_services.kv_events.publish import EventPublisher, EventsBindError
from kv_services.kv_events.wire import (
    AllBlocksCleared,
    BadEventError,
    BlockStored,
    EventBatch,
    KVEvent,
    decode_batch,
    encode_batch,
)
from tests.services.helpers_kv_events import NS, SIZE, removed, stored, tokens


class Engine:
    """An engine with its log, a follower, and what the follower's effects make of an index."""

    def __init__(self) -> None:
        self.follower = EngineFollower(NS, {"adapter": "1"})
        self.log: list[Sequence[KVEvent]] = []
        self.held: set[tuple[Tier, bytes]] = set()
        self.asked = 0
        self.began_s = 0.0

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Stored(tier, names):
                    self.held |= {(tier, name.sequence) for name in names}
                case Removed(tier, names):
                    self.held -= {(tier, name.sequence) for name in names}
                case Cleared():
                    self.held.clear()
                case AskReplay(start):
                    self.asked += 1
                    self.replay(start)

    def replay(self, start: int) -> None:
        for number in range(start, len(self.log)):
            sent_s = self.began_s + number
            self.perform(self.follower.batch(number, self.log[number], replayed=True, sent_s=sent_s))
        self.perform(self.follower.replay_ended())

    def hear(self, number: int) -> None:
        self.perform(self.follower.batch(number, self.log[number], sent_s=self.began_s + number))

    def truth(self) -> set[tuple[Tier, bytes]]:
        """What a follower that heard everything in order knows."""
        twin = Engine()
        twin.log = self.log
        for number in range(len(self.log)):
            twin.hear(number)
        assert twin.asked == 0
        return twin.held


@settings(max_examples=80)
@given(st.data())
def test_whatever_is_lost_or_comes_twice_the_end_state_is_the_truth(data: st.DataObject) -> None:
    engine = Engine()
    for seed in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12)):
        kind = data.draw(st.sampled_from(["store", "grow", "remove", "clear"]))
        event: KVEvent = stored(seed, 2)
        if kind == "grow":
            event = stored(seed, 4, first=2)
        elif kind == "remove":
            event = removed(seed * 100 + 1)
        elif kind == "clear":
            event = AllBlocksCleared()
        engine.log.append([event])
    delivered = data.draw(st.lists(st.integers(0, len(engine.log) - 1), max_size=20))
    for number in [*delivered, len(engine.log) - 1]:
        engine.hear(number)
    assert engine.held == engine.truth()


def test_a_hole_is_recovered_once_before_the_first_event_and_later() -> None:
    engine = Engine()
    engine.log = [[stored(seed, 2)] for seed in range(10)]
    for number in (3, 4, 5, 7, 8):
        engine.hear(number)
    assert engine.asked == 1  # the first replay gave everything that there was
    assert engine.held == engine.truth()
    engine.log += [[removed(100)], [stored(20, 3)], [removed(101)]]
    engine.hear(11)
    engine.hear(12)
    assert engine.asked == 2 and engine.held == engine.truth()


def test_an_old_store_delivered_late_does_not_bring_a_block_back() -> None:
    engine = Engine()
    engine.log = [[stored(1, 1)], [removed(100)], [stored(2, 1)]]
    for number in (0, 1, 2, 0):
        engine.hear(number)
    assert engine.held == engine.truth()
    assert {sequence for _, sequence in engine.held} == {hash_tokens(NS, tokens(2, 1))[0].sequence}


def test_what_a_replay_cannot_give_is_dropped_not_guessed() -> None:
    follower = EngineFollower(NS)
    assert follower.batch(0, [stored(1, 2)])
    assert follower.batch(5, [stored(2, 1)]) == [AskReplay(0)]
    effects = follower.replay_ended()
    assert effects[0] == Cleared() and isinstance(effects[1], Stored)
    assert follower.stats.resets == 1
    # A child whose parent went with it is not entered.
    assert follower.batch(6, [stored(1, 3, first=2)]) == []
    assert follower.stats.orphans == 1


def test_an_engine_that_begins_anew_is_followed_anew() -> None:
    engine = Engine()
    engine.log = [[stored(seed, 1)] for seed in range(5)]
    for number in range(5):
        engine.hear(number)
    engine.log = [[stored(8, 1)], [stored(9, 1)]]
    engine.hear(1)
    assert engine.held == engine.truth() and len(engine.held) == 2


@pytest.mark.parametrize("number", [4, 5, 8])
def test_a_new_life_whose_numbers_go_on_is_told_by_the_time_of_an_event_that_is_known(number: int) -> None:
    """Whoever was cut off while an engine restarted hears of it when its new numbers have passed the old ones."""
    engine = Engine()
    engine.log = [[stored(seed, 1)] for seed in range(5)]
    for old in range(5):
        engine.hear(old)
    engine.log, engine.began_s = [[stored(seed, 1)] for seed in range(20, 20 + number + 1)], 1_000.0
    if number == 5:
        # Nothing is missing then: it is asked because the connection broke. The answer may come after the next event.
        asked = engine.follower.reconnected()
        engine.hear(number)
        assert asked == [AskReplay(4)] and engine.asked == 0
        engine.perform(asked)
    else:
        engine.hear(number)
    assert engine.held == engine.truth()


def test_the_same_engine_in_reach_again_costs_one_question_and_nothing_that_is_known() -> None:
    engine = Engine()
    engine.perform(engine.follower.reconnected())
    assert engine.asked == 0
    engine.log, engine.began_s = [[stored(seed, 1)] for seed in range(5)], 1_000.0
    for number in range(4):
        engine.hear(number)
    engine.perform(engine.follower.reconnected())
    assert engine.asked == 1 and engine.held == engine.truth() and engine.follower.stats.resets == 0


def test_a_time_that_is_no_number_makes_no_event_another() -> None:
    follower = EngineFollower(NS)
    first, again = (follower.batch(0, [stored(1, 1)], sent_s=math.nan) for _ in range(2))
    assert first and again == [] and follower.stats.duplicates == 1


def test_the_end_of_one_replay_is_not_taken_for_that_of_another() -> None:
    new = [[stored(seed, 1)] for seed in range(20, 29)]
    follower, asked = EngineFollower(NS), list[Effect]()
    for number in range(5):
        follower.batch(number, [stored(number, 1)], sent_s=number)
    asked += follower.batch(8, new[8], sent_s=108.0)
    for number in range(4, 9):
        asked += follower.batch(number, new[number], replayed=True, sent_s=100.0 + number)
    assert [effect for effect in asked if isinstance(effect, AskReplay)] == [AskReplay(4), AskReplay(0)]
    assert follower.replay_ended() == []
    effects = [
        effect
        for number in range(9)
        for effect in follower.batch(number, new[number], replayed=True, sent_s=100.0 + number)
    ]
    assert len(effects) == 9 and all(isinstance(effect, Stored) for effect in effects)
    assert follower.replay_ended() == [] and follower.num_replays == follower.stats.resets == 0


def test_an_engine_out_of_reach_holds_nothing_and_is_heard_as_at_first_when_it_is_back() -> None:
    engine = Engine()
    engine.perform(engine.follower.unreachable())
    engine.log = [[stored(seed, 1)] for seed in range(5)]
    for number in range(5):
        engine.hear(number)
    engine.perform(engine.follower.unreachable())
    assert engine.held == set()
    engine.log += [[removed(0)], [stored(7, 2)]]
    engine.hear(6)
    assert engine.held == engine.truth() and engine.asked == 1


def test_tiers_adapters_and_absent_extra_keys() -> None:
    follower = EngineFollower(NS, {"adapter": "1"})
    (cpu,) = follower.batch(0, [stored(1, 1, medium="cpu", extra_keys=None)])
    assert cpu == Stored(Tier.HOST, tuple(hash_tokens(NS, tokens(1, 1))))
    (gpu,) = follower.batch(1, [stored(1, 1, medium="GPU")])
    assert isinstance(gpu, Stored) and gpu.tier is Tier.DEVICE
    # Gone from one medium, still in the other.
    assert follower.batch(2, [removed(100, medium="GPU")]) == [Removed(Tier.DEVICE, cpu.names)]
    (lora,) = follower.batch(3, [stored(5, 1, lora_name="adapter", lora_id=1, extra_keys=[["adapter"]])])
    adapted = Namespace("model", "weights", lora_name="adapter", lora_revision="1", block_size=4)
    assert lora == Stored(Tier.DEVICE, tuple(hash_tokens(adapted, tokens(5, 1))))
    assert follower.batch(4, [stored(6, 1, lora_name="unknown", lora_id=2)]) == []
    assert follower.batch(5, [stored(7, 1, extra_keys=[["a picture's digest"]])]) == []


def test_the_form_is_that_of_the_engines_and_nonsense_is_refused() -> None:
    batch = EventBatch(1.5, [stored(1, 1, medium="cpu"), removed(7), AllBlocksCleared()], 0)
    plain = msgspec.msgpack.decode(encode_batch(batch))
    assert plain[0] == 1.5 and plain[2] == 0
    assert [event["type"] for event in plain[1]] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert plain[1][0]["token_ids"] == [1000, 1001, 1002, 1003] and plain[1][0]["block_hashes"] == [100]
    # Without a rank, with fields that are new, with hashes as bytes.
    foreign = [2.0, [plain[1][0] | {"group_idx": 3, "block_hashes": [b"\x01" * 32]}]]
    (event,) = decode_batch(msgspec.msgpack.encode(foreign)).events
    assert isinstance(event, BlockStored) and event.block_hashes == [b"\x01" * 32]
    random = Random(1)
    for raw in (b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "Other"}]]), random.randbytes(400)):
        with pytest.raises(BadEventError):
            decode_batch(raw)


async def test_a_follower_of_a_node_knows_what_the_node_holds_also_from_the_middle_on() -> None:
    """Both ends over sockets: the follower comes late, so its first event shows a hole."""
    events, replay = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
    secret = Namespace("model", "weights", salt="another tenant", block_size=4)
    publisher = EventPublisher(events, replay, SIZE, SystemClock(), lambda digest: digest == NS.digest)
    pool = BlockPool(8, SIZE, region=RegionId(1))

    def compute(namespace: Namespace, seed: int, blocks: int) -> list[BlockHash]:
        names = hash_tokens(namespace, tokens(seed, blocks))
        opened = pool.open("r", None, blocks)
        pool.commit(opened.table, namespace.digest, 0, names, tokens(seed, blocks))
        pool.release(opened.table)
        publisher.pool_events(pool.take_events())
        return names

    index = PrefixIndex()
    follower = EngineEvents(Holder(NodeId("node"), Incarnation(1)), events, replay, EngineFollower(NS), index)
    loop = asyncio.get_running_loop()
    await publisher.start()
    running = [loop.create_task(publisher.run())]
    try:
        early, hidden = compute(NS, 1, 3), compute(secret, 2, 2)
        await follower.start()
        running.append(loop.create_task(follower.run()))
        latest = early
        async with asyncio.timeout(20):
            for seed in itertools.count(3):
                # Blocks of before are evicted as others come.
                latest = compute(NS, seed, 3)
                await asyncio.sleep(0.05)
                if index.lookup(latest):
                    break
        held = {block.sequence for event in pool.snapshot() for block in event.block_hashes}
        for names in (early, hidden, latest):
            expected = sum(name.sequence in held for name in names) if names is not hidden else 0
            found = index.lookup(names)
            assert (found[0].num_blocks if found else 0) == expected
        assert follower.follower.stats.recoveries == 1 and follower.refused == 0
    finally:
        await publisher.close()
        await follower.close()
        await asyncio.gather(*running)


async def test_what_an_engine_held_that_is_gone_is_dropped_and_one_that_is_soon_back_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody hears of a crash in events: what a dead engine held would be listed for ever."""
    monkeypatch.setattr(follow, "GONE_S", 300.0)
    events, replay = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
    index = PrefixIndex()
    names = hash_tokens(NS, tokens(1, 2))
    follower = EngineEvents(Holder(NodeId("node"), Incarnation(1)), events, replay, EngineFollower(NS), index)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - sockets know no event of ours
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def engine() -> AsyncIterator[EventPublisher]:
        publisher = EventPublisher(events, replay, SIZE, SystemClock(), lambda digest: True)
        await publisher.start()
        running = asyncio.create_task(publisher.run())
        try:
            yield publisher
        finally:
            await publisher.close()
            await running

    def heard(publisher: EventPublisher) -> bool:
        pool = BlockPool(8, SIZE, region=RegionId(1))
        opened = pool.open("r", None, 2)
        pool.commit(opened.table, NS.digest, 0, names, tokens(1, 2))
        publisher.pool_events(pool.take_events())
        return bool(index.lookup(names))

    await follower.start()
    running = asyncio.create_task(follower.run())
    try:
        async with engine() as publisher:
            await until(lambda: heard(publisher))
        await until(lambda: follower._gone_at is not None)
        async with engine():
            await until(lambda: follower._gone_at is None)
            assert index.lookup(names)[0].num_blocks == 2
            monkeypatch.setattr(follow, "GONE_S", 0.0)
        await until(lambda: not index.lookup(names))
        async with engine() as publisher:
            await until(lambda: heard(publisher))
    finally:
        await follower.close()
        await running


async def test_an_address_in_use_is_one_error_that_names_it() -> None:
    events, replay, other = (f"tcp://127.0.0.1:{port}" for port in pick_ports(3))
    first = EventPublisher(events, replay, SIZE, SystemClock(), lambda digest: True)
    await first.start()
    second = EventPublisher(other, replay, SIZE, SystemClock(), lambda digest: True)
    try:
        with pytest.raises(EventsBindError, match=f"{replay}: Address already in use"):
            await second.start()
    finally:
        await second.close()
        await first.close()


async def test_a_replay_of_everything_is_given_in_slices_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ask for it at once, so each is answered between the other's slices."""
    monkeypatch.setattr(publish, "BATCHES_A_TURN", 7)
    events, replay = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
    publisher = EventPublisher(events, replay, SIZE, SystemClock(), lambda digest: True)
    await publisher.start()
    pool = BlockPool(1024, SIZE, region=RegionId(1))

    def compute(seed: int) -> list[BlockHash]:
        names = hash_tokens(NS, tokens(seed, 1))
        opened = pool.open("r", None, 1)
        pool.commit(opened.table, NS.digest, 0, names, tokens(seed, 1))
        pool.release(opened.table)
        publisher.pool_events(pool.take_events())
        return names

    early = [compute(seed) for seed in range(100)]
    running = [asyncio.create_task(publisher.run())]
    indexes = [PrefixIndex(), PrefixIndex()]
    followers = [
        EngineEvents(Holder(NodeId("node"), Incarnation(1)), events, replay, EngineFollower(NS), index)
        for index in indexes
    ]
    try:
        for one in followers:
            await one.start()
            running.append(asyncio.create_task(one.run()))
        async with asyncio.timeout(20):
            for seed in itertools.count(100):
                # What comes now shows a follower that what came before is missing.
                compute(seed)
                await asyncio.sleep(0.05)
                if all(index.lookup(names) for index in indexes for names in early):
                    break
    finally:
        for one in followers:
            await one.close()
        await publisher.close()
        await asyncio.gather(*running)


async def test_an_engine_that_answers_no_replay_stops_nobody() -> None:
    events, nowhere = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
    one = EngineEvents(Holder(NodeId("node"), Incarnation(1)), events, nowhere, EngineFollower(NS), PrefixIndex())
    await one.start()
    try:
        for number in range(3 * ASKS_MAX):
            one._perform([AskReplay(number)])
    finally:
        await one.close()


def test_what_is_remembered_of_an_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_state, "MAX_KNOWN", 10)
    follower = EngineFollower(NS)
    effects = [effect for n in range(40) for effect in follower.batch(n, [stored(n, 3)])]
    assert len(follower._known) <= 10 and follower.stats.resets > 1
    assert sum(isinstance(effect, Cleared) for effect in effects) == follower.stats.resets
