"""The names of consecutive blocks as one value: 20 bytes a block, made and read without an object for each.

For whoever hashes, sends or looks up whole prompts. It is a sequence of `BlockHash`, made when asked for.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import msgspec

from kv_core.errors import KVError
from kv_core.hash_chain import NAME_BYTES, PACKED_BYTES, pack_columns, unpack


class InvalidNamesError(KVError):
    """Block names of the wrong size or number."""

    code = 1061
    template = "invalid block names: {reason}"


class BlockHash(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The two names of one block: `sequence` (16 bytes, big-endian) and `check` (32 bits)."""

    sequence: bytes
    check: int


class BlockHashes(Sequence[BlockHash]):
    """Names of consecutive blocks, immutable; equal to a list or tuple of the same names, and no dictionary key.

    Args:
        packed: per block 16 bytes of sequence hash (big-endian), then 4 of check hash (little-endian).

    Raises:
        InvalidNamesError: `packed` is not a whole number of names.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        if len(packed) % PACKED_BYTES:
            raise InvalidNamesError(reason=f"{len(packed)} bytes are not a whole number of names")
        self.packed = packed

    @classmethod
    def of(cls, block_hashes: Iterable[BlockHash]) -> "BlockHashes":
        """These names; themselves when they are packed already.

        Raises:
            InvalidNamesError: a name of another size.
        """
        if isinstance(block_hashes, BlockHashes):
            return block_hashes
        names = list(block_hashes)
        return cls.of_columns([name.sequence for name in names], [name.check for name in names])

    @classmethod
    def of_columns(cls, sequences: Sequence[bytes], checks: Sequence[int]) -> "BlockHashes":
        """Names from a column of sequence hashes and one of check hashes.

        Raises:
            InvalidNamesError: unequal lengths, or a name of another size.
        """
        try:
            return cls(pack_columns(sequences, checks))
        except ValueError as error:
            raise InvalidNamesError(reason=str(error)) from None

    def __len__(self) -> int:
        return len(self.packed) // PACKED_BYTES

    @overload
    def __getitem__(self, at: int) -> BlockHash: ...
    @overload
    def __getitem__(self, at: slice) -> "BlockHashes": ...
    def __getitem__(self, at: int | slice) -> "BlockHash | BlockHashes":
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step == 1:
                return BlockHashes(self.packed[start * PACKED_BYTES : stop * PACKED_BYTES])
            return BlockHashes.of([self[i] for i in range(start, stop, step)])
        index = range(len(self))[at] * PACKED_BYTES
        check = int.from_bytes(self.packed[index + NAME_BYTES : index + PACKED_BYTES], "little")
        return BlockHash(self.packed[index : index + NAME_BYTES], check)

    def __iter__(self) -> Iterator[BlockHash]:
        for sequence, check in unpack(self.packed):
            yield BlockHash(sequence, check)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockHashes):
            return self.packed == other.packed
        return isinstance(other, list | tuple) and len(self) == len(other) and all(map(_same, self, other))

    def __repr__(self) -> str:
        return f"BlockHashes({list(self)!r})"


def _same(left: BlockHash, right: object) -> bool:
    return left == right
