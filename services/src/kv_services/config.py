"""What a cluster file may say: its sections, their fields, defaults and bounds.

Knows nothing of the processes it describes, and reads no clock, socket or environment. `config_file` reads and writes
the TOML text, `config_checks` checks what no single field can say.

Invariants of a loaded `ClusterConfig`: node ids are unique; no two ports of one host are equal; every host is an
explicit address, and one outside loopback was allowed by `allow_remote`; nodes that hold KV have a capacity; tenants'
ids and API keys are unique. Paths in it (`state_dir`, `model.path`) are absolute.
"""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kv_core.dtypes import DType, parse_dtype
from kv_core.ids import NodeId, TenantId
from kv_services.config_errors import ConfigError
from kv_services.sizes import Bytes, parse_bytes

Port = Annotated[int, Meta(ge=1, le=65535)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]

ApiKey = Annotated[str, Meta(min_length=16, max_length=256)]


class Role(Enum):
    """What a process of the cluster does."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"
    MONITOR = "monitor"

    @property
    def holds_kv(self) -> bool:
        """Whether a node of this role has an arena of KV slots."""
        return self in (Role.PREFILL, Role.DECODE, Role.STORE)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class ClusterSection(_Section, frozen=True, kw_only=True):
    """The cluster as a whole."""

    name: Annotated[Name, Meta(description="name of the cluster, shown in its status and its list of keys")] = "kv"
    state_dir: Annotated[
        str,
        Meta(min_length=1, description="folder of keys, logs and persisted clocks; relative to this file"),
    ] = "state"
    discovery: Annotated[
        Literal["static", "etcd"],
        Meta(description="how nodes find each other: static, from this file; etcd, from this file and from etcd"),
    ] = "static"
    allow_remote: Annotated[
        bool, Meta(description="allow hosts outside loopback; without it every address must be a loopback one")
    ] = False
    operator_keys: Annotated[
        list[ApiKey],
        Meta(description="bearer tokens that may drain, rebalance, pin and purge, and read /status and /metrics"),
    ] = []

    def __repr__(self) -> str:
        # Keys are secrets: a config may be logged.
        return f"ClusterSection(name={self.name!r}, state_dir={self.state_dir!r}, allow_remote={self.allow_remote})"


class EtcdSection(_Section, frozen=True, kw_only=True):
    """Where etcd is, for `cluster.discovery = "etcd"`. It tells addresses only; whom the bus admits, keys decide."""

    endpoints: Annotated[
        list[Annotated[str, Meta(pattern=r"^https?://[^/?#@]+$")]],
        Meta(min_length=1, max_length=16, description="etcd's client addresses, as http://HOST:PORT; tried in turn"),
    ] = msgspec.field(default_factory=lambda: ["http://127.0.0.1:2379"])
    lease_s: Annotated[
        int, Meta(ge=2, le=600, description="seconds for which etcd lists a process that it does not hear from")
    ] = 5


class ModelSection(_Section, frozen=True, kw_only=True):
    """The model that the cluster serves, and how its KV is stored."""

    id: Annotated[str, Meta(min_length=1, max_length=128, description="model name that clients send")] = (
        "smollm2-135m-instruct"
    )
    path: Annotated[str, Meta(description="GGUF file, relative to this file; empty: the packaged SmolLM2-135M")] = ""
    engine: Annotated[
        Literal["llama", "stub"],
        Meta(description="llama computes with the weights; stub makes tokens by arithmetic, for tests of the fabric"),
    ] = "llama"
    stub_token_us: Annotated[
        int, Meta(ge=0, le=1_000_000, description="microseconds the stub spends on each prompt token it computes")
    ] = 0
    kv_dtype: Annotated[Literal["fp32", "fp16", "bf16"], Meta(description="element type of stored KV")] = "bf16"
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in one KV block")] = 16
    layout: Annotated[
        Literal["block_first", "layer_first"], Meta(description="order of a block's pieces in the arena")
    ] = "layer_first"
    max_context: Annotated[
        int, Meta(ge=0, le=1 << 24, description="most tokens of prompt and answer together; 0: what the model allows")
    ] = 0
    kv_fidelities: Annotated[
        list[Literal["exact", "fp8_e4m3/1", "int8/1"]],
        Meta(
            min_length=1,
            description="stored KV that a request may allow by kv_fidelity; the first is that of requests that say "
            "nothing. KV moves lossily only for those that allow it, and is kept apart from exact KV",
        ),
    ] = msgspec.field(default_factory=lambda: ["exact"])

    @property
    def dtype(self) -> DType:
        """`kv_dtype` as a `DType`."""
        return parse_dtype(self.kv_dtype)


class TransportSection(_Section, frozen=True, kw_only=True):
    """How KV bytes move."""

    backend: Annotated[
        Literal["auto", "shm", "tcp", "ucx"],
        Meta(description="auto: shm on one host; between hosts ucx if allowed and both ends have RDMA, else tcp"),
    ] = "auto"
    allow_ucx: Annotated[
        bool, Meta(description="allow UCX, which has no authentication of its own: trusted fabrics only")
    ] = False
    window_size: Annotated[int, Meta(ge=1, le=64, description="units in flight per peer")] = 8
    unit_bytes: Annotated[
        int, Meta(ge=4096, le=4 << 20, description="most bytes of one unit; a unit never crosses a layer border")
    ] = 1 << 20
    streams: Annotated[int, Meta(ge=1, le=16, description="TCP connections per peer")] = 2
    codec: Annotated[
        Literal["auto", "none", "lz4", "fp8_e4m3", "int8"],
        Meta(
            description="how KV is written over tcp, where the request's fidelity allows it; auto: what moves most "
            "KV a second by measured rates"
        ),
    ] = "auto"
    tls_folder: Annotated[
        str, Meta(description="folder with ca.pem and, per node, ID.pem and ID.key: tcp is encrypted; empty: it is not")
    ] = ""


class BusSection(_Section, frozen=True, kw_only=True):
    """Who is alive. Messages between nodes are always encrypted and authenticated by CURVE."""

    heartbeat_interval_ms: Annotated[int, Meta(ge=10, le=60_000, description="time between heartbeats")] = 250
    suspect_after_ms: Annotated[
        int, Meta(ge=20, le=600_000, description="silence after which a node gets no new work")
    ] = 1_000
    dead_after_ms: Annotated[
        int, Meta(ge=30, le=3_600_000, description="silence after which a node is dead and its claims go")
    ] = 3_000


class HealthSection(_Section, frozen=True, kw_only=True):
    """Thresholds above (ratios: below) which the monitor raises an alarm."""

    kv_transfer_failure_rate: Annotated[float, Meta(ge=0, le=1, description="failed transfers / transfers")] = 0.01
    kv_staleness_ms: Annotated[float, Meta(gt=0, le=1e9, description="age of the oldest update not applied")] = 10.0
    kv_replication_lag: Annotated[int, Meta(ge=0, description="updates of an origin not yet applied")] = 2
    kv_transfer_latency_p99_ms: Annotated[
        float, Meta(gt=0, le=1e9, description="99th percentile of a transfer's time")
    ] = 5.0
    kv_cache_hit_ratio: Annotated[float, Meta(ge=0, le=1, description="prompt tokens found / prompt tokens")] = 0.6


class LimitsSection(_Section, frozen=True, kw_only=True):
    """Bounds on requests; what exceeds one is refused with its name."""

    request_timeout_s: Annotated[float, Meta(gt=0, le=86_400, description="a request's whole life")] = 120.0
    gateway_queue: Annotated[int, Meta(ge=1, le=65_536, description="requests open in a gateway at once")] = 256
    node_queue: Annotated[int, Meta(ge=1, le=65_536, description="requests waiting in one node")] = 64
    max_batch: Annotated[int, Meta(ge=1, le=1024, description="sequences a decode node advances in one step")] = 8
    max_prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 24, description="longest prompt")] = 8_192
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 20, description="longest answer")] = 2_048
    lease_ms: Annotated[int, Meta(ge=100, le=3_600_000, description="life of a lease that nobody renews")] = 10_000


class RoutingSection(_Section, frozen=True, kw_only=True):
    """How the gateway picks nodes."""

    policy: Annotated[
        Literal["kv_aware", "cache_aware", "power_of_two", "round_robin", "consistent_hash"],
        Meta(
            description="kv_aware: longest prefix held, weighed against load; cache_aware: longest prefix while loads "
            "are even; power_of_two: less loaded of two; round_robin: in turn; consistent_hash: by the prompt's start"
        ),
    ] = "kv_aware"
    decode_alone_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000,
            description="what a decode node lacks of a prompt it computes itself when that is expected to take at most "
            "so long, at the rate that the prefill node reports; a hand-over takes some milliseconds by itself. It "
            "holds up the node's other answers for as long. 0: never",
        ),
    ] = 0.0


class ShardingSection(_Section, frozen=True, kw_only=True):
    """Requests that no single node can hold: cut over several, if the engine can compute on pieces."""

    mode: Annotated[
        Literal["auto", "none", "layer", "sequence", "hybrid"],
        Meta(
            description="how a sequence is cut; auto: by layer where that fits, else by sequence; none: it is refused"
        ),
    ] = "auto"
    above_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 24, description="cut also what one node could hold, from this many tokens on; 0: never"),
    ] = 0
    groups: Annotated[
        list[list[Name]],
        Meta(description="for hybrid: nodes of one group share a request by layer, groups share it by sequence"),
    ] = []
    step_timeout_ms: Annotated[
        int, Meta(ge=100, le=600_000, description="time for one stage at one node before its piece counts as lost")
    ] = 30_000
    room_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3_600,
            description="how long a request that lost its place waits for room, as for a node that is being restarted",
        ),
    ] = 5.0


class ReplicationSection(_Section, frozen=True, kw_only=True):
    """Copies of prefixes that are asked for often, so that losing one node does not lose what everybody uses."""

    copies: Annotated[
        int, Meta(ge=1, le=16, description="nodes that shall hold such a prefix; 1: no copies are made")
    ] = 2
    uses_per_minute: Annotated[
        float, Meta(gt=0, le=1e6, description="uses at one node, faded by half each minute, that make a prefix hot")
    ] = 8.0
    share: Annotated[
        float, Meta(ge=0, le=0.5, description="most of a node's blocks that copies may take from colder ones")
    ] = 0.1


class DiskTierSection(_Section, frozen=True, kw_only=True):
    """KV on disk, below each node's memory. Survives restarts; checked by CRC-64 when it is loaded."""

    size: Annotated[Bytes, Meta(description='most bytes of one node, manifest included, as "200 GiB"')]
    path: Annotated[
        str,
        Meta(description="folder, relative to this file, with one below it for each node; empty: in the state folder"),
    ] = ""


