"""Who keeps blocks of a pool in place without writing them: readers, pins, spills, and what requests asked to keep.

The half of a block pool that gives out and takes back receipts; `block_pool` adds the tables of running requests and
what is findable.

H1: what a receipt names stays where it is until the receipt is given back or its time is over.
H2: a hold is taken whole or not at all; a reference that was handed out again since is refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import cast

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash
from kv_core.ids import Generation, NodeId, RegionId
from kv_prefix import limits
from kv_prefix.committing import Outcome, keep_tail
from kv_prefix.errors import (
    DigestMismatchError,
    InvalidRequestError,
    NotHeldError,
    PinQuotaExceededError,
    StaleMatchError,
)
from kv_prefix.eviction import EvictionPolicy, make_eviction_policy
from kv_prefix.matching import stored_digest
from kv_prefix.pins import Hold, HoldInfo, HoldKind, HoldTable, Receipt
from kv_prefix.pool_types import Lease, PoolMatch
from kv_prefix.quotas import AccountSource, TenantQuotas
from kv_prefix.retention import RetentionPolicy
from kv_prefix.slots import SlotTable


class PoolHolds:
    """See `BlockPool`, which is what nodes use.

    Args:
        num_slots: slots of the arena, at least 1.
        block_size: tokens per block.
        region: the arena's region, put into every reference.
        policy: eviction strategy over `num_slots` slots; `adaptive` when None.
        pin_quota: blocks that operators may pin; half the pool when None.
        retain_quota: blocks that requests may ask to be kept; half the pool when None.
        accounts: tenants with quotas of their own; nobody is counted when None.

    Raises:
        InvalidRequestError: a size is out of range.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
        region: RegionId,
        policy: EvictionPolicy | None = None,
        pin_quota: int | None = None,
        retain_quota: int | None = None,
        accounts: AccountSource | None = None,
    ) -> None:
        if not 0 < num_slots <= limits.MAX_SLOTS:
            raise InvalidRequestError(name="num_slots", value=num_slots, rule=f"need 1 to {limits.MAX_SLOTS}")
        if block_size < 1:
            raise InvalidRequestError(name="block_size", value=block_size, rule="need at least 1")
        self._region = region
        self._pin_quota = num_slots // 2 if pin_quota is None else pin_quota
        self._retain_quota = num_slots // 2 if retain_quota is None else retain_quota
        chosen = policy or make_eviction_policy("adaptive", num_slots)
        self._retention = RetentionPolicy(chosen, num_slots)
        self._quotas = TenantQuotas(self._retention, num_slots, accounts) if accounts is not None else None
        self._slots = SlotTable(num_slots, block_size, self._quotas or self._retention, self._quotas)
        self._holds = HoldTable()
        self._operator_pins: dict[int, int] = {}
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._num_copies = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._slots.block_size

    def refs(self, receipt: Receipt) -> tuple[BlockRef, ...]:
        """Where the blocks of a table, or of any other hold, lie, in order.

        Raises:
            UnknownReceiptError: it was given back.
        """
        return self._refs(self._holds.get(receipt).slots)

    @property
    def has_events(self) -> bool:
        """Whether something happened since the last `take_events`."""
        return bool(self._slots.events)

    def release(self, receipt: Receipt) -> None:
        """Give back a table, lease, pin or copy source. Committed blocks stay, evictable tail first; others are freed.

        Raises:
            UnknownReceiptError: it was given back already.
        """
        self._let_go(self._holds.remove(receipt))

    def lease(
        self,
        reader: NodeId,
        namespace: bytes,
        prefix_hash: BlockHash,
        token_digest: bytes,
        *,
        until_ns: int,
        first_block_idx: int = 0,
    ) -> Lease:
        """Let `reader` read the blocks `first_block_idx ..` of the prefix that ends in `prefix_hash`.

        Args:
            token_digest: `kv_core.hashing.token_digest` over all tokens of the prefix from block 0 and the extras that
                begin in it, as the reader knows them; compared with the same over what is stored.

        Raises:
            NotHeldError: the prefix is not here.
            DigestMismatchError: it is, but with other tokens.
            LeaseLimitError: too many leases are out.
        """
        last = self._slots.find(prefix_hash.sequence)
        if last is None or self._slots.hash[last] != prefix_hash or self._slots.namespace[last] != namespace:
            raise NotHeldError(prefix_hash=prefix_hash.sequence.hex())
        chain = self._slots.chain(last)
        if not 0 <= first_block_idx < len(chain):
            raise InvalidRequestError(
                name="first_block_idx", value=first_block_idx, rule=f"the prefix has {len(chain)} blocks"
            )
        if stored_digest(self._slots, chain) != token_digest:
            raise DigestMismatchError(prefix_hash=prefix_hash.sequence.hex())
        return self._lease_chain(reader, chain[first_block_idx:], until_ns)

    def lease_match(self, reader: NodeId, match: PoolMatch, *, until_ns: int) -> Lease:
        """Let `reader` read the full blocks of a match, whose tokens were compared when it was made.

        Raises:
            StaleMatchError: a matched block was evicted since.
            LeaseLimitError: too many leases are out.
        """
        return self._lease_chain(reader, self._resolve_match(match), until_ns)

    def renew(self, receipt: Receipt, *, now_ns: int, until_ns: int) -> Receipt:
        """Move a lease's end; the new receipt replaces the old.

        Raises:
            LeaseExpiredError: it has ended already.
        """
        return self._holds.renew(receipt, now_ns=now_ns, until_ns=until_ns)

    def retain(self, match: PoolMatch, *, priority: int, until_ns: int) -> int:
        """Evict the full blocks of a match after all that nobody retains, until `until_ns`; lowest priority first.

        Returns for how many blocks from block 0 that is so: a pool and each account retain within their quotas.

        Raises:
            InvalidRequestError: a priority outside 0 to 100, or no time.
            StaleMatchError: a matched block was evicted since.
        """
        count = 0
        for slot in self._resolve_match(match):
            is_new = self._retention.priority(slot) < 0
            if is_new and self._retention.num_retained >= self._retain_quota:
                break
            if self._quotas is None:
                self._retention.retain(slot, priority, until_ns)
            elif not self._quotas.retain(slot, priority, until_ns):
                break
            count += 1
        return count

    def expire(self, now_ns: int) -> list[Receipt]:
        """End every lease and every retention whose time has passed; returns the leases."""
        self._retention.expire(now_ns)
        expired = self._holds.take_expired(now_ns)
        for hold in expired:
            self._let_go(hold)
        return [hold.receipt for hold in expired]

    def hold(self, owner: str, refs: Sequence[BlockRef], *, used: bool = True) -> Receipt:
        """Keep slots in place while they are copied elsewhere (outgoing transfer, spill) or written by a peer.

        Args:
            used: whether this counts as a use of the content for eviction; a spill is none.

        Raises:
            StaleMatchError: one of them was given back or handed out again since.
        """
        slots = self._resolve(refs, findable=False)
        hold = self._holds.add(HoldKind.COPY, owner, slots)
        if used:
            self._acquire(slots)
        else:
            for slot in slots:
                self._slots.acquire(slot)
        return hold.receipt

    def pin(self, owner: str, match: PoolMatch) -> Receipt:
        """Keep the full blocks of a match resident until released, within the quota.

        Raises:
            PinQuotaExceededError: the quota is used up; nothing was changed.
            StaleMatchError: a matched block was evicted since.
        """
        slots = self._resolve_match(match)
        need = sum(slot not in self._operator_pins for slot in slots)
        if len(self._operator_pins) + need > self._pin_quota:
            raise PinQuotaExceededError(need=need, used=len(self._operator_pins), quota=self._pin_quota)
        hold = self._holds.add(HoldKind.PIN, owner, slots)
        self._acquire(slots)
        for slot in slots:
            self._operator_pins[slot] = self._operator_pins.get(slot, 0) + 1
        return hold.receipt

    def prefix(self, block_hash: BlockHash) -> PoolMatch | None:
        """The whole prefix that ends in a block, by its name alone; None when it is not held. For operators."""
        last = self._slots.find(block_hash.sequence)
        if last is None or self._slots.hash[last] != block_hash:
            return None
        chain = self._slots.chain(last)
        names = tuple(name for slot in chain if (name := self._slots.hash[slot]) is not None)
        return PoolMatch(self._slots.namespace[last], names, self._refs(chain), None, len(chain) * self.block_size)

    def prefix_tokens(self, block_hash: BlockHash) -> bytes | None:
        """The tokens (uint32, little-endian) of the whole prefix that ends in a block; None when it is not held, or
        when content other than tokens lies in it."""
        last = self._slots.find(block_hash.sequence)
        if last is None or self._slots.hash[last] != block_hash:
            return None
        chain = self._slots.chain(last)
        if any(slot in self._slots.extras for slot in chain):
            return None
        return b"".join([self._slots.tokens[slot] for slot in chain])

    def is_evictable(self, block_hash: BlockHash) -> bool:
        """Whether a block is held, and nothing keeps it from being evicted."""
        slot = self._slots.find(block_hash.sequence)
        return slot is not None and self._slots.hash[slot] == block_hash and self._slots.is_cached(slot)

    def holds(self) -> list[HoldInfo]:
        """Every live receipt: who holds how much, and until when."""
        return [HoldInfo(hold.receipt, len(hold.slots)) for hold in self._holds]

    def _ref(self, slot: int) -> BlockRef:
        return BlockRef(self._region, slot, Generation(self._slots.generation[slot]))

    def _refs(self, slots: Sequence[int]) -> tuple[BlockRef, ...]:
        # The array holds generations and knows them as integers only.
        generations = cast("Iterator[Generation]", map(self._slots.generation.__getitem__, slots))
        return tuple(map(BlockRef, repeat(self._region), slots, generations))

    def _resolve_match(self, match: PoolMatch) -> list[int]:
        return self._resolve(match.refs, findable=True)

    def _resolve(self, refs: Iterable[BlockRef], *, findable: bool) -> list[int]:
        """The slots behind references that still stand: findable blocks, or else anything somebody holds."""
        slots: list[int] = []
        for block_idx, ref in enumerate(refs):
            slot = ref.slot
            stands = (
                ref.region == self._region
                and slot < self._slots.total
                and self._slots.generation[slot] == ref.generation
                and (self._slots.committed[slot] or (not findable and self._slots.refs[slot]))
            )
            if not stands:
                raise StaleMatchError(block_idx=block_idx, slot=slot, generation=ref.generation)
            slots.append(slot)
        return slots

    def _acquire(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.acquire(slot)
        self._slots.touch([slot for slot in slots if self._slots.committed[slot]])

    def _let_go(self, hold: Hold) -> None:
        if hold.receipt.kind is HoldKind.PIN:
            for slot in hold.slots:
                self._operator_pins[slot] -= 1
                if not self._operator_pins[slot]:
                    del self._operator_pins[slot]
        if hold.tail is not None:
            keep_tail(self._slots, hold.slots, hold.tail)
        for slot in reversed(hold.slots):
            self._slots.release(slot)

    def _lease_chain(self, reader: NodeId, slots: list[int], until_ns: int) -> Lease:
        hold = self._holds.add(HoldKind.LEASE, reader, slots, until_ns)
        self._acquire(slots)
        hashes = tuple(block_hash for slot in slots if (block_hash := self._slots.hash[slot]) is not None)
        return Lease(hold.receipt, self._refs(slots), hashes)
