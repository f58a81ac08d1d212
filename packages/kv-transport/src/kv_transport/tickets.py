"""What one node tells another so that it may reach its memory: introductions, grants and leases.

These structs travel in the messages of the bus, which says who sent them. They carry numbers only: a ticket is worth
nothing without a session that proves to be the node it was made for.

Evolution: fields are only appended, with defaults.
"""

from typing import Self

import msgspec

from kv_core.block import BlockGeometry, BlockRef, Layout
from kv_core.dtypes import parse_dtype
from kv_core.header import MAX_REQUEST_ID_BYTES
from kv_core.ids import Generation, Incarnation, NodeId, RegionId
from kv_core.limits import MAX_BINARY_BYTES
from kv_transport import limits
from kv_transport.errors import InvalidDescriptor
from kv_transport.types import PeerName

WIRE_VERSION = 6
"""Increment when the frames between two agents change; peers of another version are refused by name."""


class _Portable(msgspec.Struct, frozen=True):
    """A struct that travels inside a bus message as bytes."""

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises `InvalidDescriptor` for anything that `to_bytes` of an honest peer does not make."""
        if len(data) > MAX_BINARY_BYTES:
            raise InvalidDescriptor(what=cls.__name__, value=len(data), reason=f"longer than {MAX_BINARY_BYTES} bytes")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidDescriptor(what=cls.__name__, value=len(data), reason=str(error)) from error


class KVForm(msgspec.Struct, frozen=True):
    """In what form a node stores a block: the fields that must agree, or be converted, between two sides."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    layout: str
    num_planes: int = 2
    fp8_scale: int = 127

    @classmethod
    def of(cls, geometry: BlockGeometry, layout: Layout, fp8_scale: int = 127) -> Self:
        return cls(
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype.value,
            block_size=geometry.block_size,
            layout=layout.value,
            num_planes=geometry.num_planes,
            fp8_scale=fp8_scale,
        )

    def geometry(self) -> BlockGeometry:
        """Raises `InvalidBlockError` or `UnknownDTypeError` for numbers that cannot be."""
        return BlockGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=parse_dtype(self.dtype),
            block_size=self.block_size,
            num_planes=self.num_planes,
        )


class RegionInfo(msgspec.Struct, frozen=True):
    """A registered region as peers see it.

    Attributes:
        region: its id at its owner.
        nbytes: its length.
        access: what peers may do without a ticket (`Access` value).
        mappable: it is a sealed memfd, so a process on the same host can map it.
        form, num_slots: set when it is an arena.
    """

    region: int
    nbytes: int
    access: str
    mappable: bool
    form: KVForm | None = None
    num_slots: int = 0


class BackendAddress(msgspec.Struct, frozen=True):
    """Where one backend of an agent is reached: a socket path, `host:port`, or a worker address."""

    scheme: str
    address: bytes


class AgentMetadata(_Portable, frozen=True):
    """An agent's introduction, made for one peer: it carries the key of the sessions that this peer opens.

    Send it over an authenticated channel only.
    """

    wire_version: int
    node: str
    incarnation: int
    made_for_node: str
    made_for_incarnation: int
    session_key: bytes
    host_id: bytes
    addresses: list[BackendAddress]
    regions: list[RegionInfo]

    @property
    def name(self) -> PeerName:
        return PeerName(NodeId(self.node), Incarnation(self.incarnation))

    def region(self, region: int) -> RegionInfo | None:
        return next((info for info in self.regions if info.region == region), None)


class _Ticket(_Portable, frozen=True):
    """What a grant and a lease have in common: which slots of whose arena, for which layers and tokens.

    Position `i` is the `i`-th slot; it holds tokens `[seq_start + i * block_size, ...)` of the request.

    Attributes:
        ticket: random id, never used again.
        node, incarnation: whose memory it is.
        request_id: what it is for.
        region: the owner's arena.
        slots, generations: one pair per position.
        layer_start, layer_end: layers that will be moved, end exclusive.
        seq_start, seq_end: tokens covered, end exclusive.
        form: how the owner stores a block.
        num_slots: slots of the arena (with `form`, where each byte lies).
    """

    ticket: int
    node: str
    incarnation: int
    request_id: str
    region: int
    slots: list[int]
    generations: list[int]
    layer_start: int
    layer_end: int
    seq_start: int
    seq_end: int
    form: KVForm
    num_slots: int

    @property
    def name(self) -> PeerName:
        return PeerName(NodeId(self.node), Incarnation(self.incarnation))

    @property
    def num_positions(self) -> int:
        return len(self.slots)

    @property
    def total_bytes(self) -> int:
        """Bytes of KV in all positions and layers, as the owner stores them."""
        layers = self.layer_end - self.layer_start
        return len(self.slots) * layers * self.form.geometry().slot_layer_nbytes

    def blocks(self) -> list[BlockRef]:
        """The owner's references, in order of position."""
        return [
            BlockRef(RegionId(self.region), slot, Generation(generation))
            for slot, generation in zip(self.slots, self.generations, strict=True)
        ]


