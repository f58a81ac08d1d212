"""Who the client is, whom it reads from, and how much it holds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kv_bus.interface import PeerAddress
from kv_client.errors import InvalidRead
from kv_core.block import BlockGeometry
from kv_core.ids import Incarnation, NodeId
from kv_transport import TransportConfig

DURATION_MS_MAX: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of one client.

    Attributes:
        node_id: the client's name; the cluster's allow-list has its public key.
        incarnation: this life of that name, above every earlier one; None takes the seconds of the epoch.
        requests, events: where the client binds on the bus, `tcp://<IP>:<port>`. The holder never connects there.
        keys_folder: folder of mode 0700 with the client's key pair.
        allow_list: the cluster's list of keys.
        holder: the node to read from.
        geometry: of the blocks; must be the holder's.
        num_slots: blocks that the client can hold at once.
        transport: how its transfer agent behaves; shm needs a socket folder of its own.
        timeout_ms: deadline of a read, from `get_blocks` to the last layer, when the call names none.
        lease_ms: how long the holder keeps the blocks in place if it hears nothing; the holder may grant less.
        renew_leases: renew them while their blocks are held.
    """

    node_id: NodeId
    incarnation: Incarnation | None = None
    requests: str
    events: str
    keys_folder: Path
    allow_list: Path
    holder: PeerAddress
    geometry: BlockGeometry
    num_slots: int
    transport: TransportConfig = field(default_factory=TransportConfig)
    timeout_ms: int = 5_000
    lease_ms: int = 30_000
    renew_leases: bool = True

    def __post_init__(self) -> None:
        for name in ("timeout_ms", "lease_ms"):
            require_duration(name, getattr(self, name))


def require_duration(name: str, value: int) -> None:
    """Raise `InvalidRead` unless it is 1 ms to 1 hour."""
    if not 1 <= value <= DURATION_MS_MAX:
        raise InvalidRead(name=name, value=value, rule=f"1 to {DURATION_MS_MAX} ms")
