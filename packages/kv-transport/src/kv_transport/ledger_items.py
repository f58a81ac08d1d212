"""What the ledger keeps: connections of peers, open grants, and units on their way into our memory."""

from dataclasses import dataclass, field
from typing import Protocol

from kv_core.errors import KVError
from kv_core.namespace import EXACT, Fidelity
from kv_transport.arena import Arena
from kv_transport.arena_layout import IntArray
from kv_transport.codecs import Codec
from kv_transport.frames import UnitHead
from kv_transport.progress import GrantProgress
from kv_transport.regions import Memory
from kv_transport.tickets import WriteGrant
from kv_transport.types import PeerName


class Session(Protocol):
    """An authenticated connection that a peer opened to us."""

    @property
    def peer(self) -> PeerName: ...

    @property
    def scheme(self) -> str: ...

    @property
    def one_sided(self) -> bool:
        """The peer writes our memory itself, so that shutting it out needs its help or its end."""
        ...

    @property
    def may_lag(self) -> bool:
        """Bytes of the peer may still arrive here after its side is at rest, until this session is closed."""
        ...

    def supersede(self) -> None:
        """The peer has come back by another connection: end this one. Called on the loop."""
        ...

    def send_fence(self, ticket: int) -> None:
        """Tell the peer that a grant is over. Called on the loop."""
        ...


class GrantListener(Protocol):
    """Who watches a grant; called on the loop."""

    def opened(self, session: Session) -> None: ...
    def layer_done(self, layer: int) -> None: ...
    def writer_lost(self, error: KVError, dead: bool) -> None: ...
    def fenced(self) -> None: ...


@dataclass(slots=True, eq=False)
class GrantEntry:
    """One open grant."""

    grant: WriteGrant
    arena: Arena
    slots: IntArray
    progress: GrantProgress
    listener: GrantListener | None = None
    writer: PeerName | None = None
    session: Session | None = None
    one_sided_writer: bool = False
    revoked: bool = False
    clear: bool = False
    landing: int = 0
    nbytes: int = 0
    units: int = 0
    transports: dict[str, int] = field(default_factory=dict)
    codecs: dict[str, int] = field(default_factory=dict)
    wire_nbytes: int = 0
    source_fidelity: Fidelity = EXACT
    attempt: int = -1

    @property
    def fidelity(self) -> Fidelity:
        """Of what has been written: the source's, or the lossy codec's that some of it came by."""
        lossy = [codec.fidelity for codec in map(Codec, self.codecs) if not codec.lossless]
        return lossy[0] if lossy else self.source_fidelity


@dataclass(frozen=True, slots=True)
class DoneGrant:
    """What is remembered of a complete grant: its writer, and how much it covered. Not the grant, which lists slots."""

    writer: PeerName | None
    num_layers: int
    num_positions: int


@dataclass(slots=True, eq=False)
class Landing:
    """A unit on its way into our memory.

    Attributes:
        entry: its grant; None for a plain region.
        memory, offsets, sizes: where each cell goes.
        expected: CRC-64 of each cell, or of what the codec made of it; empty as long as they have not followed.
        codec: how the payload is written.
        fresh: bits of the positions that may be written; others are verified already and must not be touched.
    """

    session: Session
    head: UnitHead
    entry: GrantEntry | None
    memory: Memory
    region: int
    offsets: list[int]
    sizes: list[int]
    expected: list[int]
    fresh: int
    codec: Codec = Codec.NONE
    over: bool = False

    @property
    def revoked(self) -> bool:
        """The rest of the bytes must not reach the memory any more."""
        return self.entry is not None and self.entry.revoked

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def writable(self, cell: int) -> bool:
        """Whether this cell is still to be written."""
        return bool(self.fresh >> (self.head.start + cell) & 1) if self.entry is not None else True
