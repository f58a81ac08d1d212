"""A hand-over of 256 MiB, layer by layer, over an emulated link: how much of the link it uses.

Prefill computes 32 layers; each takes 0.9 of the time that its KV needs on the link (a pause stands for a device that
computes). Ours submits each layer as it is computed; the transport seals it and sends it while the next one is
computed. Naive is what people do first: compute everything, serialise the whole cache into one message, send it, wait.
Both are measured from the first layer computed to the last byte verified (naive: received) at the other side; the use
of the link is KV bytes over what the link could have carried in that time, so headers count as idle.

The codec cases hand over 64 MiB of normal bf16 numbers at once, raw, and in what the cost model chooses where the
receiver accepts FP8 and LZ4; the note says what it chose and why.
"""

import asyncio
import socket
import time
from collections.abc import Iterator

import numpy as np

from bench import harness
from bench.namespaces import unavailable
from bench.transport_cases import places
from bench.transport_cases.far import order
from bench.transport_cases.memory_cases import EngineBlocks
from bench.transport_cases.near import connected
from bench.transport_cases.plan import Effort, Outcome, Skipped
from bench.transport_cases.shaped_link import ShapedLink, shaped_link
from bench.transport_cases.wire_cases import plain_connection
from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_core.ids import RequestId
from kv_transport import Arena
from kv_transport.codecs import Codec

LINK_USE_NEED = 0.89
COMPUTE_SHARE = 0.9
NUM_LAYERS = 32
SLOW_MBIT = 1_000
"""What any machine can drive: the bar always holds."""


def link_cases(effort: Effort) -> Iterator[Outcome]:
    rates = (1_000,) if effort.quick else (1_000, 10_000)
    reason = unavailable()
    if reason is not None:
        yield from (Skipped(name(mbit), reason) for name in (_name, _codec_name) for mbit in rates)
        return
    with shaped_link() as link:
        for mbit in rates:
            yield link_case(link, mbit, slots=4 if effort.quick else 32, rounds=1 if effort.quick else 3)
        for mbit in rates:
            yield codec_case(link, mbit, slots=2 if effort.quick else 8, rounds=1 if effort.quick else 5)


def link_case(link: ShapedLink, mbit: int, slots: int, rounds: int) -> harness.Case:
    """`slots` blocks of 256 KiB a layer."""
    geometry = BlockGeometry(NUM_LAYERS, 8, 128, DType.BF16, block_size=64)
    with (
        connected("tcp", link.near, link.far, link.prefix) as near,
        Arena.create(geometry, slots, budget=places.NO_RESERVE) as arena,
    ):
        blocks = EngineBlocks(near, arena)
        port = int(str(near.far.ask("plain_sockets", nbytes=arena.nbytes)["port"]))
        link.shape(mbit)
        layer_s = arena.nbytes / NUM_LAYERS * 8 / (mbit * 1e6)
        with plain_connection(link.far, port) as plain:
            found = harness.interleave(
                {
                    "ours": lambda: _pipelined(blocks, layer_s) / mbit,
                    "naive": lambda: _naive(plain, arena, layer_s) / mbit,
                    "plain": lambda: _plain(plain, arena) / mbit,
                },
                rounds,
            )
        near.run(blocks.engine.close())
    ours, naive, plain_use = found["ours"], found["naive"], found["plain"].median
    # Where plain sockets cannot fill a fast link either, it is this machine that limits, and no bar is set.
    can_drive = mbit <= SLOW_MBIT or plain_use >= LINK_USE_NEED
    limits = "" if can_drive else "; this machine's sockets cannot fill it: its processors limit, not the link"
    return harness.compare(
        _name(mbit),
        ours.median,
        "of the link",
        reference="naive: all layers, one message, then wait",
        reference_value=naive.median,
        ratio=harness.paired_ratio(ours, naive),
        ours_need=LINK_USE_NEED if can_drive else None,
        note=f"{arena_mib(geometry, slots)} MiB; plain sockets without any computing use {plain_use:.2f}{limits}",
    )


