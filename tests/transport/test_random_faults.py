"""Random transfers with a peer process that is killed, stopped and restarted at random points.

Every one ends in right bytes or in a typed error within its deadline, and nothing is left of any of them. A failure
prints its seed; `make soak-transport SEED=... TRANSFERS=...` runs it again, or for longer.
"""

import asyncio
import base64
import contextlib
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kv_core.errors import KVError
from kv_core.ids import NodeId, RegionId, RequestId
from kv_transport import Access, ReadGrant, SharedBuffer, WriteGrant, XferDesc, XferOp
from kv_transport.config import TransportName
from tests.transport.helpers_process import PeerProcess, sized_peer_process
from tests.transport.helpers_transport import NO_RESERVE, Node, config, eventually, node
from tests.transport.peer_process import BUFFER_NBYTES, GEOMETRIES, SLOTS, digest_of

SEED = int(os.environ.get("KV_SOAK_SEED", "20"))
TRANSFERS = int(os.environ.get("KV_SOAK_TRANSFERS", "56"))
SHARES: dict[tuple[TransportName, str], int] = {
    ("shm", "small"): 2,
    ("shm", "large"): 2,
    ("tcp", "small"): 1,
    ("tcp", "large"): 1,
    ("ucx", "small"): 1,
}
"""Of all transfers, by transport and size of blocks: small ones are moved where they are asked for."""
SETTINGS: dict[str, int] = {
    "heartbeat_ms": 100,
    "silence_timeout_ms": 800,
    "fence_timeout_ms": 100,
    "connect_timeout_ms": 1_500,
    "unit_timeout_ms": 2_000,
}
OPEN = RegionId(2)
DEADLINE_MS = 6_000
SLACK_S = 20.0
"""For a busy machine; a hang is longer."""

pytestmark = pytest.mark.timeout(max(120, TRANSFERS * 10))


@dataclass
class Plan:
    """One transfer, drawn before anything of it happens."""

    kind: str
    blocks: int
    nbytes: int
    pause_ms: int
    trouble: str
    after_s: float
    stopped_s: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Plan":
        kind = rng.choice(list(KINDS))
        soon = rng.uniform(0, rng.choice([0.05, 0.005]))
        nbytes = rng.choice([64, 5_000, 70_000, BUFFER_NBYTES - 17])
        trouble = rng.choices(["none", "stop", "kill", "restart"], [10, 4, 3, 2])[0]
        return cls(kind, rng.randint(1, 8), nbytes, rng.randint(0, 12), trouble, soon, rng.uniform(0, 1.5))


class Cluster:
    """We, and a peer that has one life after another."""

    def __init__(
        self, me: Node, transport: TransportName, size: str, folder: Path, stack: contextlib.AsyncExitStack
    ) -> None:
        self.me = me
        self.lives = 0
        self._size = size
        self._transport = transport
        self._folder = folder
        self._stack = stack
        self._peer: PeerProcess | None = None

    async def peer(self) -> PeerProcess:
        """The peer, started anew if its last life is over."""
        if self._peer is None or self._peer.process.returncode is not None:
            self.lives += 1
            self._peer = await self._stack.enter_async_context(
                sized_peer_process("peer", self._transport, self._folder, self.lives, self._size, SETTINGS)
            )
            await self._peer.meet(self.me)
        return self._peer


async def make_trouble(peer: PeerProcess, plan: Plan) -> None:
    await asyncio.sleep(plan.after_s)
    match plan.trouble:
        case "stop":
            peer.stop()
            await asyncio.sleep(plan.stopped_s)
            peer.go_on()
        case "kill":
            await peer.kill()
        case "restart":
            # In good order: it closes its agent first.
            peer.tell("quit")
            await peer.process.wait()
        case _:
            pass


def expected(me: Node, count: int, seed: int) -> str:
    """The digest of what `Node.filled` writes."""
    rng, geometry = np.random.default_rng(seed), me.arena.geometry
    return digest_of([rng.bytes(geometry.slot_layer_nbytes) for _ in range(count * geometry.num_layers)])


