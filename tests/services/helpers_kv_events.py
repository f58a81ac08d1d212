"""Events of a made-up engine, whose hashes are numbers that follow from the sequence."""

from kv_core.namespace import Namespace
from kv_services.kv_events.wire import BlockRemoved, BlockStored

SIZE = 4
NS = Namespace("model", "weights", block_size=SIZE)


def tokens(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + i for i in range(SIZE * blocks)]


def stored(seed: int, blocks: int, first: int = 0, **more: object) -> BlockStored:
    """Blocks `first ..` of a sequence; the engine's hashes are numbers."""
    return BlockStored(
        block_hashes=[seed * 100 + i for i in range(first, blocks)],
        parent_block_hash=seed * 100 + first - 1 if first else None,
        token_ids=tokens(seed, blocks)[first * SIZE :],
        block_size=SIZE,
        **more,  # type: ignore[arg-type]
    )


def removed(*hashes: int, medium: str | None = None) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium=medium)
