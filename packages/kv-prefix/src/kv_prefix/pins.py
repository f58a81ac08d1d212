"""Receipts: who holds which slots, and until when.

Decides nothing about content. Every reference to a slot belongs to exactly one receipt, a receipt is given back exactly
once, and what ends by itself ends by the time that the caller states (`expire(now_ns)`).

P1: a slot's reference count is the number of times that live receipts name it.
P2: a receipt that was given back, or never given out, changes nothing and raises.
P3: a lease is alive while `now_ns < until_ns`, never longer; other kinds end only by being given back.
"""

from dataclasses import dataclass
from enum import Enum


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
