"""What a process says of itself in a discovery service: its name, role, addresses and life.

A record is a hint where to find somebody, never a reason to trust him: the bus admits by key, whatever a record says.
A record that does not fit is refused with its reason and changes nothing.
"""

import ipaddress
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_services.config import Name, NodeConfig, Port, Role

RECORD_BYTES_MAX: Final = 4096


class RecordError(KVError):
    """A record of a discovery service is not one."""

    code = 7050
    template = "record {key!r} is refused: {cause}"


class NodeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One process. Fields that a reader does not know are skipped, so that newer processes can say more."""

    node_id: Name
    role: Role
    host: Annotated[str, Meta(max_length=64)]
    bus_port: Port
    events_port: Port
    http_port: Port
    incarnation: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]

    @property
    def node(self) -> NodeId:
        return NodeId(self.node_id)

    @property
    def life(self) -> Incarnation:
        return Incarnation(self.incarnation)

    def config(self) -> NodeConfig:
        """The same as a line of a cluster file, as far as peers need it."""
        return NodeConfig(
            id=self.node_id,
            role=self.role,
            host=self.host,
            bus_port=self.bus_port,
            events_port=self.events_port,
            http_port=self.http_port,
        )

    def same_place(self, other: "NodeRecord") -> bool:
        """Whether both name the same addresses and role."""
        return self.config() == other.config()


def record_of(node: NodeConfig, incarnation: Incarnation) -> NodeRecord:
    """The record of this process's life."""
    return NodeRecord(node.id, node.role, node.host, node.bus_port, node.events_port, node.http_port, incarnation)


def encode_record(record: NodeRecord) -> bytes:
    """As JSON, so that an operator can read it where it lies."""
    return msgspec.json.encode(record)


def decode_record(name: str, value: bytes, *, allow_remote: bool) -> NodeRecord:
    """Read the record that lies under `name`.

    Raises:
        RecordError: it is too large, malformed, of another name, or of an address that this cluster does not use.
    """
    if len(value) > RECORD_BYTES_MAX:
        raise RecordError(key=name, cause=f"{len(value)} bytes, at most {RECORD_BYTES_MAX} are read")
    try:
        record = msgspec.json.decode(value, type=NodeRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordError(key=name, cause=str(error)) from None
    if record.node_id != name:
        raise RecordError(key=name, cause=f"it names {record.node_id!r}")
    try:
        address = ipaddress.ip_address(record.host)
    except ValueError:
        raise RecordError(key=name, cause=f"{record.host!r} is no IP address") from None
    if address.is_unspecified or address.is_multicast:
        raise RecordError(key=name, cause=f"{record.host!r} is not the address of one host")
    if not address.is_loopback and not allow_remote:
        raise RecordError(key=name, cause=f"{record.host!r} is not on this machine, and allow_remote is not set")
    return record
