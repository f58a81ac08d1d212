"""What a lossy hand-over leaves to be compared, and where a codec cannot be had at all."""

from pathlib import Path

import numpy as np
import pytest

from kv_core.ids import RequestId
from kv_transport import TransportConfig
from kv_transport.codecs import Codec
from kv_transport.config import TransportName
from kv_transport.errors import CodecFailed, InvalidDescriptor
from tests.transport.helpers_transport import SMALL, pair

REQUEST = RequestId("request-1")


@pytest.mark.parametrize("codec", [Codec.FP8_E4M3, Codec.INT8, Codec.LZ4])
async def test_the_sender_knows_the_checksums_of_what_its_codec_made(codec: Codec, tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, unit_bytes=4096) as (sender, receiver):
        source, target = sender.blocks(6), receiver.blocks(6)
        rng = np.random.default_rng(1)
        for ref in source:
            cell = sender.arena.array[ref.slot]
            cell[...] = rng.standard_normal(cell.shape).astype(np.float32).view(np.uint32) >> 16
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=8, seq_end=56, accept=list(Codec)[:4])
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant, codec=codec)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(20_000)
        await inbound.done()
        expected = sender.arena.checks[:, [ref.slot for ref in source]]
        assert len(handover.lossy_checks) == (0 if codec.lossless else SMALL.num_layers * 6)
        for place, check in handover.lossy_checks.items():
            assert expected[place] != check
            expected[place] = check
        assert np.array_equal(receiver.arena.checks[:, [ref.slot for ref in target]], expected)
        assert receiver.sealed_and_right(target)


async def test_where_nothing_encodes_a_codec_is_refused_naming_both(tmp_path: Path) -> None:
    async with pair("shm", tmp_path) as (sender, receiver):
        grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(2), seq_start=0, seq_end=16, accept=list(Codec))
        with pytest.raises(CodecFailed, match="fp8_e4m3: transport shm moves bytes as they are"):
            sender.engine.open_handover(REQUEST, grant, codec=Codec.FP8_E4M3)
        lease = sender.engine.lease_reads(REQUEST, sender.filled(2, 1), seq_start=0, seq_end=16, lease_ms=60_000)
        with pytest.raises(CodecFailed, match="int8: transport shm moves bytes as they are"):
            receiver.engine.fetch(lease, receiver.blocks(2), codec=Codec.INT8, accept=list(Codec))
        sender.engine.release_lease(lease.ticket)
        assert sender.agent.inventory().of("transfer") == receiver.agent.inventory().of("transfer") == ()
    transports: tuple[TransportName, ...] = ("shm", "ucx", "memory")
    for transport in transports:
        with pytest.raises(InvalidDescriptor, match=f"'lz4' is invalid: {transport} moves bytes as they are"):
            TransportConfig(transport=transport, codec="lz4")