async def hear_outcome(peer: PeerProcess) -> dict[str, object]:
    """What the peer says of it; a peer that has died says nothing, and that is an outcome, too."""
    try:
        return await peer.outcome()
    except (AssertionError, TimeoutError):
        return {"event": "failed", "error": "died"}


async def peer_pushes(me: Node, peer: PeerProcess, plan: Plan, seed: int) -> str:
    tokens = plan.blocks * me.arena.geometry.block_size
    request = RequestId(f"request-{seed}")
    grant = me.engine.grant_writes(request, me.blocks(plan.blocks), seq_start=0, seq_end=tokens)
    inbound = me.engine.expect(request, grant, timeout_ms=DEADLINE_MS)
    text = base64.b64encode(grant.to_bytes()).decode()
    peer.tell("push", grant=text, seed=seed, timeout_ms=DEADLINE_MS, pause_ms=plan.pause_ms)
    try:
        await inbound.done()
    except KVError as error:
        outcome = type(error).__name__
    else:
        assert me.sealed_and_right(grant.blocks())
        assert digest_of(me.content(grant.blocks())) == expected(me, plan.blocks, seed)
        outcome = "right"
    await inbound.released()
    await hear_outcome(peer)
    return outcome


async def we_push(me: Node, peer: PeerProcess, plan: Plan, seed: int) -> str:
    tokens, request = plan.blocks * me.arena.geometry.block_size, RequestId(f"request-{seed}")
    peer.tell("expect", blocks=plan.blocks, tokens=tokens, request=request, timeout_ms=DEADLINE_MS)
    try:
        heard = await peer.hear("granted")
    except (AssertionError, TimeoutError):
        return "died"
    grant = WriteGrant.from_bytes(base64.b64decode(str(heard["grant"])))
    source = me.filled(plan.blocks, seed)
    outcome = "right"
    try:
        handover = me.engine.open_handover(request, grant)
        for layer in range(me.arena.geometry.num_layers):
            handover.submit(layer, source)
            await asyncio.sleep(plan.pause_ms / 1000)
        await handover.finish(DEADLINE_MS)
    except KVError as error:
        outcome = type(error).__name__
    heard = await hear_outcome(peer)
    if heard["event"] == "received":
        assert heard["right"] and heard["digest"] == expected(me, plan.blocks, seed)
    elif outcome == "right":
        # Our side has every acknowledgement, so the peer had every byte, and has died since.
        assert heard["error"] == "died"
    return outcome


async def we_fetch(me: Node, peer: PeerProcess, plan: Plan, seed: int) -> str:
    peer.tell("lease", blocks=plan.blocks, seed=seed, lease_ms=60_000)
    try:
        heard = await peer.hear("leased")
    except (AssertionError, TimeoutError):
        return "died"
    grant = ReadGrant.from_bytes(base64.b64decode(str(heard["grant"])))
    into = me.blocks(plan.blocks)
    future = me.engine.fetch(grant, into)
    try:
        await future.wait(DEADLINE_MS)
    except KVError as error:
        future.cancel()
        return type(error).__name__
    assert me.sealed_and_right(into) and digest_of(me.content(into)) == expected(me, plan.blocks, seed)
    return "right"


async def peer_fetches(me: Node, peer: PeerProcess, plan: Plan, seed: int) -> str:
    refs = me.filled(plan.blocks, seed)
    tokens = plan.blocks * me.arena.geometry.block_size
    grant = me.engine.lease_reads(RequestId("leased"), refs, seq_start=0, seq_end=tokens, lease_ms=60_000)
    peer.tell("pull", grant=base64.b64encode(grant.to_bytes()).decode(), timeout_ms=DEADLINE_MS)
    heard = await hear_outcome(peer)
    me.engine.release_lease(grant.ticket)
    if heard["event"] != "pulled":
        return str(heard["error"])
    assert heard["right"] and heard["digest"] == expected(me, plan.blocks, seed)
    return "right"


