"""One block as a slower tier keeps it: its names, its tokens, and what proves its bytes and everything before it.

A block that lies in a tier may outlive the blocks before it, so comparing its own tokens would not be enough. Each
carries a BLAKE2b-256 over all tokens and extras from block 0, chained from block to block:

    prefix_digest_i = BLAKE2b(prefix_digest_{i-1} || tokens_i || extras_i)    prefix_digest_{-1} = namespace digest

D1: a block is what was asked for only if namespace, names, tokens, extras and `prefix_digest` all agree.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kv_core import limits as core_limits
from kv_core.hashing import BlockHash, Extra
from kv_prefix.matching import ExtrasOf

PREFIX_DIGEST_BYTES: Final = 32
CHECK_BYTES: Final = 8

Digest16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digest32 = Annotated[bytes, Meta(min_length=PREFIX_DIGEST_BYTES, max_length=PREFIX_DIGEST_BYTES)]
PackedExtra = tuple[int, bytes, int]


class TierBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One full block of a prefix.

    Attributes:
        namespace: digest of the namespace.
        block_idx: position in its sequence.
        sequence, check: its names (`BlockHash`).
        parent: sequence hash of the block before it; b"" at position 0.
        prefix_digest: see the module.
        tokens: uint32 little-endian.
        extras: (start, digest, length) of each extra that touches the block.
        checks: CRC-64 of each layer's bytes, 8 bytes little-endian each.
        scopes: what else the namespace can be purged by, 8 bytes each; opaque here.
        epoch: purges of the namespace that had been followed when the block was stored.
    """

    namespace: Digest16
    block_idx: Annotated[int, Meta(ge=0, lt=core_limits.MAX_TOKENS_PER_REQUEST)]
    sequence: Digest16
    check: Annotated[int, Meta(ge=0, lt=1 << 32)]
    parent: Annotated[bytes, Meta(max_length=16)]
    prefix_digest: Digest32
    tokens: Annotated[bytes, Meta(max_length=4 * core_limits.MAX_BLOCK_SIZE)]
    extras: Annotated[tuple[PackedExtra, ...], Meta(max_length=core_limits.MAX_EXTRAS_PER_REQUEST)]
    checks: Annotated[bytes, Meta(max_length=CHECK_BYTES * core_limits.MAX_LAYERS)]
    scopes: Annotated[bytes, Meta(max_length=256)] = b""
    epoch: Annotated[int, Meta(ge=0)] = 0

    @property
    def block_hash(self) -> BlockHash:
        return BlockHash(self.sequence, self.check)

    def layer_checks(self) -> tuple[int, ...]:
        """The CRC-64 of each layer."""
        return struct.unpack(f"<{len(self.checks) // CHECK_BYTES}Q", self.checks)


class PlacedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block and the number of the place that a tier keeps it in."""

    place: int
    block: TierBlock


def pack_checks(checks: Sequence[int]) -> bytes:
    """CRC-64s as a tier keeps them."""
    return struct.pack(f"<{len(checks)}Q", *checks)


def pack_extras(extras: Sequence[Extra]) -> tuple[PackedExtra, ...]:
    """Extras as a tier keeps them."""
    return tuple((extra.start, extra.digest, extra.length) for extra in extras)


def chain_digest(before: bytes, tokens: bytes, extras: Sequence[PackedExtra]) -> bytes:
    """The next block's `prefix_digest`; `before` is the one before it, or the namespace's digest."""
    state = hashlib.blake2b(before, digest_size=PREFIX_DIGEST_BYTES, person=b"kv-tier-prefix")
    state.update(struct.pack("<I", len(tokens)))
    state.update(tokens)
    for start, digest, length in extras:
        state.update(struct.pack("<III", start, length, len(digest)) + digest)
    return state.digest()


def prefix_digests(namespace: bytes, raw: bytes, block_nbytes: int, extras_of: ExtrasOf) -> Iterator[bytes]:
    """The `prefix_digest` of each full block of the tokens `raw`, from block 0."""
    digest = namespace
    for block_idx in range(len(raw) // block_nbytes):
        tokens = raw[block_idx * block_nbytes : (block_idx + 1) * block_nbytes]
        digest = chain_digest(digest, tokens, pack_extras(extras_of.get(block_idx, ())))
        yield digest
