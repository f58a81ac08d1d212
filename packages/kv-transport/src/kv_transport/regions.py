"""Registered memory, and the list of everything alive.

A region is memory that peers can name. Its id is never used twice in one life of an agent. A region that a grant,
lease or transfer uses cannot be taken away under it.
"""

import fcntl
import mmap
import os
import threading
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import msgspec
import numpy as np

from kv_core.ids import NodeId, RegionId
from kv_transport import limits
from kv_transport.arena import SEALS, Arena, ByteArray
from kv_transport.errors import InvalidDescriptor, TransferTooLarge, UnknownRegion
from kv_transport.memory_budget import MemoryBudget
from kv_transport.tickets import KVForm, RegionInfo
from kv_transport.types import Access


class Memory(Protocol):
    """Bytes of this process, however they were come by."""

    data: ByteArray
    data_view: memoryview


@dataclass(frozen=True, slots=True)
class XferDesc:
    """A piece of registered memory: `nbytes` bytes at `offset` of a region."""

    region: RegionId
    offset: int
    nbytes: int


class Notif(msgspec.Struct, frozen=True):
    """Bytes that a peer sent beside a transfer."""

    node: NodeId
    payload: bytes


class SharedBuffer:
    """A plain, sealed memfd that peers can map; `data_view` and `data` are its memory."""

    def __init__(self, fd: int, memory: mmap.mmap, name: str) -> None:
        self.name: Final = name
        self._fd = fd
        self._memory = memory
        self.data: ByteArray = np.frombuffer(memory, np.uint8)
        self.data_view = memoryview(memory)

    @classmethod
    def create(cls, nbytes: int, name: str = "kv-buffer", *, budget: MemoryBudget | None = None) -> Self:
        """Raises `MemoryUnavailable`, or `InvalidDescriptor` for a size below 1."""
        if nbytes < 1:
            raise InvalidDescriptor(what="buffer size", value=nbytes, reason="at least 1")
        (budget or MemoryBudget()).require(nbytes)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, mmap.mmap(fd, nbytes), name)
        except BaseException:
            os.close(fd)
            raise

    @property
    def nbytes(self) -> int:
        return len(self._memory) if self._fd >= 0 else 0

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def fileno(self) -> int:
        if self._fd < 0:
            raise InvalidDescriptor(what="buffer", value=self.name, reason="it is closed")
        return self._fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent; peers keep their own mapping."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        del self.data, self.data_view
        try:
            self._memory.close()
        except BufferError:
            pass  # somebody still holds a view over it


