"""Registered memory and the list of everything alive."""

from dataclasses import dataclass
from typing import Self

from kv_core.ids import NodeId, RegionId
from kv_transport.arena import Arena
from kv_transport.types import Access


@dataclass(frozen=True, slots=True)
class XferDesc:
    """A piece of registered memory: `nbytes` bytes at `offset` of a region."""

    region: RegionId
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Notif:
    """Bytes that a peer sent beside a transfer."""

    node: NodeId
    payload: bytes


class SharedBuffer:
    """A plain, sealed memfd that peers can map; `view` is its memory."""

    @classmethod
    def create(cls, nbytes: int, name: str = "kv-buffer") -> Self:
        """Raises `MemoryUnavailable`."""
        raise NotImplementedError

    @property
    def view(self) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that is registered with an agent."""

    region: RegionId
    memory: Arena | SharedBuffer
    access: Access


@dataclass(frozen=True, slots=True)
class InventoryItem:
    """One thing alive: what it is, its id, whose it is, and details worth reading."""

    kind: str
    ident: str
    owner: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything an agent holds right now."""

    items: tuple[InventoryItem, ...]

    def of(self, kind: str) -> tuple[InventoryItem, ...]:
        """Those of one kind: region, peer, link, session, grant, lease, quarantine, xfer, handover, inbound, fetch."""
        return tuple(item for item in self.items if item.kind == kind)