async def we_put_and_get(me: Node, peer: PeerProcess, plan: Plan, seed: int) -> str:
    """Bytes into the peer's open buffer, with a word of it, and back."""
    with SharedBuffer.create(2 * plan.nbytes, "mine", budget=NO_RESERVE) as mine:
        region = me.agent.register_memory(mine, Access.NONE).region
        mine.data[: plan.nbytes] = np.random.default_rng(seed).integers(0, 256, plan.nbytes, np.uint8)
        theirs = [XferDesc(OPEN, 0, plan.nbytes)]
        put = me.agent.initialize_xfer(
            XferOp.WRITE, [XferDesc(region, 0, plan.nbytes)], theirs, NodeId(peer.name), notif=b"put"
        )
        get = me.agent.initialize_xfer(XferOp.READ, [XferDesc(region, plan.nbytes, plan.nbytes)], theirs, put.node)
        outcome = "right"
        async with put, get:
            try:
                for xfer in (put, get):
                    me.agent.transfer(xfer)
                    await xfer.done(DEADLINE_MS)
            except KVError as error:
                outcome = type(error).__name__
        me.agent.deregister_memory(region)
        sent, back = bytes(mine.data_view[: plan.nbytes]), bytes(mine.data_view[plan.nbytes :])
    if outcome == "right":
        assert back == sent
        peer.tell("digest", nbytes=plan.nbytes)
        heard = await hear_outcome(peer)
        assert heard["event"] == "failed" or heard["digest"] == digest_of([sent])
    return outcome


KINDS = {
    "peer pushes": peer_pushes,
    "we push": we_push,
    "we fetch": we_fetch,
    "peer fetches": peer_fetches,
    "we put and get": we_put_and_get,
}


async def run(transport: TransportName, size: str, folder: Path, count: int, seed: int) -> dict[str, int]:
    """`count` transfers; how many ended how."""
    rng = random.Random(f"{seed}/{transport}/{size}")
    outcomes: dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:
        settings = config(transport, folder / "sockets", **SETTINGS)
        me = await stack.enter_async_context(node("me", settings, geometry=GEOMETRIES[size], slots=SLOTS[size]))
        cluster = Cluster(me, transport, size, folder, stack)
        for number in range(count):
            plan = Plan.draw(rng)
            peer = await cluster.peer()
            trouble = asyncio.create_task(make_trouble(peer, plan))
            try:
                async with asyncio.timeout(DEADLINE_MS / 1000 + SLACK_S):
                    outcome = await KINDS[plan.kind](me, peer, plan, seed * 1_000_000 + number)
                    await trouble
                    await eventually(lambda: not me.agent.inventory().work, SLACK_S)
            except (AssertionError, TimeoutError) as failure:
                left = [str(item) for item in me.agent.inventory().work]
                raise AssertionError(
                    f"seed {seed}, {transport}, {size}, transfer {number}, {plan}, left {left}"
                ) from failure
            finally:
                trouble.cancel()
                await asyncio.gather(trouble, return_exceptions=True)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            # On a starved machine an undisturbed peer may count as silent, too; it cannot count as anything else.
            expected_ends = {"right", "TransferTimeout", "ConnectionLost", "GrantRefused"}
            assert plan.trouble != "none" or outcome in expected_ends, f"seed {seed}, {number}, {plan}: {outcome}"
    return outcomes


def share_of(name: TransportName, size: str) -> int:
    """How many transfers are its own; all shares together are all transfers."""
    before = sum(list(SHARES.values())[: list(SHARES).index((name, size))])
    through, every = before + SHARES[name, size], sum(SHARES.values())
    return TRANSFERS * through // every - TRANSFERS * before // every


@pytest.mark.parametrize(("name", "size"), list(SHARES))
async def test_every_transfer_ends_in_right_bytes_or_a_typed_error(
    name: TransportName, size: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "asyncio" in request.node.name:
        pytest.skip("runs on uvloop")  # the processes, not the loop, make it what it is
    count = share_of(name, size)
    outcomes = await run(name, size, tmp_path, count, SEED)
    print(f"{name}, {size} blocks: {count} transfers, {outcomes}")
    assert sum(outcomes.values()) == count
    assert outcomes["right"] >= count // 3
