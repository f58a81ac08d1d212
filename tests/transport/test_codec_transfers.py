"""Codecs in transfers: what was negotiated is what crosses the wire, and what arrives is known for what it is."""

import asyncio
import dataclasses
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_core.block import BlockGeometry, BlockRef, Layout
from kv_core.dtypes import DType
from kv_core.ids import RequestId
from kv_core.namespace import EXACT, Fidelity
from kv_transport import Access, XferDesc, XferOp
from kv_transport.backends import wire_form
from kv_transport.backends.payload import Source
from kv_transport.codec_rates import CodecRates
from kv_transport.codecs import Codec, decode_cell, encode_cell, encoded_cell_nbytes
from kv_transport.config import TransportName
from kv_transport.errors import ChecksumMismatch, CodecFailed, ConnectionLost, GeometryMismatch, GrantRefused
from kv_transport.stream_io import DO_NOT_WAIT
from tests.transport.helpers_transport import LARGE, SMALL, Node, config, eventually, introduce, node, pair

REQUEST = RequestId("request-1")
LOSSY = [Codec.FP8_E4M3, Codec.INT8]
FP8_ARENA = dataclasses.replace(SMALL, dtype=DType.FP8_E4M3)


def fill(owner: Node, count: int, seed: int, scale: float = 1.0) -> list[BlockRef]:
    """Blocks of normal bf16 numbers, sealed."""
    refs, rng = owner.blocks(count), np.random.default_rng(seed)
    for ref in refs:
        values = (rng.standard_normal(owner.arena.array[ref.slot].shape) * scale).astype(np.float32)
        owner.arena.array[ref.slot] = values.view(np.uint32) >> 16
        owner.arena.seal_block(ref.slot)
    return refs


def through(codec: Codec, geometry: BlockGeometry, cells: list[bytes]) -> list[bytes]:
    """What a codec makes of cells."""
    found = []
    for cell in cells:
        data, out = memoryview(bytearray(encoded_cell_nbytes(codec, geometry))), bytearray(len(cell))
        encode_cell(codec, geometry, memoryview(cell), data)
        decode_cell(codec, geometry, data, memoryview(out))
        found.append(bytes(out))
    return found


@pytest.mark.parametrize("codec", LOSSY)
async def test_a_handover_by_a_lossy_codec_brings_what_it_makes_and_says_so(codec: Codec, tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, geometry=LARGE, slots=16, layouts=(Layout.LAYER_FIRST, Layout.BLOCK_FIRST)) as (
        sender,
        receiver,
    ):
        source, target = fill(sender, 5, seed=1), receiver.blocks(5)
        grant = receiver.engine.grant_writes(
            REQUEST, target, seq_start=0, seq_end=5 * LARGE.block_size, accept=[Codec.LZ4, codec]
        )
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=20_000)
        assert inbound.fidelity == EXACT
        handover = sender.engine.open_handover(REQUEST, grant, codec=codec)
        for layer in range(LARGE.num_layers):
            handover.submit(layer, source)
        sent, received = await handover.finish(20_000), await inbound.done()
        assert receiver.content(target) == through(codec, LARGE, sender.content(source))
        assert receiver.sealed_and_right(target), "each cell has the checksum of what it became"
        assert inbound.fidelity == handover.fidelity == codec.fidelity == Fidelity(codec.value, 1)
        assert sent.nbytes == received.nbytes == grant.total_bytes
        assert sent.wire_nbytes == received.wire_nbytes <= 0.54 * grant.total_bytes
        assert set(sent.codecs) == set(received.codecs) == {codec.value}
        assert handover.explain() == f"{codec.value}: it was asked for"
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


@pytest.mark.parametrize("codec", [*LOSSY, Codec.LZ4])
async def test_a_fetch_takes_what_its_reader_accepts(codec: Codec, tmp_path: Path) -> None:
    """Each codec in turn is switched on, and what is read is right within its error bound."""
    async with pair("tcp", tmp_path) as (reader, holder):
        blocks, into = fill(holder, 6, seed=2), reader.blocks(6)
        for ref in blocks:
            holder.arena.array[ref.slot][..., 3:] = 0x3F80  # something for LZ4 to do
            holder.arena.seal_block(ref.slot)
        grant = holder.engine.lease_reads(REQUEST, blocks, seq_start=0, seq_end=48, lease_ms=60_000)
        future = reader.engine.fetch(grant, into, accept=[codec], codec=codec)
        stats = await future.wait(20_000)
        expected = holder.content(blocks)
        if not codec.lossless:
            expected = through(codec, SMALL, expected)
        assert reader.content(into) == expected
        assert reader.sealed_and_right(into)
        assert future.fidelity == codec.fidelity
        assert set(stats.codecs) == {codec.value} and stats.wire_nbytes < stats.nbytes