class MappedBuffer:
    """A peer's `SharedBuffer`, mapped here."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        """Takes over `fd`. Raises `InvalidDescriptor` when it is not sealed or not of that size."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(fd).st_size != nbytes:
                raise InvalidDescriptor(what="buffer descriptor", value=fd, reason="not sealed, or of another size")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._memory = mmap.mmap(fd, nbytes, access=access)
        except (OSError, ValueError) as error:
            raise InvalidDescriptor(what="buffer descriptor", value=fd, reason=str(error)) from error
        finally:
            os.close(fd)
        self.data: ByteArray = np.frombuffer(self._memory, np.uint8)
        self.data_view = memoryview(self._memory)

    def unmap(self) -> None:
        del self.data, self.data_view
        try:
            self._memory.close()
        except BufferError:
            pass


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that is registered with an agent."""

    region: RegionId
    memory: Arena | SharedBuffer
    access: Access

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def info(self) -> RegionInfo:
        """What peers are told about it."""
        memory = self.memory
        if isinstance(memory, Arena):
            form, num_slots = KVForm.of(memory.geometry, memory.layout, memory.fp8_scale), memory.num_slots
        else:
            form, num_slots = None, 0
        return RegionInfo(
            region=self.region,
            nbytes=memory.nbytes,
            access=self.access.value,
            mappable=True,
            form=form,
            num_slots=num_slots,
        )


class RegionTable:
    """The regions of one agent. Thread-safe: IO threads look regions up."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._regions: dict[int, MemoryRegion] = {}
        self._uses: dict[int, int] = {}
        self._holds: dict[int, int] = {}  # the same, changed on the loop only
        self._next = 1

    def add(self, memory: Arena | SharedBuffer, access: Access) -> MemoryRegion:
        """Register memory; the same memory again gets another id."""
        if memory.closed:
            raise InvalidDescriptor(what="memory", value=memory.name, reason="it is closed")
        with self._lock:
            if len(self._regions) >= limits.REGIONS_MAX:
                raise TransferTooLarge(what="list of regions", size=len(self._regions) + 1, limit=limits.REGIONS_MAX)
            region = MemoryRegion(RegionId(self._next), memory, access)
            self._regions[region.region] = region
            self._uses[region.region] = self._holds[region.region] = 0
            self._next += 1
            return region

    def remove(self, region: RegionId) -> None:
        """Forget a region; one that is not there is no error. On the loop.

        Raises:
            InvalidDescriptor: something uses it.
        """
        with self._lock:
            uses = self._uses.get(region, 0) + self._holds.get(region, 0)
            if uses:
                raise InvalidDescriptor(what="region", value=region, reason=f"{uses} transfers or tickets use it")
            self._regions.pop(region, None)
            self._uses.pop(region, None)
            self._holds.pop(region, None)

    def get(self, region: int) -> MemoryRegion:
        """Raises `UnknownRegion`."""
        found = self._regions.get(region)  # one step of the interpreter: no lock
        if found is None or found.memory.closed:
            raise UnknownRegion(region=region, node=self._node)
        return found

    def stands(self, region: MemoryRegion) -> bool:
        """Whether it is still registered, and its memory open."""
        return self._regions.get(region.region) is region and not region.memory.closed

    def arena(self, region: int) -> Arena:
        """The arena of that id. Raises `UnknownRegion`, or `InvalidDescriptor` for a plain buffer."""
        memory = self.get(region).memory
        if not isinstance(memory, Arena):
            raise InvalidDescriptor(what="region", value=region, reason="it is not an arena")
        return memory

    def use(self, region: int) -> None:
        """Hold a region in place until `unuse`. Raises `UnknownRegion`."""
        with self._lock:
            found = self._regions.get(region)
            if found is None or found.memory.closed:
                raise UnknownRegion(region=region, node=self._node)
            self._uses[region] += 1

    def unuse(self, region: int) -> None:
        with self._lock:
            self._uses[region] -= 1

    def hold(self, region: int) -> None:
        """`use` without its lock, until `let_go`: on the loop, which alone removes regions. Raises `UnknownRegion`."""
        found = self._regions.get(region)
        if found is None or found.memory.closed:
            raise UnknownRegion(region=region, node=self._node)
        self._holds[region] += 1

    def let_go(self, region: int) -> None:
        self._holds[region] -= 1

    def all(self) -> list[MemoryRegion]:
        with self._lock:
            return list(self._regions.values())

    def uses(self, region: RegionId) -> int:
        with self._lock:
            return self._uses.get(region, 0) + self._holds.get(region, 0)


def check_piece(desc: XferDesc, nbytes: int) -> None:
    """Raise `InvalidDescriptor` unless the piece lies inside a region of `nbytes`."""
    if desc.nbytes < 1 or desc.offset < 0 or desc.offset + desc.nbytes > nbytes:
        raise InvalidDescriptor(
            what="piece", value=[desc.offset, desc.nbytes], reason=f"region {desc.region} has {nbytes} bytes"
        )


@dataclass(frozen=True, slots=True)
class InventoryItem:
    """One thing alive: what it is, its id, whose it is, its state, and details worth reading."""

    kind: str
    ident: str
    owner: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything an agent holds right now."""

    items: tuple[InventoryItem, ...] = field(default=())

    def of(self, kind: str) -> tuple[InventoryItem, ...]:
        """Those of one kind: region, transport, peer, link, session, grant, lease, quarantine, transfer."""
        return tuple(item for item in self.items if item.kind == kind)

    @property
    def work(self) -> tuple[InventoryItem, ...]:
        """What must be gone when nothing is going on: grants, leases, quarantines and transfers."""
        return tuple(item for item in self.items if item.kind in ("grant", "lease", "quarantine", "transfer"))
