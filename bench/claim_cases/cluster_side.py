"""The optimised side: the cluster as it is shipped, each process by its own command, asked over its public HTTP API.

A gateway, a prefill and a decode node. The hand-over goes over tcp; which bytes are sent, when, and in what form, the
cluster decides by its defaults.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec

from bench.claim_cases.sides import Answered, ClaimError, Held
from bench.stream_cases.clients import resident_mib
from kv_services.config import (
    BusSection,
    ClusterConfig,
    LimitsSection,
    ModelSection,
    NodeConfig,
    TenantConfig,
    TransportSection,
)
from kv_services.engine.interface import ChatMessage
from kv_services.kvctl.demo.client import LINE_BYTES_MAX, RequestFailedError, ask
from kv_services.launch import LocalCluster, PortReservation, local_config
from kv_services.launch.group import service_command
from tests.integration.helpers_integration import Fabric

_KEY = "claim-" + "k" * 16
_OPERATOR_KEY = "claim-" + "o" * 16
_DECODE = "decode-1"
_TIMEOUT_S = 600.0


def cluster_config(
    ports: PortReservation, near: str, far: str, model: ModelSection, slots: int, max_prompt_tokens: int
) -> ClusterConfig:
    """Gateway and prefill node at `near`, the decode node at `far`."""
    config = local_config(
        ports,
        name="claim",
        prefill=1,
        decode=1,
        monitor=False,
        slots=slots,
        model=model,
        transport=TransportSection(backend="tcp"),
        # A NumPy engine keeps a node's interpreter for longer than one on a GPU does.
        bus=BusSection(heartbeat_interval_ms=500, suspect_after_ms=5_000, dead_after_ms=20_000),
        limits=LimitsSection(request_timeout_s=_TIMEOUT_S, lease_ms=60_000, max_prompt_tokens=max_prompt_tokens),
    )
    if near == far:
        return config
    return msgspec.structs.replace(
        config,
        # What leaves loopback needs a tenant with a key, and who looks at its processes then needs one too.
        cluster=msgspec.structs.replace(config.cluster, allow_remote=True, operator_keys=[_OPERATOR_KEY]),
        tenants=[TenantConfig(id="claim", api_keys=[_KEY])],
        nodes=[msgspec.structs.replace(node, host=far if node.id == _DECODE else near) for node in config.nodes],
    )


class ClusterSide:
    """See `sides.Side`."""

    def __init__(self, fabric: Fabric, max_tokens: int, block_nbytes: int) -> None:
        self._fabric = fabric
        self._max_tokens, self._block_nbytes = max_tokens, block_nbytes

    async def ask(self, number: int, chat: Sequence[ChatMessage]) -> Answered:
        """See `Side.ask`."""
        first_ns = 0

        def on_token(text: str) -> None:
            nonlocal first_ns
            first_ns = first_ns or time.monotonic_ns()

        gateway, model = self._fabric.cluster.url("gateway"), self._fabric.config.model.id
        asked_ns = time.monotonic_ns()
        try:
            answer = await ask(self._fabric.session, gateway, model, number, chat, self._max_tokens, on_token)
        except RequestFailedError as error:
            raise ClaimError(str(error)) from error
        told = answer.fabric
        if told.transport != "tcp" or not told.handover_tail_ms:
            raise ClaimError(f"request {number} was not handed over by tcp: {told}")
        first_ms = (first_ns - asked_ns) / 1e6
        return Answered(
            tokens=answer.tokens,
            first_ms=first_ms,
            nbytes=told.kv_bytes_moved,
            handover_ms=told.handover_tail_ms,
            sending_ms=told.handover_ms,
            # HTTP, the gateway and reserving room count here too: what came before the prefill node heard of it.
            decode_first_ms=first_ms - told.prefill_ms,
        )

    async def held(self) -> Held:
        """See `Side.held`. A request is live from the moment when room is reserved for it, before its KV comes."""
        report = await self._fabric.status(_DECODE)
        if report.slots is None:
            raise ClaimError(f"{_DECODE} does not say what it holds")
        return Held(report.running, (report.slots.pinned + report.slots.quarantined) * self._block_nbytes)

    def resident_mib(self) -> dict[str, float]:
        """See `Side.resident_mib`."""
        return {node.id: resident_mib(self._fabric.cluster.pid(node.id)) for node in self._fabric.config.nodes}


@contextlib.asynccontextmanager
async def cluster_side(
    config: ClusterConfig, far_prefix: Sequence[str], max_tokens: int, block_nbytes: int
) -> AsyncIterator[ClusterSide]:
    """The cluster, its members knowing each other; the decode node is started by `far_prefix`.

    Raises:
        LaunchError: it did not start.
        ClaimError: something of it is left behind.
    """

    def command(config_file: Path, node: NodeConfig) -> list[str]:
        return [*(far_prefix if node.id == _DECODE else ()), *service_command(config_file, node)]

    cluster = LocalCluster(config, command=command)
    headers = {"Authorization": f"Bearer {_KEY}"} if config.tenants else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        cluster,
        aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=LINE_BYTES_MAX) as session,
    ):
        fabric = Fabric(cluster, session)
        names = {node.id for node in config.nodes}
        for name in sorted(names):
            await fabric.all_alive(name, names - {name})
        yield ClusterSide(fabric, max_tokens, block_nbytes)
    if cluster.leftovers:
        raise ClaimError(f"left behind: {cluster.leftovers}")
