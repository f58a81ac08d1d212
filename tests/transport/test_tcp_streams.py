"""A connection over tcp is as many streams as configured, units go over all of them, and on one host none is paced."""

import socket
from pathlib import Path

import pytest

from kv_core.ids import RequestId
from kv_transport.backends.stream import Stream
from kv_transport.backends.tcp import on_one_host
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


async def test_neither_end_of_a_connection_within_one_host_is_paced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithms: list[bytes] = []
    start = Stream.start

    def note(self: Stream) -> None:
        algorithms.append(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"))
        start(self)

    monkeypatch.setattr(Stream, "start", note)
    async with pair("tcp", tmp_path, tcp_streams=2) as (sender, receiver):
        target = receiver.blocks(1)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=SMALL.block_size)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, sender.filled(1, seed=1))
        await handover.finish(10_000)
        assert algorithms == [b"reno"] * 4


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("::1", "::1", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_a_host_is_known_by_its_addresses(ours: str, theirs: str, same: bool) -> None:
    assert on_one_host(ours, theirs) is same