async def test_lz4_shrinks_what_it_can_and_leaves_the_rest_raw(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, geometry=LARGE, slots=16) as (sender, receiver):
        noise, target = sender.filled(4, seed=3), receiver.blocks(4)
        for ref in noise:
            sender.arena.cell(ref.slot, 1)[:] = bytes(LARGE.slot_layer_nbytes)
            sender.arena.seal_block(ref.slot)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=4 * LARGE.block_size)
        handover = sender.engine.open_handover(REQUEST, grant, codec=Codec.LZ4)
        for layer in range(LARGE.num_layers):
            handover.submit(layer, noise)
        stats = await handover.finish(20_000)
        assert receiver.content(target) == sender.content(noise)
        assert receiver.sealed_and_right(target)
        assert stats.codecs == {"none": 2, "lz4": 1}
        assert stats.wire_nbytes < stats.nbytes * 0.7
        assert handover.fidelity == EXACT


async def test_plain_transfers_may_go_by_lz4(tmp_path: Path) -> None:
    settings = dataclasses.replace(config("tcp", tmp_path), codec="lz4")
    async with node("one", settings) as one, node("two", settings, access=Access.WRITE) as two:
        introduce(one, two)
        one.arena.data[:] = 7
        for op in (XferOp.WRITE, XferOp.READ):
            one.arena.data[:10_000] = np.arange(10_000) % 50 if op is XferOp.WRITE else 0
            xfer = one.agent.initialize_xfer(
                op, [XferDesc(one.region, 0, 65_000)], [XferDesc(two.region, 100, 65_000)], two.agent.name.node
            )
            async with xfer:
                one.agent.transfer(xfer)
                stats = await xfer.done(20_000)
            assert stats.codecs == {"lz4": 1} and stats.wire_nbytes < 10_000
            assert bytes(one.arena.data[:65_000]) == bytes(two.arena.data[100:65_100])


async def test_shared_memory_moves_bytes_as_they_are_whatever_is_accepted(tmp_path: Path) -> None:
    async with pair("auto", tmp_path) as (sender, receiver):
        source, target = fill(sender, 2, seed=4), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16, accept=LOSSY)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant, codec=Codec.FP8_E4M3)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        stats = await handover.finish(20_000)
        assert receiver.content(target) == sender.content(source)
        assert stats.codecs == {"none": SMALL.num_layers} and inbound.fidelity == handover.fidelity == EXACT
        assert handover.explain() == "none: shm moves bytes as they are"


# Refusals name both sides.


async def test_a_codec_that_is_not_accepted_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(2), seq_start=0, seq_end=16)
        with pytest.raises(GeometryMismatch, match="ours is fp8_e4m3, theirs is none, lz4"):
            sender.engine.open_handover(REQUEST, grant, codec=Codec.FP8_E4M3)
        lease = sender.engine.lease_reads(REQUEST, fill(sender, 2, 1), seq_start=0, seq_end=16, lease_ms=60_000)
        with pytest.raises(GeometryMismatch, match="codec differs"):
            receiver.engine.fetch(lease, receiver.blocks(2), codec=Codec.INT8)
        assert sender.agent.inventory().of("transfer") == receiver.agent.inventory().of("transfer") == ()


async def test_a_sender_that_does_not_ask_is_refused_by_the_receiver(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        source, target = fill(sender, 2, seed=5), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
        lying = msgspec.structs.replace(grant, codecs=["fp8_e4m3"])
        handover = sender.engine.open_handover(REQUEST, lying, codec=Codec.FP8_E4M3)
        handover.submit(0, source)
        with pytest.raises(GrantRefused, match="fp8_e4m3 is not one of the codecs"):
            await handover._flow.wait(20_000)
        assert receiver.content(target) == [bytes(SMALL.slot_layer_nbytes)] * len(receiver.content(target))


@pytest.mark.parametrize("codec", LOSSY)
async def test_what_was_lossy_is_never_made_lossy_again(codec: Codec, tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        source, target = fill(sender, 2, seed=6), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16, accept=[*LOSSY, Codec.LZ4])
        with pytest.raises(GeometryMismatch, match="fp8_e4m3/1 already"):
            sender.engine.open_handover(REQUEST, grant, codec=codec, fidelity=Codec.FP8_E4M3.fidelity)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant, fidelity=Codec.FP8_E4M3.fidelity)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(20_000)
        assert receiver.content(target) == sender.content(source)
        assert inbound.fidelity == Codec.FP8_E4M3.fidelity, "it is still what it was"

        lease = sender.engine.lease_reads(
            REQUEST, source, seq_start=0, seq_end=16, lease_ms=60_000, fidelity=Codec.FP8_E4M3.fidelity
        )
        with pytest.raises(GeometryMismatch, match=r"ours is exact, lz4, theirs is fp8_e4m3/1"):
            receiver.engine.fetch(lease, receiver.blocks(2))
        future = receiver.engine.fetch(lease, receiver.blocks(2), accept=[Codec.FP8_E4M3])
        assert (await future.wait(20_000)).codecs == {"none": SMALL.num_layers}
        assert future.fidelity == Codec.FP8_E4M3.fidelity


