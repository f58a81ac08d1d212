"""A connection over tcp is as many streams as configured, and units go over all of them."""

from pathlib import Path

import pytest

from kv_core.ids import RequestId
from kv_transport.backends.stream import Stream
from kv_transport.backends.tcp_link import TcpLink
from kv_transport.units import Unit
from tests.transport.helpers_transport import SMALL, pair

REQUEST = RequestId("request-1")
BLOCKS = 8


@pytest.mark.parametrize("streams", [1, 2, 3])
async def test_units_go_over_every_stream_of_a_connection(
    streams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Stream] = []
    transmit = TcpLink._transmit

    def note(self: TcpLink, lane: object, stream: Stream, seq: int, unit: Unit, nonce: int) -> None:
        used.append(stream)
        transmit(self, lane, stream, seq, unit, nonce)  # type: ignore[arg-type]

    monkeypatch.setattr(TcpLink, "_transmit", note)
    async with pair("tcp", tmp_path, tcp_streams=streams, unit_bytes=4096) as (sender, receiver):
        source, target = sender.filled(BLOCKS, seed=1), receiver.blocks(BLOCKS)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=BLOCKS * SMALL.block_size)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(10_000)
        assert receiver.content(target) == sender.content(source)
        (session,) = receiver.agent.inventory().of("session")
        assert f"{streams} streams" in f"{session.state} {session.detail}"
        assert len(used) == SMALL.num_layers * BLOCKS * SMALL.slot_layer_nbytes // 4096
        assert len({id(stream) for stream in used}) == streams

        used.clear()
        held = receiver.filled(BLOCKS, seed=2)
        tokens = BLOCKS * SMALL.block_size
        lease = receiver.engine.lease_reads(REQUEST, held, seq_start=0, seq_end=tokens, lease_ms=60_000)
        # Reads are answered on the stream they were asked on.
        await sender.engine.fetch(lease, into := sender.blocks(BLOCKS)).wait(10_000)
        assert sender.content(into) == receiver.content(held)
        assert len({id(stream) for stream in used}) == streams
        receiver.engine.release_lease(lease.ticket)
