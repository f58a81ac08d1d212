"""Receipts: who holds which slots, and until when.

Decides nothing about content. Every reference to a slot belongs to exactly one receipt, a receipt is given back exactly
once, and what ends by itself ends by the time that the caller states (`take_expired(now_ns)`).

P1: a slot's reference count is the number of times that live receipts name it.
P2: a receipt that was given back, or never given out, changes nothing and raises.
P3: a lease is alive while `now_ns < until_ns`, never longer; other kinds end only by being given back.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kv_core.hashing import Extra
from kv_prefix import limits
from kv_prefix.errors import InvalidRequestError, LeaseExpiredError, LeaseLimitError, UnknownReceiptError


class HoldKind(Enum):
    """Why slots are held."""

    TABLE = "table"  # a running request
    LEASE = "lease"  # a remote reader, ends by time
    PIN = "pin"  # an operator's pin, within a quota
    COPY = "copy"  # the source of a copy-on-write copy, a spill, or an outgoing transfer


@dataclass(frozen=True, slots=True)
class Receipt:
    """The right to give back one hold. `until_ns` is None for holds that do not end by themselves."""

    receipt_id: int
    kind: HoldKind
    owner: str
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class HoldInfo:
    """One hold as an operator sees it."""

    receipt: Receipt
    num_slots: int


@dataclass(frozen=True, slots=True)
class Tail:
    """What is in a table's last, part-filled block."""

    namespace: bytes
    tokens: bytes
    extras: tuple[Extra, ...]


class Hold:
    """What a live receipt stands for. `num_committed` counts a table's blocks that were offered for sharing; `account`
    is who is charged for what it is handed out."""

    __slots__ = ("account", "num_committed", "receipt", "slots", "tail")

    def __init__(self, receipt: Receipt, slots: list[int]) -> None:
        self.receipt = receipt
        self.slots = slots
        self.num_committed = 0
        self.account = 0
        self.tail: Tail | None = None


class HoldTable:
    """All live receipts of one pool."""

    def __init__(self) -> None:
        self._holds: dict[int, Hold] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._leases_of: dict[str, int] = {}
        self._num_leases = 0
        self._next_id = 1

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    @property
    def num_leases(self) -> int:
        return self._num_leases

    def add(self, kind: HoldKind, owner: str, slots: list[int], until_ns: int | None = None) -> Hold:
        """Give out a receipt.

        Raises:
            InvalidRequestError: the owner's name is empty or too long.
            LeaseLimitError: the reader, or all readers together, hold too many leases.
        """
        if not 0 < len(owner) <= limits.MAX_OWNER_CHARS:
            raise InvalidRequestError(
                name="owner", value=owner[:64], rule=f"it needs 1 to {limits.MAX_OWNER_CHARS} characters"
            )
        if kind is HoldKind.LEASE:
            self._admit_lease(owner)
        hold = Hold(Receipt(self._next_id, kind, owner, until_ns), slots)
        self._holds[self._next_id] = hold
        self._next_id += 1
        if until_ns is not None:
            self._arm(hold.receipt)
        return hold

    def get(self, receipt: Receipt, kind: HoldKind | None = None) -> Hold:
        """The hold behind a receipt.

        Raises:
            UnknownReceiptError: it was given back, or is of another kind than `kind`.
        """
        hold = self._holds.get(receipt.receipt_id)
        if hold is None or hold.receipt.owner != receipt.owner or (kind is not None and hold.receipt.kind is not kind):
            raise UnknownReceiptError(receipt=receipt.receipt_id, owner=receipt.owner)
        return hold

    def remove(self, receipt: Receipt) -> Hold:
        """Take a receipt back.

        Raises:
            UnknownReceiptError: it was given back already.
        """
        hold = self.get(receipt)
        del self._holds[receipt.receipt_id]
        if hold.receipt.kind is HoldKind.LEASE:
            owner = hold.receipt.owner
            self._num_leases -= 1
            self._leases_of[owner] -= 1
            if not self._leases_of[owner]:
                del self._leases_of[owner]
        return hold

    def renew(self, receipt: Receipt, *, now_ns: int, until_ns: int) -> Receipt:
        """Move a lease's end.

        Raises:
            LeaseExpiredError: it has ended, or is no lease.
        """
        hold = self._holds.get(receipt.receipt_id)
        if hold is None or hold.receipt.owner != receipt.owner or not (hold.receipt.until_ns or 0) > now_ns:
            raise LeaseExpiredError(receipt=receipt.receipt_id)
        hold.receipt = Receipt(receipt.receipt_id, HoldKind.LEASE, receipt.owner, until_ns)
        self._arm(hold.receipt)
        return hold.receipt

    def take_expired(self, now_ns: int) -> list[Hold]:
        """Remove and return the leases whose end is at or before `now_ns`, earliest end first."""
        expired: list[Hold] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            until_ns, receipt_id = heapq.heappop(self._deadlines)
            hold = self._holds.get(receipt_id)
            if hold is not None and hold.receipt.until_ns == until_ns:
                expired.append(self.remove(hold.receipt))
        return expired

    def _arm(self, receipt: Receipt) -> None:
        assert receipt.until_ns is not None
        heapq.heappush(self._deadlines, (receipt.until_ns, receipt.receipt_id))
        # Renewed and returned leases leave entries behind; a renewing reader must not grow the heap for ever.
        if len(self._deadlines) > 2 * self._num_leases + 64:
            self._deadlines = [
                (hold.receipt.until_ns, receipt_id)
                for receipt_id, hold in self._holds.items()
                if hold.receipt.until_ns is not None
            ]
            heapq.heapify(self._deadlines)

    def _admit_lease(self, reader: str) -> None:
        held = self._leases_of.get(reader, 0)
        for number, limit in ((held, limits.MAX_LEASES_PER_READER), (self._num_leases, limits.MAX_LEASES)):
            if number >= limit:
                raise LeaseLimitError(reader=reader, held=number, limit=limit)
        self._leases_of[reader] = held + 1
        self._num_leases += 1