class RemoteTierSection(_Section, frozen=True, kw_only=True):
    """KV in an object store, below the disk. Credentials come from environment or profile. Needs the extra `remote`."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^(s3|gs|az|file)://.+$",
            description="s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix or file:///shared/folder",
        ),
    ]
    size: Annotated[Bytes, Meta(description="most bytes of one node")]
    endpoint: Annotated[str, Meta(description="URL of an S3-compatible store that is not Amazon's")] = ""
    abandoned_after_s: Annotated[
        float,
        Meta(
            ge=1, description="what a node left is read by others once it is gone; after so many seconds, also deleted"
        ),
    ] = 600.0


class PoolSection(_Section, frozen=True, kw_only=True):
    """Each node's blocks in memory. With both marks at 0 a block is evicted when its slot is needed, and not before."""

    low_watermark: Annotated[
        float, Meta(ge=0, le=0.5, description="below this share of free slots room is made ahead of need; 0: never")
    ] = 0.0
    high_watermark: Annotated[float, Meta(ge=0, le=0.5, description="and up to this share")] = 0.0


class TiersSection(_Section, frozen=True, kw_only=True):
    """Slower tiers below the memory of nodes that hold KV; none unless they are named."""

    disk: Annotated[DiskTierSection | None, Meta(description="KV on disk")] = None
    remote: Annotated[RemoteTierSection | None, Meta(description="KV in an object store")] = None


