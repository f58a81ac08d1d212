"""The contract where the peer is a process that is killed, stopped or restarted, over ucx.

`shm` and `tcp` go through the same in `test_dead_peers.py`; a crash over `memory` is in `test_memory_backend.py`.
"""

import asyncio
import base64
from pathlib import Path

import pytest

from kv_core.ids import NodeId, RequestId
from kv_transport import WriteGrant
from kv_transport.errors import ConnectionLost, NoTransport, TransferTimeout
from tests.transport.helpers_process import PeerProcess, peer_process
from tests.transport.helpers_transport import SMALL, Node, config, eventually, node

REQUEST = RequestId("request-1")
QUICK: dict[str, int] = {
    "heartbeat_ms": 50,
    "silence_timeout_ms": 400,
    "fence_timeout_ms": 100,
    "connect_timeout_ms": 1_000,
}
BLOCKS = 4
TOKENS = BLOCKS * SMALL.block_size


@pytest.fixture(autouse=True)
def on_one_loop_only(request: pytest.FixtureRequest) -> None:
    """Starting processes that load UCX is dear, and what is tested here does not depend on the loop."""
    if "asyncio" in request.node.name:
        pytest.skip("runs on uvloop")  # what dies is a process: the loop's kind is the contract suite's matter


def push(peer: PeerProcess, me: Node, pause_ms: int) -> WriteGrant:
    """Reserve slots here and let the process fill them."""
    grant = me.engine.grant_writes(REQUEST, me.blocks(BLOCKS), seq_start=0, seq_end=TOKENS)
    peer.tell("push", grant=base64.b64encode(grant.to_bytes()).decode(), seed=1, timeout_ms=20_000, pause_ms=pause_ms)
    return grant


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_writer_that_dies_or_stops_is_shut_out_and_its_slots_come_back(tmp_path: Path, how: str) -> None:
    async with (
        node("decode", config("ucx", tmp_path, **QUICK)) as me,
        peer_process("prefill", "ucx", tmp_path, 1, **QUICK) as peer,
    ):
        await peer.meet(me)
        whole = push(peer, me, 0)
        await me.engine.expect(REQUEST, whole, timeout_ms=20_000).done()
        assert me.sealed_and_right(whole.blocks())
        grant = push(peer, me, 100_000)
        inbound = me.engine.expect(REQUEST, grant, timeout_ms=60_000)
        await inbound.layer_ready(0)
        if how == "kill":
            await peer.kill()
        else:
            peer.stop()
        with pytest.raises((ConnectionLost, TransferTimeout)):
            await inbound.layer_ready(1)
        # A stopped one confirms no fence: its endpoint is closed, and nothing lands after that.
        await asyncio.wait_for(inbound.released(), 10)
        for ref in grant.blocks():
            me.arena.raise_generation(ref.slot)
            me.arena.array[ref.slot] = 7
        if how == "stop":
            peer.go_on()
            await asyncio.sleep(0.3)
        assert (me.arena.array[[ref.slot for ref in grant.blocks()]] == 7).all()
        await eventually(lambda: not me.agent.inventory().work and not me.agent.inventory().of("session"))


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_receiver_that_dies_or_stops_fails_the_writer_in_time(tmp_path: Path, how: str) -> None:
    async with (
        node("prefill", config("ucx", tmp_path, **QUICK)) as me,
        peer_process("decode", "ucx", tmp_path, 1, **QUICK) as peer,
    ):
        await peer.meet(me)
        peer.tell("expect", blocks=BLOCKS, tokens=TOKENS, request=REQUEST, timeout_ms=60_000)
        grant = WriteGrant.from_bytes(base64.b64decode(str((await peer.hear("granted"))["grant"])))
        handover = me.engine.open_handover(REQUEST, grant)
        source = me.filled(BLOCKS, seed=1)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)
        if how == "kill":
            await peer.kill()
        else:
            peer.stop()
        with pytest.raises((ConnectionLost, TransferTimeout, NoTransport)):
            for layer in range(1, SMALL.num_layers):
                handover.submit(layer, source)
            await handover.finish(30_000)
        assert me.agent.inventory().work == ()
        await me.agent.remove_remote_agent(NodeId("decode"))
