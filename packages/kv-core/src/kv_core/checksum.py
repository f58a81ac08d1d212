"""The four checksums of the product, over any contiguous buffer.

CRC-64/NVME guards KV bytes and headers, CRC-32C is the second hash of a block, XXH3 (64 and 128 bits) is the first.
All have a stable definition and run at hardware speed: CRC-64 by awscrt, which gives the GIL back (57 GB/s a core),
CRC-32C by fastcrc, whose calls are the cheapest (the chain makes one call for each block), XXH3 by xxhash. Digests are
in canonical big-endian form. None of them resists an adversary: that is what the comparison of tokens and BLAKE2b
(`hashing.token_digest`) are for.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash
from awscrt import checksums as _crt
from fastcrc.crc32 import iscsi as _iscsi

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer
else:
    Buffer = bytes | bytearray | memoryview
"""Anything that offers contiguous memory: bytes, bytearray, memoryview, array, mmap, a C-ordered NumPy array (for type
checkers before Python 3.12: its `.data`). Strided memory raises BufferError, text TypeError."""


def crc64(data: Buffer, previous: int = 0) -> int:
    """CRC-64/NVME of `data`; `previous` continues a running value. `crc64(b"123456789") == 0xAE8B14860A799888`."""
    return int(_crt.crc64nvme(memoryview(data), previous))


def crc64_each(pieces: Iterable[memoryview]) -> list[int]:
    """The CRC-64 of each piece by itself. Of many small ones the calls are what costs, so these are bare."""
    return list(map(_crt.crc64nvme, pieces))


def crc64_combine(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-64 of two pieces one after the other, from theirs: `crc64(a + b)` without the bytes."""
    return int(_crt.combine_crc64nvme(first, second, second_nbytes))


def crc32c(data: Buffer, previous: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`; `previous` continues a running value. `crc32c(b"123456789") == 0xE3069283`."""
    return _iscsi(memoryview(data), previous)


def xxh3_64(data: Buffer) -> int:
    """XXH3, 64 bits, seed 0."""
    return xxhash.xxh3_64_intdigest(memoryview(data))


def xxh3_128(data: Buffer) -> bytes:
    """XXH3, 128 bits, seed 0: 16 bytes in canonical big-endian form."""
    return xxhash.xxh3_128_digest(memoryview(data))