async def test_a_receiver_refuses_a_fidelity_that_it_does_not_accept(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(2), seq_start=0, seq_end=16)
        handover = sender.engine.open_handover(REQUEST, grant, fidelity=Codec.INT8.fidelity)
        with pytest.raises(GrantRefused, match="fidelity int8/1 is not accepted here, only exact, lz4"):
            await handover._flow.wait(20_000)


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("dtype", DType.FP16),
        ("block_size", 16),
        ("num_kv_heads", 4),
        ("head_dim", 32),
        ("num_layers", 5),
        ("num_planes", 1),
    ],
)
async def test_another_form_is_refused_at_the_handshake_naming_both(field: str, theirs: object, tmp_path: Path) -> None:
    """Two sides that differ looked healthy, and then every request failed or bytes were copied unconverted."""
    other = dataclasses.replace(SMALL, **{field: theirs})  # type: ignore[arg-type]
    settings = config("tcp", tmp_path)
    async with node("prefill", settings) as sender, node("decode", settings, geometry=other) as receiver:
        introduce(sender, receiver)
        grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(1), seq_start=0, seq_end=1)
        with pytest.raises(GeometryMismatch) as caught:
            sender.engine.open_handover(REQUEST, grant)
        ours = getattr(SMALL, field)
        names = [value.value if isinstance(value, DType) else value for value in (ours, theirs)]
        assert [caught.value.fields[name] for name in ("field", "ours", "theirs")] == [field, *names]
        assert sender.agent.inventory().of("transfer") == ()


# What goes wrong is seen.


async def test_what_a_codec_cannot_write_is_an_error_if_it_was_asked_for_and_else_goes_raw(
    tmp_path: Path,
) -> None:
    """A codec that was on stored nothing, without a word: here it says what it cannot write."""
    async with pair("tcp", tmp_path) as (sender, receiver):
        source, target = fill(sender, 1, seed=7), receiver.blocks(1)
        sender.arena.array[source[0].slot, 0, 0, 0, 0, 0] = 0x7F80
        sender.arena.seal_block(source[0].slot)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=8, accept=LOSSY)
        handover = sender.engine.open_handover(REQUEST, grant, codec=Codec.FP8_E4M3)
        handover.submit(0, source)
        with pytest.raises(CodecFailed, match="fp8_e4m3: a value is not finite"):
            await handover._flow.wait(20_000)

        again = receiver.blocks(1)
        grant = receiver.engine.grant_writes(REQUEST, again, seq_start=0, seq_end=8, accept=LOSSY)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover._flow.policy.pick = lambda *_, **__: Codec.FP8_E4M3  # type: ignore[method-assign]
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        stats = await handover.finish(20_000)
        assert stats.codecs == {"none": 1, "fp8_e4m3": SMALL.num_layers - 1}
        assert receiver.content(again)[0] == sender.content(source)[0]


async def test_cells_that_were_damaged_since_they_were_sealed_are_not_encoded(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        source, target = fill(sender, 1, seed=8), receiver.blocks(1)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=8, accept=LOSSY)
        handover = sender.engine.open_handover(REQUEST, grant, codec=Codec.INT8)
        sender.arena.array[source[0].slot, 0, 0, 0, 0, 0] ^= 1
        handover.submit(0, source)
        with pytest.raises(ChecksumMismatch):
            await handover._flow.wait(20_000)


