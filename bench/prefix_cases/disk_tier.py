"""The disk tier against plain sequential file IO of the same bytes, in the same run.

Ours writes blocks of 32 scattered layers with their records, and reads them back into scattered layers with every
CRC-64 compared. Plain writes and reads the same number of bytes from and to one buffer, in pieces of 1 MiB, in order.
Neither waits for the device: what is measured is what the tier adds to the file system.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.harness import Case, compare, interleave, paired_ratio
from kv_core.block import Layout
from kv_core.checksum import crc64
from kv_core.dtypes import DType
from kv_core.hashing import hash_tokens, token_bytes
from kv_core.namespace import Namespace
from kv_core.presets import preset
from kv_prefix.tiers.blocks import TierBlock, chain_digest, pack_checks
from kv_prefix.tiers.catalog import TierCatalog
from kv_prefix.tiers.disk import DiskShape, DiskStore

NUM_BLOCKS = 96
BATCH = 8
PIECE = 1 << 20
NEED = 0.8


def disk_tier_cases(rounds: int, folder: Path | None = None) -> list[Case]:
    """Store and load of 96 blocks of Llama-3-8B (2 MiB each), against plain file IO."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="kv-tier-") as name:
        return _measure(Path(name), rounds)


def _measure(folder: Path, rounds: int) -> list[Case]:
    geometry = preset("llama-3-8b").block_geometry(DType.BF16, 16)
    layers, cell = geometry.num_layers, geometry.slot_layer_nbytes
    memory = np.random.default_rng(1).integers(0, 256, (layers, NUM_BLOCKS, cell), dtype=np.uint8)
    assert Layout.LAYER_FIRST.value == "layer_first"  # a layer of consecutive slots is one run: a block is scattered
    cells = [[memoryview(memory[layer, slot]) for layer in range(layers)] for slot in range(NUM_BLOCKS)]
    blocks = _blocks([pack_checks([crc64(part) for part in parts]) for parts in cells])
    shape = DiskShape(cell, layers, geometry.block_size, "bench")
    store, _ = DiskStore.open(folder / "tier", shape, 2 * NUM_BLOCKS * shape.block_nbytes)
    catalog = TierCatalog(store.num_places)
    plan = catalog.plan_store(blocks)
    catalog.stored(plan, ok=True)
    total = NUM_BLOCKS * shape.block_nbytes
    flat = memory.reshape(-1)
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)

    def store_ours() -> None:
        for first in range(0, NUM_BLOCKS, BATCH):
            batch = plan.writes[first : first + BATCH]
            store.write([(item, cells[first + i]) for i, item in enumerate(batch)])

    def load_ours() -> None:
        for first in range(0, NUM_BLOCKS, BATCH):
            batch = plan.writes[first : first + BATCH]
            assert all(store.read([(item, cells[first + i]) for i, item in enumerate(batch)]))

    def store_plain() -> None:
        for at in range(0, total, PIECE):
            os.pwrite(plain, flat[at : at + PIECE].data, at)

    def load_plain() -> None:
        for at in range(0, total, PIECE):
            os.preadv(plain, [flat[at : at + PIECE].data], at)

    def rate(work: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            began = time.perf_counter()
            work()
            return total / (time.perf_counter() - began) / 1e9

        return measure

    subjects = {"store": (store_ours, store_plain), "load": (load_ours, load_plain)}
    cases = []
    for name, (ours, reference) in subjects.items():
        samples = interleave({"ours": rate(ours), "plain": rate(reference)}, rounds)
        cases.append(
            compare(
                f"disk tier {name}",
                samples["ours"].median,
                "GB/s",
                reference="plain sequential file IO",
                reference_value=samples["plain"].median,
                ratio=paired_ratio(samples["ours"], samples["plain"]),
                ratio_need=NEED,
                note=f"{NUM_BLOCKS} blocks of {shape.block_nbytes >> 10} KiB in {layers} layers",
            )
        )
    os.close(plain)
    store.close()
    return cases


def _blocks(checks: list[bytes]) -> list[TierBlock]:
    namespace = Namespace("llama-3-8b", "main")
    raw = token_bytes(range(len(checks) * namespace.block_size))
    nbytes = 4 * namespace.block_size
    blocks, parent, digest = [], b"", namespace.digest
    for i, name in enumerate(hash_tokens(namespace, raw)):
        tokens = raw[i * nbytes : (i + 1) * nbytes]
        digest = chain_digest(digest, tokens, ())
        blocks.append(TierBlock(namespace.digest, i, name.sequence, name.check, parent, digest, tokens, (), checks[i]))
        parent = name.sequence
    return blocks
