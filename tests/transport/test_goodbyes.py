"""A writer that closes its connection with units unanswered has said goodbye, and its slots are free."""

import asyncio
from pathlib import Path

import pytest

from kv_core.ids import RequestId
from tests.transport.helpers_transport import SMALL, config, introduce, node

REQUEST = RequestId("request-1")


@pytest.mark.parametrize("blocks", [1, 8])
async def test_a_writer_that_leaves_with_units_unanswered_leaves_no_quarantine(tmp_path: Path, blocks: int) -> None:
    async with (
        node("prefill", config("shm", tmp_path / "one")) as sender,
        node("decode", config("shm", tmp_path / "two")) as me,
    ):
        introduce(sender, me)
        grant = me.engine.grant_writes(REQUEST, me.blocks(blocks), seq_start=0, seq_end=blocks * SMALL.block_size)
        inbound = me.engine.expect(REQUEST, grant, timeout_ms=60_000)
        handover = sender.engine.open_handover(REQUEST, grant)
        source = sender.filled(blocks, seed=1)
        handover.submit(0, source)
        await inbound.layer_ready(0)
        handover.submit(1, source)
        handover.submit(2, source)
        await sender.agent.remove_remote_agent(me.agent.name.node)
        inbound.cancel()
        await asyncio.wait_for(inbound.released(), 10)
        assert me.agent.inventory().work == ()
