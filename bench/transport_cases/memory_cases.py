"""shm against one thread that copies the same bytes by memcpy, block by block, in one process.

The copy goes from the same source into memory of the same kind, all of it touched before. It checks nothing; ours takes
CRC-64 on both sides, crosses to another process and hears that the bytes are verified.
"""

import base64
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench import harness
from bench.transport_cases import places
from bench.transport_cases.near import Near, connected
from bench.transport_cases.places import Pattern
from bench.transport_cases.plan import Effort, Outcome
from kv_core.block import BlockRef
from kv_core.ids import RequestId
from kv_transport import Arena, KVCacheTransferEngine, XferOp
from kv_transport.codecs import Codec
from kv_transport.tickets import ReadGrant, WriteGrant

RATIO_NEED = 0.85


def memory_cases(effort: Effort) -> Iterator[Outcome]:
    with connected("shm") as near:
        mine = near.share_buffers(places.BUFFER_NBYTES)
        near.introduce()
        copy_to = places.buffer(places.BUFFER_NBYTES, seed=3)
        for pattern in places.PATTERNS:
            put, get = near.xfer(XferOp.WRITE, pattern), near.xfer(XferOp.READ, pattern)
            found = harness.interleave(
                {
                    "put": partial(near.rate, put, effort.seconds),
                    "get": partial(near.rate, get, effort.seconds),
                    "copy": partial(copy_rate, mine, copy_to.data, pattern, effort.seconds),
                },
                effort.rounds,
            )
            # Small blocks have no bar of their own against memcpy: they are shown.
            need = RATIO_NEED if pattern is not places.SMALL_BLOCKS else None
            for name in ("put", "get"):
                yield _case(f"shm_{name}_{pattern.name}", found[name], found["copy"], need)


def engine_cases(effort: Effort) -> Iterator[Outcome]:
    """The same 64 MiB through `KVCacheTransferEngine`, sealed: by a hand-over under a grant, and by a fetch."""
    with connected("shm") as near, Arena.create(places.GEOMETRY, places.NUM_SLOTS, budget=places.NO_RESERVE) as arena:
        blocks = EngineBlocks(near, arena)
        copy_to = places.buffer(arena.nbytes, seed=3)
        pattern = Pattern("arena", arena.nbytes, 1)
        found = harness.interleave(
            {
                "handover": blocks.handover_rate,
                "fetch": blocks.fetch_rate,
                "copy": partial(copy_rate, arena.data.data, copy_to.data, pattern, effort.seconds),
            },
            effort.rounds,
        )
        for name in ("handover", "fetch"):
            yield _case(f"shm_engine_{name}_64MiB", found[name], found["copy"], RATIO_NEED)
        near.run(blocks.engine.close())


class EngineBlocks:
    """Every block of an arena here, to be handed over to the far one or fetched from it."""

    def __init__(self, near: Near, arena: Arena) -> None:
        geometry = arena.geometry
        near.far.ask(
            "arena",
            layers=geometry.num_layers,
            heads=geometry.num_kv_heads,
            dim=geometry.head_dim,
            block_size=geometry.block_size,
            slots=arena.num_slots,
        )
        self.near = near
        self.arena = arena
        arena.data[:] = np.random.default_rng(4).integers(0, 256, arena.nbytes, np.uint8)
        self.region = near.agent.register_memory(arena).region
        near.introduce()
        self.engine = KVCacheTransferEngine(near.agent)
        self._turn = 0

    def refs(self, *, seal: bool) -> list[BlockRef]:
        """Each block in a new generation."""
        found = [BlockRef(self.region, slot, self.arena.raise_generation(slot)) for slot in range(self.arena.num_slots)]
        if seal:
            for slot in range(self.arena.num_slots):
                self.arena.seal_block(slot)
        return found

    def grant(self, accept: Sequence[Codec] = ()) -> WriteGrant:
        """To write every block there, raw or in one of those codecs."""
        self._turn += 1
        codecs = [codec.value for codec in accept]
        return WriteGrant.from_bytes(_bytes(self.near.far.ask("grant", request=f"request-{self._turn}", accept=codecs)))

    def handover_rate(self) -> float:
        grant, refs = self.grant(), self.refs(seal=True)

        async def hand_over() -> float:
            started = time.perf_counter()
            handover = self.engine.open_handover(RequestId(grant.request_id), grant)
            for layer in range(grant.layer_start, grant.layer_end):
                handover.submit(layer, refs)
            stats = await handover.finish()
            return stats.nbytes / (time.perf_counter() - started) / 1e9

        rate = self.near.run(hand_over())
        self.near.far.ask("granted")
        return rate

    def fetch_rate(self) -> float:
        lease = ReadGrant.from_bytes(_bytes(self.near.far.ask("lease")))
        refs = self.refs(seal=False)

        async def fetch() -> float:
            started = time.perf_counter()
            stats = await self.engine.fetch(lease, refs).wait()
            return stats.nbytes / (time.perf_counter() - started) / 1e9

        return self.near.run(fetch())


def copy_rate(source: memoryview, into: NDArray[np.uint8], pattern: Pattern, seconds: float) -> float:
    """GB/s of one thread."""
    of, pairs = np.frombuffer(source, np.uint8), pattern.offsets()
    copied, started = 0, time.perf_counter()
    while True:
        for ours, theirs in pairs:
            np.copyto(into[theirs : theirs + pattern.piece], of[ours : ours + pattern.piece])
        copied += pattern.nbytes
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return copied / elapsed / 1e9


def _case(name: str, ours: harness.Samples, copy: harness.Samples, need: float | None) -> Outcome:
    return harness.compare_samples(name, ours, copy, "GB/s", "memcpy, one thread", need)


def _bytes(answer: dict[str, object]) -> bytes:
    return base64.b64decode(str(answer["grant"]))