class FollowedEngine(_Section, frozen=True, kw_only=True):
    """An engine outside the cluster whose KV events gateways follow, in the form of vLLM and SGLang."""

    name: Annotated[Name, Meta(description="name of the engine in the index")]
    events: Annotated[str, Meta(pattern=r"^tcp://.+:[0-9]+$", description="where it publishes, tcp://host:port")]
    replay: Annotated[str, Meta(pattern=r"^tcp://.+:[0-9]+$", description="where it answers replays")]
    tenant: Annotated[str, Meta(description="whose prompts it serves; empty without tenants")] = ""
    loras: Annotated[dict[str, str], Meta(description="revisions of its adapters, by name")] = {}


class KVEventsSection(_Section, frozen=True, kw_only=True):
    """KV events for other routers, and of other engines. They carry tokens, so nothing is told that is not named."""

    tenants: Annotated[
        list[str], Meta(description='tenants whose KV is told of; "default" in a cluster without tenants')
    ] = []
    follow: Annotated[
        list[FollowedEngine], Meta(description="engines outside the cluster whose KV the gateways' indexes follow")
    ] = []


class TenantConfig(_Section, frozen=True, kw_only=True):
    """Who may ask. Tenants never see each other's prefixes. Without any tenant the gateway asks for no key."""

    id: Annotated[Name, Meta(description="name of the tenant")]
    api_keys: Annotated[
        list[ApiKey],
        Meta(min_length=1, description="bearer tokens of this tenant, 16 characters or more"),
    ]
    salt: Annotated[
        str, Meta(max_length=128, description="kept secret, part of the tenant's namespace beside its id")
    ] = ""

    max_requests: Annotated[
        int, Meta(ge=0, le=65_536, description="requests it may have open at one gateway; 0: as many as fit")
    ] = 0
    pin_quota: Annotated[
        int, Meta(ge=0, le=1 << 28, description="blocks that may be pinned for it on one node by kvctl prefix pin")
    ] = 0
    kv_quota: Annotated[
        Bytes | None,
        Meta(description='bytes of KV it may have in memory of one node, as "4 GiB"; without it as much as fits'),
    ] = None
    retain_quota: Annotated[
        int, Meta(ge=0, le=1 << 28, description="blocks its requests may ask to be kept on one node (kv_retention)")
    ] = 0
    retain_ttl_max_s: Annotated[
        int, Meta(ge=1, le=31_536_000, description="longest time for which its requests may ask that")
    ] = 3_600
    shares_with: Annotated[
        list[Name], Meta(description="tenants whose prefixes this one may read; they see nothing of its own")
    ] = []

    def __repr__(self) -> str:
        # Keys and salts are secrets: a config may be logged.
        return f"TenantConfig(id={self.id!r}, api_keys=<{len(self.api_keys)}>)"

    @property
    def tenant_id(self) -> TenantId:
        return TenantId(self.id)