class WriteGrant(_Ticket, frozen=True):
    """Leave to write into reserved slots. Ends by completion or by a fence, never by time.

    Attributes, besides those of every ticket:
        transports: schemes the receiver accepts; empty means any.
        writer: the only node that may use it; empty means the first that opens it.
        codecs: what the receiver accepts besides raw bytes (`Codec` values; unknown ones are never used).
    """

    transports: list[str] = []
    writer: str = ""
    codecs: list[str] = []

    def __post_init__(self) -> None:
        _check_ticket(self)


class ReadGrant(_Ticket, frozen=True):
    """Leave to read blocks for some time: a lease.

    Attributes, besides those of every ticket:
        lease_index: where in the arena's lease table the holder says that it is still alive.
        lease_ms: how long it lives without renewal, from the moment it was made, by the holder's clock.
        transports: schemes the holder offers; empty means any.
        codecs: what the holder can write besides raw bytes.
        fidelity: of what it holds.
    """

    lease_index: int
    lease_ms: int
    transports: list[str] = []
    codecs: list[str] = []
    fidelity: str = "exact"

    def __post_init__(self) -> None:
        _check_ticket(self)
        if not 0 <= self.lease_index < limits.LEASES_MAX:
            raise InvalidDescriptor(what="lease index", value=self.lease_index, reason=f"at most {limits.LEASES_MAX}")


def _check_ticket(ticket: WriteGrant | ReadGrant) -> None:
    """Refuse numbers that no honest receiver sends; runs on construction and on decoding."""
    if len(ticket.codecs) > 16 or any(not 1 <= len(name) <= 32 for name in ticket.codecs):
        raise InvalidDescriptor(
            what="codecs", value=len(ticket.codecs), reason="at most 16 names of at most 32 letters"
        )
    name = len(ticket.request_id.encode())
    if not 1 <= name <= MAX_REQUEST_ID_BYTES:
        raise InvalidDescriptor(what="request id length", value=name, reason=f"1 to {MAX_REQUEST_ID_BYTES} bytes")
    positions = len(ticket.slots)
    if not 1 <= positions <= limits.POSITIONS_PER_TICKET_MAX or positions != len(ticket.generations):
        raise InvalidDescriptor(
            what="ticket", value=positions, reason=f"{positions} slots, {len(ticket.generations)} generations"
        )
    if not 1 <= ticket.num_slots <= limits.SLOTS_MAX:
        raise InvalidDescriptor(what="slots of the arena", value=ticket.num_slots, reason="out of range")
    if min(ticket.slots) < 0 or max(ticket.slots) >= ticket.num_slots or min(ticket.generations) < 0:
        raise InvalidDescriptor(what="ticket", value=ticket.ticket, reason="a slot lies outside the arena")
    if len(set(ticket.slots)) != positions:
        raise InvalidDescriptor(what="ticket", value=ticket.ticket, reason="a slot is named twice")
    if not 0 <= ticket.layer_start < ticket.layer_end <= ticket.form.num_layers:
        raise InvalidDescriptor(
            what="layers",
            value=[ticket.layer_start, ticket.layer_end],
            reason=f"the arena has {ticket.form.num_layers}",
        )
    tokens = ticket.seq_end - ticket.seq_start
    if (
        ticket.seq_start < 0
        or not (positions - 1) * ticket.form.block_size < tokens <= positions * ticket.form.block_size
    ):
        raise InvalidDescriptor(
            what="tokens", value=[ticket.seq_start, ticket.seq_end], reason=f"{positions} blocks do not hold them"
        )