def codec_case(link: ShapedLink, mbit: int, slots: int, rounds: int) -> harness.Case:
    """`slots` blocks of 256 KiB a layer."""
    geometry = BlockGeometry(NUM_LAYERS, 8, 128, DType.BF16, block_size=64)
    with (
        connected("tcp", link.near, link.far, link.prefix) as near,
        Arena.create(geometry, slots, budget=places.NO_RESERVE) as arena,
    ):
        blocks = EngineBlocks(near, arena)
        values = np.random.default_rng(5).standard_normal(arena.data.size // 2, np.float32)
        arena.data.view(np.uint16)[:] = values.view(np.uint32) >> 16
        link.shape(mbit)
        why: list[str] = []
        found = harness.interleave(
            {
                "chosen": lambda: _at_once(blocks, None, why) / mbit,
                "raw": lambda: _at_once(blocks, Codec.NONE, why) / mbit,
            },
            rounds,
            warmups=2,
        )
        near.run(blocks.engine.close())
    chosen, raw = found["chosen"], found["raw"]
    return harness.compare(
        _codec_name(mbit),
        chosen.median,
        "of the link",
        reference="the same without a codec",
        reference_value=raw.median,
        ratio=harness.paired_ratio(chosen, raw),
        note=f"{arena_mib(geometry, slots)} MiB; {why[-1]}",
    )


def arena_mib(geometry: BlockGeometry, slots: int) -> int:
    return geometry.block_nbytes * slots // places.MIB


def _name(mbit: int) -> str:
    return f"link_{mbit / 1000:g}Gbps_layer_pipelining"


def _codec_name(mbit: int) -> str:
    return f"link_{mbit / 1000:g}Gbps_codec"


def _at_once(blocks: EngineBlocks, codec: Codec | None, why: list[str]) -> float:
    """Mbit/s of KV; without a codec given, appends what was chosen and why."""
    grant, refs = blocks.grant([Codec.FP8_E4M3]), blocks.refs(seal=True)

    async def hand_over() -> int:
        handover = blocks.engine.open_handover(RequestId(grant.request_id), grant, codec=codec)
        first = time.monotonic_ns()
        for layer in range(NUM_LAYERS):
            handover.submit(layer, refs)
        await handover.finish()
        if codec is None:
            why.append(handover.explain())
        return first

    first = blocks.near.run(hand_over())
    done = int(str(blocks.near.far.ask("granted")["done_ns"]))
    return blocks.arena.nbytes * 8e3 / (done - first)


def _pipelined(blocks: EngineBlocks, layer_s: float) -> float:
    """Mbit/s of KV."""
    grant, refs = blocks.grant(), blocks.refs(seal=False)

    async def prefill() -> int:
        handover = blocks.engine.open_handover(RequestId(grant.request_id), grant)
        first, begun = 0, time.perf_counter()
        for layer in range(NUM_LAYERS):
            # Until a point in time, not for a span: a loop wakes up to a millisecond late, which would add up.
            await asyncio.sleep(begun + (layer + 1) * COMPUTE_SHARE * layer_s - time.perf_counter())
            first = first or time.monotonic_ns()
            handover.submit(layer, refs)
        await handover.finish()
        return first

    first = blocks.near.run(prefill())
    done = int(str(blocks.near.far.ask("granted")["done_ns"]))
    return blocks.arena.nbytes * 8e3 / (done - first)


def _naive(sock: socket.socket, arena: Arena, layer_s: float) -> float:
    time.sleep(COMPUTE_SHARE * layer_s)
    first = time.perf_counter()
    time.sleep(COMPUTE_SHARE * layer_s * (NUM_LAYERS - 1))
    message = arena.data.tobytes()
    sock.sendall(order(True, len(message)) + message)
    sock.recv(1)
    return arena.nbytes * 8e-6 / (time.perf_counter() - first)


def _plain(sock: socket.socket, arena: Arena) -> float:
    """What the link carries when nothing else is done."""
    started = time.perf_counter()
    sock.sendall(order(True, arena.nbytes))
    sock.sendall(arena.data.data)
    sock.recv(1)
    return arena.nbytes * 8e-6 / (time.perf_counter() - started)
