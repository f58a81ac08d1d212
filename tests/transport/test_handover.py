"""A hand-over between two agents, over each transport: right bytes, layer by layer, nothing left behind."""

from pathlib import Path

import pytest

from kv_core.block import BlockGeometry, Layout
from kv_core.ids import RequestId
from kv_transport.config import TransportName
from tests.transport.helpers_transport import LARGE, SMALL, pair

TRANSPORTS: list[TransportName] = ["shm", "tcp"]
REQUEST = RequestId("request-1")


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> TransportName:
    name: TransportName = request.param
    return name


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "layouts", [(Layout.LAYER_FIRST, Layout.LAYER_FIRST), (Layout.LAYER_FIRST, Layout.BLOCK_FIRST)], ids=["lf", "mixed"]
)
async def test_a_handover_brings_every_byte(
    transport: TransportName, tmp_path: Path, geometry: BlockGeometry, layouts: tuple[Layout, Layout]
) -> None:
    async with pair(transport, tmp_path, geometry=geometry, layouts=layouts) as (sender, receiver):
        source, target = sender.filled(9, seed=1), receiver.blocks(9)
        tokens = 9 * geometry.block_size - 3
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=tokens)
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=10_000)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(geometry.num_layers):
            handover.submit(layer, source)
            await inbound.layer_ready(layer)
            assert inbound.arrival.layer_ready(layer)
        sent = await handover.finish(10_000)
        received = await inbound.done()
        await inbound.released()
        assert receiver.content(target) == sender.content(source)
        assert receiver.sealed_and_right(target)
        assert sent.nbytes == received.nbytes == inbound.total_bytes == handover.total_bytes
        assert sent.transport == received.transport == transport
        assert sent.retries == 0
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()
