"""What a transfer does about its own faults is told, with the action and its cause, once for each time it is done."""

from pathlib import Path

from kv_core.errors import KVError
from kv_core.ids import RequestId
from kv_transport import FallbackToTcp, RetryWithBackoff
from kv_transport.errors import ChecksumMismatch, ConnectionLost
from kv_transport.recovery import RecoveryAction, TransferTask
from tests.transport.helpers_proxy import flip_at, proxied
from tests.transport.helpers_transport import LARGE, Node, eventually, pair

REQUEST = RequestId("request-1")
COUNT = 4
INSIDE_THE_FIRST_PAYLOAD = 400_000

Told = list[tuple[TransferTask, RecoveryAction, KVError]]


def listen(node: Node) -> Told:
    told: Told = []
    node.agent.on_recovery = lambda task, action, error: told.append((task, action, error))
    return told


async def test_a_unit_that_is_sent_again_is_told_with_its_delay_and_its_link(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, geometry=LARGE, slots=8, tcp_streams=1) as (sender, receiver):
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        async with proxied(metadata, flip_at(INSIDE_THE_FIRST_PAYLOAD, times=1)) as through:
            sender.agent.add_remote_agent(through)
            told = listen(sender)
            source, target = sender.filled(COUNT, seed=1), receiver.blocks(COUNT)
            grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=COUNT * LARGE.block_size)
            inbound = receiver.engine.expect(REQUEST, grant)
            handover = sender.engine.open_handover(REQUEST, grant)
            for layer in range(LARGE.num_layers):
                handover.submit(layer, source)
            await handover.finish(20_000)
            await inbound.done()
            ((task, action, error),) = told
            assert action == RetryWithBackoff(delay_ms=10, attempt=1)
            assert isinstance(error, ChecksumMismatch)
            assert (task.source, task.target) == (name.node, receiver.agent.name.node)
            await sender.agent.remove_remote_agent(receiver.agent.name.node)


async def test_a_link_that_breaks_is_told_as_a_fall_back_to_tcp(tmp_path: Path) -> None:
    async with pair("auto", tmp_path, resume_grace_ms=20_000) as (sender, receiver):
        told = listen(sender)
        source, target = sender.filled(6, seed=1), receiver.blocks(6)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=48)
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=20_000)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)
        (link,) = sender.agent.peer(receiver.agent.name.node).links
        link.fail(ConnectionLost(peer="decode", transport="shm", cause="pulled out"))
        for layer in (1, 2, 3):
            handover.submit(layer, source)
        stats = await handover.finish(20_000)
        await inbound.done()
        assert "tcp" in stats.transports
        ((task, action, error),) = told
        assert action == FallbackToTcp(lz4=True) and task.transport == "shm"
        assert isinstance(error, ConnectionLost)
