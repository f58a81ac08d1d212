"""How an agent behaves: what a cluster file may set."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kv_transport import limits
from kv_transport.errors import InvalidDescriptor

TransportName = Literal["auto", "shm", "tcp", "ucx", "memory"]
CodecName = Literal["auto", "none", "lz4", "fp8_e4m3", "int8"]

_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files for TLS on `tcp`: this node's certificate and key, and the authority that signed every node's."""

    certificate: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings of one agent.

    Attributes:
        transport: `auto` takes shm on one host; between hosts ucx if `allow_ucx` and both ends have RDMA, else tcp.
        socket_folder: folder for the unix sockets of shm, of mode 0700 (made if missing); None turns shm off.
        tcp_host: address to bind; loopback unless told otherwise. None turns tcp off. ucx uses its network device.
        tcp_port: 0 lets the system choose.
        tcp_streams: connections per peer.
        tls: encrypt tcp; a peer without TLS is then not spoken to over tcp at all.
        io_threads: threads that move bytes for tcp.
        copy_threads: threads that move bytes for shm.
        allow_ucx: whether `auto` may choose ucx (remote keys give unbounded access: fabrics you trust only).
        window_size: units in flight per peer, as long as they are of less than 64 MiB.
        unit_bytes: most bytes of one unit (a unit never crosses a layer); None: as `unit_bytes_over` says.
        connect_timeout_ms: for a connection including its handshake.
        unit_timeout_ms: for one unit from posting to acknowledgement.
        heartbeat_ms: how often an active link says that it lives.
        silence_timeout_ms: silence on an active link that counts as its death.
        resume_grace_ms: how long a receiver waits for a live writer to come back by another link.
        fence_timeout_ms: how long a fence may take before the slots go to quarantine.
        quarantine_slots_max: per peer; at the cap it is offered tcp only.
        codec: how KV is written over tcp, where the peer accepts it; `auto` leaves it to measured rates.
    """

    transport: TransportName = "auto"
    socket_folder: Path | None = None
    tcp_host: str | None = "127.0.0.1"
    tcp_port: int = 0
    tcp_streams: int = 2
    io_threads: int = 1
    copy_threads: int = 2
    allow_ucx: bool = False
    window_size: int = limits.WINDOW_SIZE
    unit_bytes: int | None = None
    connect_timeout_ms: int = 2_000
    unit_timeout_ms: int = 5_000
    heartbeat_ms: int = 500
    silence_timeout_ms: int = 3_000
    resume_grace_ms: int = 300
    fence_timeout_ms: int = 1_000
    quarantine_slots_max: int = limits.QUARANTINE_SLOTS_MAX
    tls: TlsConfig | None = None
    codec: CodecName = "auto"

    def __post_init__(self) -> None:
        for name in ("tcp_streams", "io_threads", "copy_threads", "window_size"):
            value = getattr(self, name)
            if not 1 <= value <= 64:
                raise InvalidDescriptor(what=name, value=value, reason="1 to 64")
        if self.unit_bytes is not None and not 4096 <= self.unit_bytes <= limits.UNIT_BYTES_MAX:
            raise InvalidDescriptor(what="unit_bytes", value=self.unit_bytes, reason=f"4096 to {limits.UNIT_BYTES_MAX}")
        for name in self.__slots__:
            value = getattr(self, name)
            if name.endswith("_ms") and not 1 <= value <= 3_600_000:
                raise InvalidDescriptor(what=name, value=value, reason="1 ms to 1 hour")
        if self.codec not in get_args(CodecName):
            raise InvalidDescriptor(what="codec", value=self.codec, reason=f"one of {', '.join(get_args(CodecName))}")
        if self.codec not in ("auto", "none") and not self.encodes:
            raise InvalidDescriptor(what="codec", value=self.codec, reason=f"{self.transport} moves bytes as they are")
        if self.silence_timeout_ms < 2 * self.heartbeat_ms:
            raise InvalidDescriptor(
                what="silence_timeout_ms", value=self.silence_timeout_ms, reason="at least two heartbeats"
            )

    @property
    def encodes(self) -> bool:
        """Whether there is a transport that writes anything but raw bytes."""
        return self.transport == "tcp" or (self.transport == "auto" and self.tcp_host is not None)

    def unit_bytes_over(self, scheme: str, nbytes: int) -> int:
        """Most bytes of each unit of a transfer, or of a layer, of `nbytes` by that transport.

        Over shm all threads that copy move a unit together, and what is around a unit costs more than a tenth of moving
        4 MiB. So units are larger there.
        """
        if self.unit_bytes is not None:
            return self.unit_bytes
        if scheme != "shm":
            return limits.UNIT_BYTES
        together = min(self.copy_threads * limits.UNIT_SHARE_BYTES, limits.UNIT_BYTES_MAX)
        return max(limits.UNIT_BYTES, min(nbytes, together))

    def ns(self, name: str) -> int:
        """A `..._ms` setting in nanoseconds."""
        return int(getattr(self, name)) * _MS
