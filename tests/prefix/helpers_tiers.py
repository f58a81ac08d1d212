"""Blocks for tiers whose bytes follow from their names, so that any process can say what they must be."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

from kv_core.checksum import crc64
from kv_core.hashing import BlockHash, hash_tokens, token_bytes
from kv_core.namespace import Namespace
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, chain_digest, pack_checks
from kv_prefix.tiers.disk import DiskShape, DiskStore

BLOCK_SIZE = 4
NS = Namespace("model", "weights", block_size=BLOCK_SIZE)
OTHER_NS = Namespace("model", "weights-2", block_size=BLOCK_SIZE)
SHAPE = DiskShape(layer_nbytes=512, num_layers=3, block_size=BLOCK_SIZE, name="test")
ROOM = SHAPE.block_nbytes + 3 * SHAPE.record_nbytes
"""Bytes of a tier's limit that one block takes."""
SPARE = 64 * SHAPE.record_nbytes


@lru_cache(maxsize=4096)
def content(sequence: bytes) -> bytes:
    """The bytes of the block of that name, all layers."""
    return Random(sequence).randbytes(SHAPE.block_nbytes)


def cut(raw: bytes | bytearray) -> list[memoryview]:
    """Bytes of a block, layer by layer."""
    size = SHAPE.layer_nbytes
    return [memoryview(raw)[i * size : (i + 1) * size] for i in range(SHAPE.num_layers)]


def prompt(seed: int, num_blocks: int, shared_blocks: int = 0) -> list[int]:
    shared = [1000 + i for i in range(shared_blocks * BLOCK_SIZE)]
    return shared + [seed * 10_000 + i for i in range((num_blocks - shared_blocks) * BLOCK_SIZE)]


def chain(tokens: Sequence[int], namespace: Namespace = NS) -> list[TierBlock]:
    """The blocks of a prompt as a tier keeps them."""
    blocks: list[TierBlock] = []
    digest, parent = namespace.digest, b""
    raw = token_bytes(tokens)
    for i, name in enumerate(hash_tokens(namespace, tokens)):
        piece = raw[i * 4 * BLOCK_SIZE : (i + 1) * 4 * BLOCK_SIZE]
        digest = chain_digest(digest, piece, ())
        checks = pack_checks([crc64(cell) for cell in cut(content(name.sequence))])
        blocks.append(
            TierBlock(namespace.digest, i, name.sequence, name.check, parent, digest, piece, (), checks),
        )
        parent = name.sequence
    return blocks


def names_of(blocks: Sequence[TierBlock]) -> list[BlockHash]:
    return [block.block_hash for block in blocks]


def with_bytes(writes: Sequence[PlacedBlock]) -> list[tuple[PlacedBlock, list[memoryview]]]:
    """Writes with the bytes they must have."""
    return [(item, cut(bytearray(content(item.block.sequence)))) for item in writes]


def read_back(store: DiskStore, placed: Sequence[PlacedBlock]) -> list[bytes | None]:
    """What a store gives for each block: its bytes, or None when they are absent."""
    buffers = [bytearray(SHAPE.block_nbytes) for _ in placed]
    sound = store.read([(item, cut(buffer)) for item, buffer in zip(placed, buffers, strict=True)])
    return [bytes(buffer) if good else None for buffer, good in zip(buffers, sound, strict=True)]


def open_store(folder: Path, num_blocks: int) -> tuple[DiskStore, list[PlacedBlock]]:
    return DiskStore.open(folder, SHAPE, SPARE + num_blocks * ROOM)
