"""Each verdict has a story that leads to it."""

from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.events import RemovalReason, Tier
from kv_prefix.explain import Explainer, RemovalLog, Verdict, differing_fields
from kv_prefix.prefix_index import Holder, PrefixIndex
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES

NS, OTHER = NAMESPACES
TOKENS = list(range(4 * BLOCK_SIZE + 1))
NAMES = hash_tokens(NS, TOKENS)
PEER = Holder(NodeId("peer"), Incarnation(3))


class Node:
    def __init__(self, num_slots: int = 8) -> None:
        self.pool = BlockPool(num_slots, BLOCK_SIZE, region=RegionId(0))
        self.log = RemovalLog()
        self.index = PrefixIndex()

    def store(self, num_blocks: int, namespace: Namespace = NS) -> None:
        opened = self.pool.open("request", None, num_blocks)
        tokens = TOKENS[: num_blocks * BLOCK_SIZE]
        self.pool.commit(opened.table, namespace.digest, 0, hash_tokens(namespace, tokens), tokens)
        self.pool.release(opened.table)
        self.log.record(self.pool.take_events(), 1)

    def verdicts(self, tokens: list[int] = TOKENS) -> list[Verdict]:
        explained = Explainer(self.pool, self.log, self.index, NAMESPACES).explain(NS, tokens)
        assert [block.block_idx for block in explained] == list(range(len(explained)))
        return [block.verdict for block in explained]


def test_hits_then_never_seen() -> None:
    node = Node()
    node.store(2)
    assert node.verdicts() == [Verdict.HIT, Verdict.HIT, Verdict.NEVER_SEEN, Verdict.NEVER_SEEN]


def test_the_block_of_the_last_token_is_left_to_compute() -> None:
    node = Node()
    node.store(4)
    assert node.verdicts(TOKENS[:-1]) == [Verdict.HIT] * 3 + [Verdict.LAST_TOKEN]


def test_evicted_says_when_and_for_whom() -> None:
    node = Node(4)
    node.store(4)
    table = node.pool.open("request big", None, 1).table
    node.log.record(node.pool.take_events(), 1_766_000_000_250_999_999)
    node.pool.append(table, 1)
    node.log.record(node.pool.take_events(), 1_766_000_001_000_000_000)
    explained = Explainer(node.pool, node.log).explain(NS, TOKENS)
    assert [block.verdict for block in explained] == [Verdict.HIT] * 2 + [Verdict.EVICTED] * 2
    assert [block.detail for block in explained[2:]] == [
        "at 2025-12-17T19:33:21.000+00:00: request big needed its slot",
        "at 2025-12-17T19:33:20.250+00:00: request big needed its slot",
    ]
    node.pool.release(table)
    node.store(4)
    assert node.verdicts() == [Verdict.HIT] * 4


def test_what_went_ahead_of_need_or_for_a_copy_says_so() -> None:
    node = Node(4)
    node.store(4)
    node.pool.evict(1)
    node.log.record(node.pool.take_events(), 0)
    explained = Explainer(node.pool, node.log).explain(NS, TOKENS)
    assert explained[3].detail == "at 1970-01-01T00:00:00.000+00:00: room was made ahead of need"
    reader = node.pool.open("reader", node.pool.match(NS.digest, NAMES[:1], TOKENS[: BLOCK_SIZE + 1]), 1)
    writer = node.pool.fork(reader.table, "writer", BLOCK_SIZE + 1)
    node.log.record(node.pool.take_events(), 0)
    assert node.pool.prepare_append(writer.table, BLOCK_SIZE + 1) is not None
    node.log.record(node.pool.take_events(), 0)
    explained = Explainer(node.pool, node.log).explain(NS, TOKENS)
    assert explained[2].detail.endswith(": writer needed its slot")


def test_purged_and_check_failed() -> None:
    node = Node()
    node.store(4)
    node.pool.drop(NAMES[2], RemovalReason.CHECK_FAILED)
    node.log.record(node.pool.take_events(), 2)
    assert node.verdicts()[2:] == [Verdict.CHECK_FAILED] * 2
    node.pool.purge()
    node.log.record(node.pool.take_events(), 3)
    explained = Explainer(node.pool, node.log).explain(NS, TOKENS)
    assert [block.verdict for block in explained[:2]] == [Verdict.PURGED] * 2
    assert explained[0].detail.endswith(": its namespace was purged")
    assert [block.detail.partition(": ")[2] for block in explained[2:]] == [
        "its bytes were not what was sealed",
        "a block before it is gone",
    ]


def test_held_elsewhere_and_behind_a_gap() -> None:
    node = Node()
    node.store(1)
    node.index.stored(PEER, Tier.HOST, NAMES[:2])
    node.index.stored(PEER, Tier.HOST, NAMES[3:])
    assert node.verdicts() == [Verdict.HIT, Verdict.REMOTE, Verdict.NEVER_SEEN, Verdict.AFTER_GAP]


def test_lost_with_its_holder() -> None:
    node = Node()
    node.index.stored(PEER, Tier.HOST, NAMES)
    node.index.remove_holder(PEER)
    while node.index.sweep():
        pass
    assert node.verdicts() == [Verdict.HOLDER_LOST] * 4


def test_held_in_another_namespace_names_the_field_and_not_the_salt() -> None:
    node = Node()
    node.store(1, OTHER)
    (first, *_) = Explainer(node.pool, node.log, None, NAMESPACES).explain(NS, TOKENS)
    assert first.verdict is Verdict.OTHER_NAMESPACE
    assert first.detail == "held where salt differ"
    assert differing_fields(NS, Namespace("model", "v2", salt="x", block_size=BLOCK_SIZE)) == [
        "weights_revision",
        "salt",
    ]
    (first, *_) = Explainer(node.pool, node.log).explain(NS, TOKENS)
    assert first.verdict is Verdict.NEVER_SEEN


def test_a_hash_held_with_other_tokens_is_a_collision() -> None:
    node = Node()
    opened = node.pool.open("request", None, 1)
    node.pool.commit(opened.table, NS.digest, 0, NAMES[:1], [7] * BLOCK_SIZE)
    assert node.verdicts()[0] is Verdict.COLLISION


def test_explaining_changes_nothing() -> None:
    node = Node()
    node.store(2)
    before = node.pool.stats(), node.index.stats()
    node.verdicts()
    assert (node.pool.stats(), node.index.stats()) == before and node.pool.take_events() == []


def test_the_log_of_removals_is_bounded_and_forgets_the_oldest() -> None:
    node, log = Node(), RemovalLog(limit=2)
    node.store(4)
    node.pool.purge()
    log.record(node.pool.take_events(), 1)
    assert [log.get(name) is None for name in NAMES] == [False, False, True, True]
    assert log.get(BlockHash(b"?" * 16, 0)) is None