@pytest.mark.parametrize("codec", [Codec.LZ4, *LOSSY])
async def test_a_payload_that_was_damaged_on_its_way_is_sent_again(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, left = wire_form.write_form, [2]

    def damage(*args: object) -> wire_form.WireForm:
        form = whole(*args)  # type: ignore[arg-type]
        if left[0]:
            left[0] -= 1
            lost = bytearray(form.source.memory)
            lost[len(lost) // 2] ^= 0x55
            return wire_form.WireForm(form.codec, form.checks, Source(memoryview(lost), form.source.spans))
        return form

    monkeypatch.setattr("kv_transport.backends.tcp_link.write_form", damage)
    async with pair("tcp", tmp_path) as (sender, receiver):
        source, target = fill(sender, 3, seed=9), receiver.blocks(3)
        for ref in source:
            sender.arena.array[ref.slot][..., 2:] = 0
            sender.arena.seal_block(ref.slot)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=24, accept=[codec])
        handover = sender.engine.open_handover(REQUEST, grant, codec=codec)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        try:
            stats = await handover.finish(20_000)
        except CodecFailed:
            assert codec is Codec.LZ4, "what is no LZ4 block any more is said"
            return
        assert stats.retries == 2 and left == [0]
        expected = sender.content(source)
        assert receiver.content(target) == (expected if codec.lossless else through(codec, SMALL, expected))
        assert receiver.agent.stats().checksum_failures == 2


@pytest.mark.parametrize("codec", LOSSY)
async def test_nothing_is_decoded_before_it_was_verified(codec: Codec, tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        (source,), (target,) = fill(sender, 1, seed=14), receiver.blocks(1)
        rates, nbytes = CodecRates(), SMALL.slot_layer_nbytes
        offset = sender.arena.shape.offset(source.slot, 0)
        sent = wire_form.Place(sender.arena, [offset], [nbytes], SMALL)
        form = wire_form.write_form(codec, sent, [int(sender.arena.checks[0, source.slot])], rates, "me")
        place = wire_form.Place(receiver.arena, [receiver.arena.shape.offset(target.slot, 0)], [nbytes], SMALL)
        for damaged in (True, False):
            payload = bytearray(form.source.memory)
            payload[3] ^= damaged
            arrival = wire_form.Arrival(codec, place, [True], len(payload), lambda: False, "peer")
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.sendall(payload)
                assert arrival.sink.receive(ours, DO_NOT_WAIT) == len(payload)
            checks, _ = arrival.finish(form.checks, rates)
            assert (checks == form.checks) is not damaged
            assert (receiver.content([target])[0] == bytes(nbytes)) is damaged


# Fallback and choice.


async def test_a_transfer_that_lost_its_link_goes_on_over_tcp_by_lz4(tmp_path: Path) -> None:
    async with pair("auto", tmp_path, geometry=LARGE, slots=16, resume_grace_ms=20_000) as (sender, receiver):
        source, target = sender.filled(4, seed=10), receiver.blocks(4)
        for ref in source:
            sender.arena.cell(ref.slot, 2)[:] = bytes(LARGE.slot_layer_nbytes)
            sender.arena.seal_block(ref.slot)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=4 * LARGE.block_size)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)
        (link,) = sender.agent.peer(receiver.agent.name.node).links
        link.fail(ConnectionLost(peer="decode", transport="shm", cause="pulled out"))
        handover.submit(1, source)
        handover.submit(2, source)
        stats = await handover.finish(20_000)
        assert stats.transport == "shm+tcp"
        assert stats.codecs == {"none": 2, "lz4": 1}, "layer 1 is noise: raw, though LZ4 was tried"
        assert handover.explain() == "lz4: another link broke, and tcp stands in for it"
        assert receiver.content(target) == sender.content(source)


async def test_a_slow_link_is_measured_and_then_takes_the_codec(tmp_path: Path) -> None:
    """The meter is told of 10 MiB that took a second; the choice is the model's own."""
    async with pair("tcp", tmp_path) as (sender, receiver):
        target = receiver.blocks(4)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=32, accept=[Codec.FP8_E4M3])
        handover = sender.engine.open_handover(REQUEST, grant)
        source = fill(sender, 4, seed=11)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)
        assert handover.explain() == "none: the rate of tcp is not known yet"
        await eventually(lambda: len(sender.agent._around.codec_rates.costs(SMALL, None)) == 2)
        meter = sender.agent.peer(receiver.agent.name.node)._meters["tcp"]
        meter.posted(0)
        meter.settled(10 << 20, 10**9)
        for layer in range(1, SMALL.num_layers):
            handover.submit(layer, source)
        stats = await handover.finish(20_000)
        assert stats.codecs == {"none": 1, "fp8_e4m3": SMALL.num_layers - 1}
        assert handover.explain().startswith("fp8_e4m3 over a link of 0.01 GB/s: fp8_e4m3 ")
        assert handover.fidelity == Codec.FP8_E4M3.fidelity, "one lossy cell makes the block lossy"