class NodeConfig(_Section, frozen=True, kw_only=True):
    """One process."""

    id: Annotated[Name, Meta(description="name of the process; unique in the file")]
    role: Annotated[Role, Meta(description="what the process does")]
    bus_port: Annotated[Port, Meta(description="port of the bus's requests")]
    events_port: Annotated[Port, Meta(description="port of the bus's events")]
    http_port: Annotated[Port, Meta(description="port of /healthz, /status and /metrics; of the API on a gateway")]
    host: Annotated[str, Meta(description="IP address that every port of this process is bound on")] = "127.0.0.1"
    data_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)],
        Meta(description="port of KV over tcp; needed on nodes that hold KV unless transport.backend is shm"),
    ] = 0
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 28)] | None, Meta(description="KV blocks this node can hold; or capacity")
    ] = None
    capacity: Annotated[Bytes | None, Meta(description='bytes of KV this node can hold, as "2 GiB"; or slots')] = None
    compute_threads: Annotated[int, Meta(ge=1, le=1024, description="threads of the engine's matrix products")] = 1
    kv_events_port: Annotated[
        int, Meta(ge=0, le=65535, description="port on which KV events are published (see kv_events); 0: none are")
    ] = 0
    kv_replay_port: Annotated[
        int, Meta(ge=0, le=65535, description="port on which KV events are asked for again; with kv_events_port")
    ] = 0

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.id)

    @property
    def bus_endpoint(self) -> str:
        """Where this node takes requests, as ZeroMQ writes it."""
        return f"tcp://{_bracket(self.host)}:{self.bus_port}"

    @property
    def events_endpoint(self) -> str:
        """Where this node publishes events, as ZeroMQ writes it."""
        return f"tcp://{_bracket(self.host)}:{self.events_port}"

    @property
    def http_url(self) -> str:
        """Root of this node's HTTP server, without a slash at its end."""
        return f"http://{_bracket(self.host)}:{self.http_port}"

    def ports(self) -> Iterator[tuple[str, int]]:
        """The ports this node binds, by the field that names each."""
        yield from (("bus_port", self.bus_port), ("events_port", self.events_port), ("http_port", self.http_port))
        if self.data_port:
            yield "data_port", self.data_port
        if self.kv_events_port:
            yield "kv_events_port", self.kv_events_port
        if self.kv_replay_port:
            yield "kv_replay_port", self.kv_replay_port

    def num_slots(self, block_nbytes: int) -> int:
        """How many blocks of that size this node holds; 0 for a role without KV.

        Raises:
            ConfigError: `capacity` is less than one block.
        """
        if self.slots is not None:
            return self.slots
        if self.capacity is None:
            return 0
        count = parse_bytes(self.capacity) // block_nbytes
        if count == 0:
            raise ConfigError(
                file="cluster", path=f"$.node[{self.id}].capacity", problem=f"expected at least {block_nbytes} B"
            )
        return count


