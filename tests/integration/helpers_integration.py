"""A real cluster of processes with the stub engine, and clients that hold every token against the oracle.

The stub's tokens are printable ASCII and one byte each, so the text of an answer is its tokens.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kv_core.block import BlockGeometry
from kv_services.config import (
    BusSection,
    ClusterConfig,
    LimitsSection,
    ModelSection,
    ReplicationSection,
    RoutingSection,
    TenantConfig,
    TiersSection,
    TransportSection,
)
from kv_services.engine.load import STUB_GEOMETRY
from kv_services.engine.stub import StubModel
from kv_services.launch import LocalCluster, PortReservation, local_config
from kv_services.status_report import StatusReport, decode_status

BLOCK = 16
DEADLINE_S = 90.0
"""Nothing here takes that long; whatever does is stuck."""

MODEL = ModelSection(id="stub", engine="stub", block_size=BLOCK)
GEOMETRY: BlockGeometry = STUB_GEOMETRY.block_geometry(MODEL.dtype, BLOCK)
_ORACLE = StubModel(STUB_GEOMETRY)
Json = Any  # what a JSON text decodes to: tests look into it freely


@lru_cache(maxsize=4096)
def expected(prompt: tuple[int, ...], count: int) -> bytes:
    """The answer of `count` tokens that a correct cluster gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_ORACLE.expected_token(tokens, GEOMETRY))
    return bytes(tokens[len(prompt) :])


def prompt(seed: int, length: int, shared: int = 0) -> tuple[int, ...]:
    """`length` tokens of 0 to 255; the first `shared` of them are the same for every seed."""
    return tuple((i * 7 + 3) % 251 if i < shared else (i * i + seed * 101 + i // 3) % 256 for i in range(length))


@dataclass
class Answer:
    """What a client saw of one request."""

    status: int = 200
    text: bytes = b""
    finish: str = ""
    error: dict[str, Json] = field(default_factory=dict)
    retry_after: str | None = None
    usage: dict[str, Json] = field(default_factory=dict)
    fabric: dict[str, Json] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def moved(self) -> int:
        return int(self.fabric["kv_bytes_moved"])

    def is_right(self, tokens: Sequence[int], count: int) -> bool:
        return self.status == 200 and not self.error and self.text == expected(tuple(tokens), count)

    def is_clear_error(self) -> bool:
        return bool(self.error.get("message")) and bool(self.error.get("code"))


class Fabric:
    """A running cluster, and a client of it."""

    def __init__(self, cluster: LocalCluster, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.session = session

    @property
    def config(self) -> ClusterConfig:
        return self.cluster.config

    @property
    def kv_nodes(self) -> list[str]:
        return [node.id for node in self.config.nodes if node.role.holds_kv]

    def body(self, tokens: Sequence[int], count: int, **extra: Json) -> dict[str, Json]:
        return {"model": self.config.model.id, "prompt": list(tokens), "max_tokens": count, "temperature": 0, **extra}

    async def ask(self, tokens: Sequence[int], count: int, *, key: str = "", **extra: Json) -> Answer:
        """One request, not streamed."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.cluster.url('gateway')}/v1/completions"
        async with self.session.post(url, json=self.body(tokens, count, **extra), headers=headers) as response:
            got = await response.json()
            retry = response.headers.get("Retry-After")
            if response.status != 200:
                return Answer(response.status, error=got["error"], retry_after=retry)
            choice = got["choices"][0]
            text = choice["text"].encode()
            return Answer(200, text, choice["finish_reason"], usage=got["usage"], fabric=got["kv_fabric"])

    async def stream(
        self, tokens: Sequence[int], count: int, on_text: Callable[[bytes], Awaitable[None]] | None = None
    ) -> Answer:
        """One streamed request; `on_text` hears of the text so far after each piece of it."""
        url = f"{self.cluster.url('gateway')}/v1/completions"
        body = self.body(tokens, count, stream=True, stream_options={"include_usage": True})
        answer = Answer()
        async with self.session.post(url, json=body) as response:
            if response.status != 200:
                got = await response.json()
                return Answer(response.status, error=got["error"], retry_after=response.headers.get("Retry-After"))
            async for message in events(response):
                answer.error = message.get("error") or answer.error
                answer.usage = message.get("usage") or answer.usage
                answer.fabric = message.get("kv_fabric") or answer.fabric
                for choice in message.get("choices", ()):
                    answer.finish = choice["finish_reason"] or answer.finish
                    answer.text += choice["text"].encode()
                    if choice["text"] and on_text is not None:
                        await on_text(answer.text)
        return answer

    @contextlib.asynccontextmanager
    async def opened(self, tokens: Sequence[int], count: int) -> AsyncIterator[aiohttp.ClientResponse]:
        """A streamed request of which nothing was read; leaving the context drops the connection."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
            url = f"{self.cluster.url('gateway')}/v1/completions"
            async with session.post(url, json=self.body(tokens, count, stream=True)) as response:
                yield response
                response.close()

    async def get(self, node_id: str, path: str) -> tuple[int, str]:
        async with self.session.get(f"{self.cluster.url(node_id)}{path}", headers=self._operator) as response:
            return response.status, await response.text()

    @property
    def _operator(self) -> dict[str, str]:
        keys = self.config.cluster.operator_keys
        return {"Authorization": f"Bearer {keys[0]}"} if keys else {}

    async def holders(self, tokens: Sequence[int], tenant: str = "") -> dict[str, int]:
        """Who holds how many blocks of a prompt, as the gateway's index has it."""
        body = {"tokens": list(tokens)} | ({"tenant": tenant} if tenant else {})
        url = f"{self.cluster.url('gateway')}/prefix/lookup"
        async with self.session.post(url, json=body, headers=self._operator) as response:
            assert response.status == 200, await response.text()
            return {one["node"]: one["blocks"] for one in (await response.json())["holders"]}

    async def all_held(self, tokens: Sequence[int], blocks: int, nodes: Iterable[str], tenant: str = "") -> None:
        """Wait until the gateway knows that these hold that much of a prompt: claims reach it behind the answers."""
        wanted, seen = set(nodes), dict[str, int]()

        async def known() -> bool:
            seen.clear()
            seen.update(await self.holders(tokens, tenant))
            return all(seen.get(node, 0) >= blocks for node in wanted)

        await until(known, lambda: f"{blocks} blocks at {wanted}, but {seen}")

    async def status(self, node_id: str) -> StatusReport:
        status, text = await self.get(node_id, "/status")
        assert status == 200, (node_id, status, text)
        return decode_status(text.encode())

    async def metric(self, node_id: str, name: str) -> float:
        """The sum of a metric's samples at one process; 0 when it has none."""
        _, text = await self.get(node_id, "/metrics")
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return sum(float(value) for key, value in lines if key.partition("{")[0] == name)

    async def settle(self, nodes: Iterable[str] | None = None) -> list[StatusReport]:
        """Wait until nothing is open anywhere, then check each node's books and return what they say."""
        wanted = list(nodes if nodes is not None else [node.id for node in self.config.nodes])
        reports: list[StatusReport] = []

        async def idle() -> bool:
            reports[:] = [await self.status(node_id) for node_id in wanted]
            return not any(report.open or report.running or report.waiting for report in reports)

        await until(idle, lambda: str([(r.node, r.open, r.running, r.waiting) for r in reports]))
        for report in reports:
            if report.slots is not None:
                slots = report.slots
                assert slots.free + slots.cached + slots.pinned + slots.quarantined == slots.total, report
                assert slots.pinned == slots.quarantined == 0, report
        return reports

    async def all_alive(self, node_id: str, members: Iterable[str]) -> None:
        """Wait until a process holds these for alive."""
        wanted = set(members)
        seen: dict[str, str] = {}

        async def alive() -> bool:
            try:
                seen.update((await self.status(node_id)).members)
            except aiohttp.ClientConnectionError as error:  # between two lives it has no server
                seen.clear()
                seen["nobody"] = str(error)
                return False
            return all(seen.get(member) == "alive" for member in wanted)

        await until(alive, lambda: f"{node_id} sees {seen}")

    def last_lines(self) -> str:
        """What every process wrote last, for a failed test's report."""
        return "\n".join(f"== {node.id}\n{self.cluster.logs(node.id, lines=25)}" for node in self.config.nodes)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Json]]:
    """The server-sent events of a streamed answer."""
    async for line in response.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line[6:])


