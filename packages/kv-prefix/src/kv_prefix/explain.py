"""Why did it miss? Block by block, where a match ended and for which reason.

Pure questions over what the pool, the index and a bounded log of removals know; explaining changes nothing. It says
what other namespaces hold, so it is for operators: whoever answers a tenant passes only namespaces that tenant may see.

X1: a block has one verdict, the first that applies in the order of `Verdict`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import Enum

from kv_core.hashing import TOKEN_BYTES, BlockHash, Extra, Tokens, hash_tokens, token_bytes
from kv_core.ids import NodeId
from kv_core.namespace import Namespace
from kv_prefix import limits
from kv_prefix.block_pool import BlockPool
from kv_prefix.events import BlockRemoved, PoolEvent, RemovalReason
from kv_prefix.in_flight import InFlight
from kv_prefix.prefix_index import PrefixIndex


class Verdict(Enum):
    """What became of one block of a prompt."""

    LAST_TOKEN = "left to compute"
    HIT = "hit"
    REMOTE = "held by another node"
    IN_FLIGHT = "being computed"
    AFTER_GAP = "held, but behind a gap"
    COLLISION = "other content holds its hash"
    EVICTED = "evicted"
    PURGED = "purged"
    CHECK_FAILED = "check failed"
    EXPIRED = "expired"
    HOLDER_LOST = "holder lost"
    OTHER_NAMESPACE = "held in another namespace"
    NEVER_SEEN = "never seen"


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """One block of the prompt: its verdict, and a sentence with the particulars."""

    block_idx: int
    block_hash: BlockHash
    verdict: Verdict
    detail: str
    holders: tuple[NodeId, ...] = ()


_CAUSES = {
    RemovalReason.EVICTED: "room was made ahead of need",
    RemovalReason.PURGED: "its namespace was purged",
    RemovalReason.CHECK_FAILED: "its bytes were not what was sealed",
    RemovalReason.PARENT_REMOVED: "a block before it is gone",
    RemovalReason.EXPIRED: "its time was over",
}


@dataclass(frozen=True, slots=True)
class Removal:
    """When a block went, why, and on whose behalf.

    Attributes:
        when_ns: on the wall.
        needed_by: of an evicted block, whoever was given its slot; empty when room was made ahead of need.
    """

    reason: RemovalReason
    when_ns: int
    needed_by: str = ""

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.when_ns // 1_000_000 / 1_000, UTC).isoformat(timespec="milliseconds")
        if self.reason is RemovalReason.EVICTED and self.needed_by:
            return f"at {when}: {self.needed_by} needed its slot"
        return f"at {when}: {_CAUSES[self.reason]}"


class RemovalLog:
    """The latest removals of one node, by block."""

    def __init__(self, limit: int = limits.MAX_REMOVAL_RECORDS) -> None:
        self._limit = limit
        self._removals: OrderedDict[bytes, Removal] = OrderedDict()

    def record(self, events: Iterable[PoolEvent], now_ns: int) -> None:
        """Remember the removals among a pool's events; `now_ns` is the wall's time."""
        for event in events:
            if isinstance(event, BlockRemoved):
                self._removals[event.block_hash.sequence] = Removal(event.reason, now_ns, event.needed_by)
                self._removals.move_to_end(event.block_hash.sequence)
        while len(self._removals) > self._limit:
            self._removals.popitem(last=False)

    def get(self, block_hash: BlockHash) -> Removal | None:
        """The last removal of a block, if it is remembered; the block may have come back since."""
        return self._removals.get(block_hash.sequence)


_OF_REASON = {
    RemovalReason.EVICTED: Verdict.EVICTED,
    RemovalReason.PURGED: Verdict.PURGED,
    RemovalReason.CHECK_FAILED: Verdict.CHECK_FAILED,
    RemovalReason.PARENT_REMOVED: Verdict.CHECK_FAILED,
    RemovalReason.EXPIRED: Verdict.EXPIRED,
}


class Explainer:
    """Explains prompts by what one node knows.

    Args:
        pool: the node's pool.
        removals: what went from it.
        index: the cluster's index, where the node has one.
        others: namespaces to look for the same tokens in.
        in_flight: what other nodes compute, where the node hears of it.
    """

    def __init__(
        self,
        pool: BlockPool,
        removals: RemovalLog,
        index: PrefixIndex | None = None,
        others: Sequence[Namespace] = (),
        in_flight: InFlight | None = None,
    ) -> None:
        self._pool, self._removals, self._index, self._others = pool, removals, index, others
        self._in_flight = in_flight

    def explain(self, namespace: Namespace, tokens: Tokens, extras: Sequence[Extra] = ()) -> list[BlockExplanation]:
        """Each full block of a prompt with its verdict."""
        raw = token_bytes(tokens)
        names = hash_tokens(namespace, raw, extras)
        num_usable = max(len(raw) // TOKEN_BYTES - 1, 0) // namespace.block_size
        num_local = len(self._pool.match(namespace.digest, names, raw, extras).refs)
        runs = self._index.lookup(names[:num_usable]) if self._index else []
        elsewhere = [(other, hash_tokens(other, raw, extras)) for other in self._others if other != namespace]
        elsewhere = [(other, hashed) for other, hashed in elsewhere if other.block_size == namespace.block_size]
        owners = self._in_flight.owners(names) if self._in_flight else [""] * len(names)
        explained = []
        for block_idx, name in enumerate(names):
            holders: tuple[NodeId, ...] = ()
            if block_idx >= num_usable:
                verdict, detail = Verdict.LAST_TOKEN, "it holds the last token, which is always computed"
            elif block_idx < num_local:
                verdict, detail = Verdict.HIT, "in this node's pool"
            elif holders := tuple(run.holder.node for run in runs if run.num_blocks > block_idx):
                verdict, detail = Verdict.REMOTE, f"in an unbroken run of {', '.join(holders)}"
            elif owners[block_idx]:
                verdict, detail = Verdict.IN_FLIGHT, f"by {owners[block_idx]} just now"
            else:
                verdict, detail, holders = self._why_not(name)
            if verdict is Verdict.NEVER_SEEN:
                verdict, detail = self._in_other_namespace(namespace, block_idx, elsewhere) or (verdict, detail)
            explained.append(BlockExplanation(block_idx, name, verdict, detail, holders))
        return explained

    def _why_not(self, name: BlockHash) -> tuple[Verdict, str, tuple[NodeId, ...]]:
        if self._pool.prefix(name) is not None:
            return Verdict.COLLISION, "the hash is held here, with other tokens or another parent", ()
        holders = tuple(holder.node for holder in self._index.tiers_of(name)) if self._index else ()
        if holders:
            return Verdict.AFTER_GAP, f"{', '.join(holders)} has it, but not every block before it", holders
        removal = self._removals.get(name)
        if removal is not None:
            return _OF_REASON[removal.reason], str(removal), ()
        lost = self._index.lost_with(name) if self._index else None
        if lost is not None:
            return Verdict.HOLDER_LOST, f"only {lost.node} (incarnation {lost.incarnation}) had it", (lost.node,)
        return Verdict.NEVER_SEEN, "no trace of it, or one too old to be remembered", ()

    def _in_other_namespace(
        self, namespace: Namespace, block_idx: int, elsewhere: Sequence[tuple[Namespace, Sequence[BlockHash]]]
    ) -> tuple[Verdict, str] | None:
        for other, names in elsewhere:
            name = names[block_idx]
            if self._pool.prefix(name) is not None or (self._index and self._index.tiers_of(name)):
                return Verdict.OTHER_NAMESPACE, f"held where {' and '.join(differing_fields(namespace, other))} differ"
        return None


def differing_fields(left: Namespace, right: Namespace) -> list[str]:
    """The names of the fields in which two namespaces differ; values stay out, for a salt is a secret."""
    return [f.name for f in fields(Namespace) if f.compare and getattr(left, f.name) != getattr(right, f.name)]
