"""Hand the KV of a request from one arena to another, layer by layer, and show when each layer is there.

Run it with `python handover.py`. Both agents live in this process; between processes only the way in which the
metadata and the grant travel would differ.
"""

import asyncio
import tempfile
from pathlib import Path

from kv_core.block import BlockGeometry, BlockRef
from kv_core.dtypes import DType
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_transport import AgentMetadata, Arena, KVCacheTransferEngine, TransferAgent, TransportConfig, WriteGrant

GEOMETRY = BlockGeometry(num_layers=4, num_kv_heads=2, head_dim=64, dtype=DType.FP16, block_size=16)
REQUEST = RequestId("request-1")
TOKENS = 40


def introduce(one: TransferAgent, other: TransferAgent) -> None:
    """What goes over an authenticated bus between real nodes."""
    one.add_remote_agent(AgentMetadata.from_bytes(other.get_agent_metadata(*one.name).to_bytes()))


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = TransportConfig(socket_folder=Path(folder) / "sockets")
        with Arena.create(GEOMETRY, num_slots=8) as source, Arena.create(GEOMETRY, num_slots=8) as target:
            async with (
                TransferAgent(NodeId("prefill"), Incarnation(1), config) as prefill,
                TransferAgent(NodeId("decode"), Incarnation(1), config) as decode,
            ):
                introduce(prefill, decode)
                introduce(decode, prefill)
                await hand_over(prefill, source, decode, target)


async def hand_over(prefill: TransferAgent, source: Arena, decode: TransferAgent, target: Arena) -> None:
    from_region, to_region = prefill.register_memory(source).region, decode.register_memory(target).region

    # The decode node reserves slots and grants writes into them.
    receiver = KVCacheTransferEngine(decode)
    reserved = [BlockRef(to_region, slot, target.raise_generation(slot)) for slot in (5, 1, 2)]
    grant = receiver.grant_writes(REQUEST, reserved, seq_start=0, seq_end=TOKENS)
    inbound = receiver.expect(REQUEST, grant, timeout_ms=5_000)

    # The prefill node gets the grant, and sends each layer as soon as it has computed it.
    sender = KVCacheTransferEngine(prefill)
    handover = sender.open_handover(REQUEST, WriteGrant.from_bytes(grant.to_bytes()))
    computed = [BlockRef(from_region, slot, source.raise_generation(slot)) for slot in (0, 1, 2)]
    for layer in range(GEOMETRY.num_layers):
        for ref in computed:
            source.array[ref.slot, layer] = layer + ref.slot / 8
        source.seal(layer, [ref.slot for ref in computed])
        handover.submit(layer, computed)
        await inbound.layer_ready(layer)
        print(f"layer {layer} is verified at the decode node")
    stats = await handover.finish()

    for mine, theirs in zip(computed, reserved, strict=True):
        assert (source.array[mine.slot] == target.array[theirs.slot]).all()
    print(f"{stats.nbytes} bytes in {stats.units} units over {stats.transport}, {stats.retries} retries")
    await sender.close()
    await receiver.close()


if __name__ == "__main__":
    asyncio.run(main())