async def until(
    condition: Callable[[], Awaitable[bool]], what: Callable[[], str] = str, timeout_s: float = DEADLINE_S
) -> None:
    """Wait for a condition; `what` says how things stand when it does not come."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not await condition():
        assert loop.time() < end, f"not within {timeout_s} s: {what()}"
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def running(
    *,
    prefill: int = 1,
    decode: int = 1,
    slots: int = 256,
    backend: str = "shm",
    monitor: bool = False,
    limits: LimitsSection | None = None,
    tenants: Sequence[TenantConfig] = (),
    operator_keys: Sequence[str] = (),
    tiers: TiersSection | None = None,
    tls_folder: str = "",
    codec: str = "auto",
    routing: RoutingSection | None = None,
    replication: ReplicationSection | None = None,
    bus: BusSection | None = None,
    model: ModelSection = MODEL,
) -> AsyncIterator[Fabric]:
    """A cluster whose members all know each other; on the way out nothing of it may be left."""
    with PortReservation() as ports:
        config = local_config(
            ports,
            prefill=prefill,
            decode=decode,
            slots=slots,
            monitor=monitor,
            limits=limits or LimitsSection(request_timeout_s=60.0),
            transport=TransportSection(
                backend=backend,  # type: ignore[arg-type]  # checked by the launcher
                allow_ucx=backend == "ucx",
                tls_folder=tls_folder,
                codec=codec,  # type: ignore[arg-type]
            ),
            tenants=tenants,
            tiers=tiers,
            bus=bus,
            model=model,
        )
        cluster_section = msgspec.structs.replace(config.cluster, operator_keys=list(operator_keys))
        config = msgspec.structs.replace(config, cluster=cluster_section, routing=routing or config.routing)
        config = msgspec.structs.replace(config, replication=replication or config.replication)
        cluster = LocalCluster(config)
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with cluster:
            pids = [cluster.pid(node.id) for node in config.nodes]
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                fabric = Fabric(cluster, session)
                names = {node.id for node in config.nodes}
                for name in sorted(names):
                    await fabric.all_alive(name, names - {name})
                yield fabric
                pids += [cluster.pid(node.id) for node in config.nodes]
    assert cluster.leftovers == []
    assert not any(map(alive, pids))
