"""The loop over the blocks of a prompt that gives each its two names: compiled, with a plain twin.

The twins (`plain_...`) are the definition: tests hold the compiled ones against them, and they stand in where the
package was installed without a compiler. `COMPILED` says which are at work. What is hashed, and from what root, is
for `kv_core.hashing`.

Packed names: per block 16 bytes of sequence hash (big-endian), then 4 of check hash (little-endian).
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final

import xxhash
from fastcrc.crc32 import iscsi

try:
    from kv_core import _hash_chain as _kernels
except ImportError:  # built without a compiler
    _kernels = None  # type: ignore[assignment]

COMPILED: Final = _kernels is not None

NAME_BYTES: Final = 16
PACKED_BYTES: Final = 20

_PACKED: Final = struct.Struct(f"<{NAME_BYTES}sI")
_LONGEST_COMPILED: Final = 240 - NAME_BYTES
"""The compiled chain knows XXH3's variants for short input; longer blocks keep a library call busy enough."""

_BLOCKS_A_SPLIT: Final = 64


def chain_blocks(raw: bytes, block_nbytes: int, parent: bytes, check: int) -> bytes:
    """The packed names of the full blocks of `raw`, chained from the parent's two names."""
    if not COMPILED or block_nbytes > _LONGEST_COMPILED:
        return plain_chain_blocks(raw, block_nbytes, parent, check)
    return _kernels.chain_blocks(raw, block_nbytes, parent, check)


def plain_chain_blocks(raw: bytes, block_nbytes: int, parent: bytes, check: int) -> bytes:
    """The same without compiled code."""
    pieces = split_blocks(raw, block_nbytes)
    digest = xxhash.xxh3_128_digest
    sequences = [parent := digest(parent + piece) for piece in pieces]
    checks = [check := iscsi(piece, check) for piece in pieces]
    return plain_pack_columns(sequences, checks)


def pack_columns(sequences: Sequence[bytes], checks: Sequence[int]) -> bytes:
    """Two columns of names, packed.

    Raises:
        ValueError: unequal lengths, a sequence hash that is not 16 bytes, a check hash outside 32 bits.
    """
    if _kernels is None:
        return plain_pack_columns(sequences, checks)
    try:
        return _kernels.pack_columns(list(sequences), list(checks))
    except (OverflowError, TypeError) as error:
        raise ValueError(str(error)) from None


def plain_pack_columns(sequences: Sequence[bytes], checks: Sequence[int]) -> bytes:
    """The same without compiled code."""
    if len(sequences) != len(checks):
        raise ValueError(f"{len(sequences)} names, {len(checks)} checks")
    if any(len(name) != NAME_BYTES for name in sequences):
        raise ValueError(f"a name is not {NAME_BYTES} bytes")
    try:
        return b"".join(map(_PACKED.pack, sequences, checks))
    except struct.error as error:
        raise ValueError(str(error)) from None


def unpack(packed: bytes) -> Iterator[tuple[bytes, int]]:
    """(sequence hash, check hash) of each block."""
    return _PACKED.iter_unpack(packed)


def split_blocks(raw: bytes, block_nbytes: int) -> list[bytes]:
    """The full blocks of `raw`; cutting many at once in C takes a fifth of the time that slicing takes."""
    split = _splitter(block_nbytes)
    cut = len(raw) - len(raw) % split.size
    pieces = list(chain.from_iterable(split.iter_unpack(memoryview(raw)[:cut])))
    ends = range(cut + block_nbytes, len(raw) + 1, block_nbytes)
    pieces += [raw[end - block_nbytes : end] for end in ends]
    return pieces


@lru_cache(maxsize=64)
def _splitter(block_nbytes: int) -> struct.Struct:
    return struct.Struct(f"{block_nbytes}s" * _BLOCKS_A_SPLIT)
