"""Shared by the tests of kv-prefix: names, a slow pool to compare with, and a stand-in for the arena's bytes."""

from collections.abc import Sequence

from kv_core.hashing import BlockHash, hash_tokens
from kv_core.namespace import Namespace

BLOCK_SIZE = 3
NAMESPACES = (
    Namespace("model", "main", block_size=BLOCK_SIZE),
    Namespace("model", "main", salt="other tenant", block_size=BLOCK_SIZE),
)

Prefix = tuple[bytes, tuple[int, ...]]
"""Content of one token's KV: the namespace and every token up to it."""


def hashes(namespace: Namespace, tokens: Sequence[int]) -> list[BlockHash]:
    return hash_tokens(namespace, list(tokens))


def weak_hashes(namespace: Namespace, tokens: Sequence[int]) -> list[BlockHash]:
    """One bit of the first hash and none of the second: almost everything collides."""
    return [BlockHash(bytes([h.sequence[0] & 1]) + bytes(15), 0) for h in hash_tokens(namespace, list(tokens))]


class Arena:
    """What a block's bytes would be: per slot and token, the prefix whose KV was written there."""

    def __init__(self, num_slots: int) -> None:
        self.cells: list[list[Prefix | None]] = [[None] * BLOCK_SIZE for _ in range(num_slots)]

    def write(self, slot: int, namespace: Namespace, tokens: Sequence[int], position: int) -> None:
        self.cells[slot][position % BLOCK_SIZE] = (namespace.digest, tuple(tokens[: position + 1]))

    def copy(self, src: int, dst: int, num_tokens: int) -> None:
        self.cells[dst][:num_tokens] = self.cells[src][:num_tokens]

    def expect(self, slots: Sequence[int], namespace: Namespace, tokens: Sequence[int], num_tokens: int) -> None:
        """Assert that the first `num_tokens` tokens' KV lies in `slots`."""
        for position in range(num_tokens):
            cell = self.cells[slots[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert cell == (namespace.digest, tuple(tokens[: position + 1])), f"wrong bytes at token {position}"
