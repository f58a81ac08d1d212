"""Puts a gateway together: the cluster side behind, the OpenAI-compatible HTTP front before it."""

import asyncio
from collections.abc import Callable

from kv_bus.errors import BusError
from kv_bus.supervisor import ChildSpec
from kv_consistency.errors import FencedError, HolderLostError, ReplicaFencedError
from kv_prefix.errors import TenantQuotaError
from kv_prefix.placement import make_placement_policy
from kv_services.config import ClusterConfig, Role
from kv_services.engine.load import EngineSpec, open_text
from kv_services.errors import NodeError, NodeOverloadedError, RequestExpiredError, RequestTooLargeError
from kv_services.gateway.actor import ClusterCompleter, GatewayContext
from kv_services.gateway.admission import RequestLimits, ServedModel
from kv_services.gateway.completer import RequestRecord
from kv_services.gateway.errors import HttpFault, register_fault
from kv_services.gateway.following import FollowedExplain, followed_engines
from kv_services.gateway.generation import GenerationSettings
from kv_services.gateway.http import FrontHooks, HttpFront
from kv_services.gateway.oversize import Oversize, oversize_rule
from kv_services.gateway.placing import Placer
from kv_services.gateway.prefix_lookup import PrefixLookup
from kv_services.gateway.tenancy import ApiKeys
from kv_services.in_flight_watch import InFlightWatch
from kv_services.membership.actor import ClusterView
from kv_services.messages import Load
from kv_services.past_requests import PastRequests
from kv_services.process import Base, keep, model_path
from kv_services.sharded.errors import ClusterFullError, ShardRefusedError
from kv_transport.errors import TransportError


class FrontChild:
    """The HTTP front as a supervised child."""

    def __init__(self, front: HttpFront) -> None:
        self._front = front
        self._closed: asyncio.Event | None = None

    async def start(self) -> None:
        self._closed = asyncio.Event()
        await self._front.start()

    async def run(self) -> None:
        assert self._closed is not None
        await self._closed.wait()

    async def drain(self, timeout_ns: int) -> bool:
        """Refuse new requests and let the open ones finish."""
        return await self._front.drain(timeout_ns / 1e9) == 0

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.set()
        await self._front.close()


def register_faults() -> None:
    """Say what HTTP makes of the errors that come from the cluster side."""
    # What fits no node is the client's fault, as what does not fit the model is.
    register_fault(RequestTooLargeError, HttpFault(400, "invalid_request_error", "context_length_exceeded"))
    register_fault(TenantQuotaError, HttpFault(429, "rate_limit_error", "kv_quota_exceeded", 1))
    for full in (ClusterFullError, NodeOverloadedError, ShardRefusedError):
        register_fault(full, HttpFault(429, "rate_limit_error", "overloaded", 1))
    # What failed between processes, in every attempt that there was time for, may go well a moment later; so may what
    # this gateway asked in a life that the others hold for over, since it is about to begin another.
    for failing in (BusError, TransportError, NodeError, HolderLostError, ReplicaFencedError, FencedError):
        register_fault(failing, HttpFault(503, "server_error", "try_again", 1))
    register_fault(RequestExpiredError, HttpFault(504, "server_error", "deadline_exceeded"))


def why_unready(cluster: ClusterView) -> str:
    """Why requests cannot be placed now; empty if they can."""
    if not cluster.settled:
        return f"it has not heard yet of {', '.join(cluster.unheard()) or 'any node'}"
    return "" if cluster.alive(Role.DECODE) else "no decode node is alive"


def build(base: Base) -> list[ChildSpec]:
    """The children of a gateway.

    Raises:
        KVError: the weights' tokeniser is not to be had, or the address may not be served without keys.
    """
    register_faults()
    config, node = base.config, base.node
    info, tokenizer = open_text(EngineSpec(config.model.engine, model_path(config), config.model.max_context))
    base.serves(config.model.id, info.weights_revision)
    routing = config.routing
    placer = Placer(
        make_placement_policy(routing.policy),
        make_placement_policy(routing.policy),
        config.model.block_size,
        routing.decode_alone_ms,
    )
    in_flight = InFlightWatch(base.cluster, base.clock)
    lookup = PrefixLookup(config, base.index, info.weights_revision, in_flight)
    following = followed_engines(config, base.index, info.weights_revision)
    past = PastRequests() if following else None
    explain = FollowedExplain(config, info.weights_revision, following, base.index, past)
    completer = ClusterCompleter(
        GatewayContext(
            config=config,
            clock=base.clock,
            bus=base.bus,
            cluster=base.cluster,
            index=base.index,
            placer=placer,
            ownership=base.replica,
            metrics=base.metrics,
            model_id=config.model.id,
            weights_revision=info.weights_revision,
            events=base.events,
            in_flight=in_flight,
            oversize=_oversize(config, info.geometry.num_layers),
            past=past,
        )
    )
    base.load = lambda: Load(running=completer.num_open)
    model = ServedModel(
        config.model.id,
        tokenizer,
        info.max_context,
        info.weights_revision,
        created_s=base.clock.wall_ns() // 1_000_000_000,
        fidelities=tuple(config.model.kv_fidelities),
    )
    limits = config.limits

    def unready() -> str:
        if reason := base.unready():
            return reason
        return why_unready(base.cluster)

    front = HttpFront(
        completer,
        {model.name: model},
        ApiKeys(config.tenants, config.cluster.operator_keys),
        GenerationSettings(
            request_limits=RequestLimits(limits.max_prompt_tokens, limits.max_output_tokens, limits.request_timeout_s),
            max_requests=limits.gateway_queue,
        ),
        FrontHooks(
            metrics=base.metrics_body,
            status=base.status_body,
            unready=unready,
            observe=_observer(base),
            lookup=lookup.answer,
            explain=explain.answer,
        ),
        host=node.host,
        port=node.http_port,
        clock=base.clock,
    )
    return [
        *(keep(f"events of {one.holder.node}", one) for one in following),
        keep("completer", completer),
        keep("http", FrontChild(front), drain_ns=2_000_000_000),
    ]


def _oversize(config: ClusterConfig, num_layers: int) -> Oversize:
    """How requests that no node holds are cut: not at all for an engine that cannot compute on pieces."""
    sharding = config.sharding
    mode = "none" if config.model.engine == "stub" else sharding.mode
    return oversize_rule(mode, sharding.above_tokens, sharding.groups, num_layers, config.model.block_size)


def _observer(base: Base) -> Callable[[RequestRecord], None]:
    def observe(record: RequestRecord) -> None:
        metrics = base.metrics
        if record.ttft_ns is not None:
            metrics.ttft.observe(record.ttft_ns / 1e9)
        if record.outcome == "ok":
            metrics.found_tokens("cached", record.cached_tokens)
            metrics.found_tokens("computed", record.prompt_tokens - record.cached_tokens)

    return observe