# Casting between element types.


@pytest.mark.parametrize("direction", ["bf16 to fp8", "fp8 to bf16"])
@pytest.mark.parametrize("way", ["handover", "fetch"])
async def test_bf16_and_fp8_arenas_exchange_values(
    transport: TransportName, tmp_path: Path, direction: str, way: str
) -> None:
    settings = config(transport, tmp_path / "sockets")
    async with (
        node("bf16", settings) as plain,
        node("fp8", settings, geometry=FP8_ARENA, layout=Layout.BLOCK_FIRST) as small,
    ):
        introduce(plain, small)
        source, target = (plain, small) if direction.startswith("bf16") else (small, plain)
        # Values that both types hold, so that what is expected needs no rounding: +-(8..15) * 2**-3.
        rng = np.random.default_rng(12)
        blocks, into = source.blocks(3), target.blocks(3)
        shape = (3, *source.arena.array[0].shape)
        eighths = rng.integers(8, 16, shape) * rng.choice([-1, 1], shape)
        as_bf16 = ((eighths / 8).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        as_fp8 = (np.where(eighths < 0, 0x80, 0) | 0x38 | (np.abs(eighths) - 8)).astype(np.uint8)
        mine, theirs = (as_bf16, as_fp8) if source is plain else (as_fp8, as_bf16)
        for ref, values in zip(blocks, mine, strict=True):
            source.arena.array[ref.slot] = values
            source.arena.seal_block(ref.slot)
        if way == "handover":
            grant = target.engine.grant_writes(REQUEST, into, seq_start=0, seq_end=24, accept=[Codec.FP8_CAST])
            inbound = target.engine.expect(REQUEST, grant)
            handover = source.engine.open_handover(REQUEST, grant)
            for layer in range(SMALL.num_layers):
                handover.submit(layer, blocks)
            await handover.finish(20_000)
            fidelity = inbound.fidelity
        else:
            lease = source.engine.lease_reads(REQUEST, blocks, seq_start=0, seq_end=24, lease_ms=60_000)
            with pytest.raises(GeometryMismatch, match="dtype differs"):
                target.engine.fetch(lease, into)
            future = target.engine.fetch(lease, into, accept=[Codec.FP8_CAST])
            await future.wait(20_000)
            fidelity = future.fidelity
            source.engine.release_lease(lease.ticket)
        for ref, values in zip(into, theirs, strict=True):
            assert np.array_equal(target.arena.array[ref.slot], values)
        assert target.sealed_and_right(into)
        assert fidelity == Fidelity("fp8_cast", 1), "not what a node of that type would have computed"
        assert plain.agent.inventory().work == small.agent.inventory().work == ()


async def test_a_value_beyond_the_declared_scale_is_refused_and_not_cut_off(tmp_path: Path) -> None:
    settings = config("tcp", tmp_path)
    async with node("bf16", settings) as plain, node("fp8", settings, geometry=FP8_ARENA) as small:
        introduce(plain, small)
        source = fill(plain, 1, seed=13)
        plain.arena.array[source[0].slot, 0, 0, 0, 0, 0] = 0x43F0  # 480
        plain.arena.seal_block(source[0].slot)
        grant = small.engine.grant_writes(REQUEST, small.blocks(1), seq_start=0, seq_end=8, accept=[Codec.FP8_CAST])
        handover = plain.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        with pytest.raises(CodecFailed, match="beyond 448"):
            await handover._flow.wait(20_000)


async def test_many_codecs_at_once_do_not_mix(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, slots=64) as (sender, receiver):

        async def move(index: int) -> None:
            codec = [None, Codec.LZ4, *LOSSY][index % 4]
            request = RequestId(f"request-{index}")
            source, target = fill(sender, 3, seed=index), receiver.blocks(3)
            grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=24, accept=[Codec.LZ4, *LOSSY])
            handover = sender.engine.open_handover(request, grant, codec=codec)
            for layer in range(SMALL.num_layers):
                handover.submit(layer, source)
            await handover.finish(20_000)
            expected = sender.content(source)
            assert receiver.content(target) == (through(codec, SMALL, expected) if codec in LOSSY else expected)

        await asyncio.gather(*(move(index) for index in range(16)))
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()