class ClusterConfig(_Section, frozen=True, kw_only=True):
    """A whole cluster. Made by `load_config`; one made by hand is checked by `check_config`."""

    cluster: ClusterSection = ClusterSection()
    etcd: EtcdSection = msgspec.field(default_factory=EtcdSection)
    model: ModelSection = ModelSection()
    transport: TransportSection = TransportSection()
    bus: BusSection = BusSection()
    health: HealthSection = HealthSection()
    limits: LimitsSection = LimitsSection()
    routing: RoutingSection = RoutingSection()
    replication: ReplicationSection = ReplicationSection()
    sharding: ShardingSection = ShardingSection()
    pool: PoolSection = PoolSection()
    tiers: TiersSection = TiersSection()
    kv_events: KVEventsSection = KVEventsSection()
    tenants: list[TenantConfig] = msgspec.field(default_factory=list, name="tenant")
    nodes: Annotated[list[NodeConfig], Meta(min_length=1)] = msgspec.field(name="node")

    def node(self, node_id: str) -> NodeConfig:
        """The process of that id.

        Raises:
            ConfigError: no process has it; the message lists those there are.
        """
        for node in self.nodes:
            if node.id == node_id:
                return node
        known = ", ".join(node.id for node in self.nodes)
        raise ConfigError(file="cluster", path="$.node", problem=f"no node has the id {node_id!r}; there are: {known}")

    def by_role(self, *roles: Role) -> list[NodeConfig]:
        """The processes of those roles, in the file's order."""
        return [node for node in self.nodes if node.role in roles]

    @property
    def state_path(self) -> Path:
        """`cluster.state_dir` as a path."""
        return Path(self.cluster.state_dir)

    @property
    def keys_path(self) -> Path:
        """Folder of the nodes' CURVE key pairs."""
        return self.state_path / "keys"

    @property
    def allow_list_path(self) -> Path:
        """The list of the keys that this cluster admits."""
        return self.keys_path / "allowed.toml"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
