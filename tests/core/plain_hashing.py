"""The naming of KV blocks written a second time, plainly, from its definition; and the maker of `hash_vectors.json`.

Uses nothing but the standard library: CRCs bit by bit, XXH3-128 from the published description of the algorithm
(inputs of 17 bytes and more, which is all that a chain hashes). It is the oracle for kv_core.hashing and runs under any
Python from 3.8 on. `python tests/core/plain_hashing.py` prints the vectors; they are in the repository so that a change
of what a block is called cannot pass unseen, and so that other implementations can check themselves.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from typing import Sequence, Tuple, Union  # noqa: UP035  # also runs under Python 3.8

Field = Union[str, int, None]  # noqa: UP007
Content = Tuple[int, int, bytes]  # noqa: UP006

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1


def crc_bitwise(data: bytes, previous: int, polynomial: int, width: int) -> int:
    """A reflected CRC with all ones in and out."""
    mask = (1 << width) - 1
    crc = previous ^ mask
    for byte in bytes(data):
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (polynomial if crc & 1 else 0)
    return crc ^ mask


def crc32c(data: bytes, previous: int = 0) -> int:
    return crc_bitwise(data, previous, 0x82F63B78, 32)


def crc64_nvme(data: bytes, previous: int = 0) -> int:
    return crc_bitwise(data, previous, 0x9A6C9329AC4BC9B5, 64)


P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def read64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def fold(left: int, right: int) -> int:
    product = left * right
    return (product & MASK64) ^ (product >> 64)


def avalanche(value: int) -> int:
    value ^= value >> 37
    value = value * 0x165667919E3779F9 & MASK64
    return value ^ (value >> 32)


def mix16(data: bytes, at: int, secret: int) -> int:
    return fold(read64(data, at) ^ read64(SECRET, secret), read64(data, at + 8) ^ read64(SECRET, secret + 8))


def mix32(acc: list[int], data: bytes, first: int, second: int, secret: int) -> None:
    acc[0] = (acc[0] + mix16(data, first, secret) & MASK64) ^ (read64(data, second) + read64(data, second + 8) & MASK64)
    acc[1] = (acc[1] + mix16(data, second, secret + 16) & MASK64) ^ (
        read64(data, first) + read64(data, first + 8) & MASK64
    )


def finish_short(acc: list[int], length: int) -> bytes:
    low = avalanche(acc[0] + acc[1] & MASK64)
    high = acc[0] * P64_1 + acc[1] * P64_4 + length * P64_2 & MASK64
    return struct.pack(">QQ", -avalanche(high) & MASK64, low)


def xxh3_128(data: bytes) -> bytes:
    """XXH3 with 128 bits and seed 0, for 17 bytes or more, in canonical form."""
    length = len(data)
    assert length > 16
    if length > 240:
        return xxh3_128_long(data)
    acc = [length * P64_1 & MASK64, 0]
    if length <= 128:
        for i in range((length - 1) // 32, -1, -1):
            mix32(acc, data, 16 * i, length - 16 * (i + 1), 32 * i)
        return finish_short(acc, length)
    for i in range(4):
        mix32(acc, data, 32 * i, 32 * i + 16, 32 * i)
    acc = [avalanche(acc[0]), avalanche(acc[1])]
    for i in range(4, length // 32):
        mix32(acc, data, 32 * i, 32 * i + 16, 3 + 32 * (i - 4))
    mix32(acc, data, length - 16, length - 32, 136 - 17 - 16)
    return finish_short(acc, length)


def xxh3_128_long(data: bytes) -> bytes:
    length = len(data)
    acc = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1]

    def accumulate(at: int, secret: int) -> None:
        for i in range(8):
            value = read64(data, at + 8 * i)
            keyed = value ^ read64(SECRET, secret + 8 * i)
            acc[i ^ 1] = acc[i ^ 1] + value & MASK64
            acc[i] = acc[i] + (keyed & MASK32) * (keyed >> 32) & MASK64

    num_blocks = (length - 1) // 1024
    for block in range(num_blocks + 1):
        num_stripes = 16 if block < num_blocks else (length - 1 - 1024 * num_blocks) // 64
        for stripe in range(num_stripes):
            accumulate(1024 * block + 64 * stripe, 8 * stripe)
        if block < num_blocks:
            for i in range(8):
                acc[i] = (acc[i] ^ acc[i] >> 47 ^ read64(SECRET, 128 + 8 * i)) * P32_1 & MASK64
    accumulate(length - 64, 121)

    def merge(secret: int, start: int) -> int:
        total = start
        for i in range(4):
            total += fold(
                acc[2 * i] ^ read64(SECRET, secret + 16 * i), acc[2 * i + 1] ^ read64(SECRET, secret + 16 * i + 8)
            )
        return avalanche(total & MASK64)

    low = merge(11, length * P64_1 & MASK64)
    high = merge(117, ~(length * P64_2) & MASK64)
    return struct.pack(">QQ", high, low)


def namespace_digest(fields: Sequence[Field]) -> bytes:
    """From the eight fields of a namespace as text (or None), `block_size` last and an integer."""
    raw = b""
    for text in ("xxh3-128+crc32c/1", *fields[:-1]):
        value = b"" if text is None else str(text).encode()
        raw += b"\x00" if text is None else b"\x01" + struct.pack("<I", len(value)) + value
    raw += struct.pack("<I", fields[-1])
    return hashlib.blake2b(raw, digest_size=16, person=b"kv-namespace").digest()


def block_names(
    fields: Sequence[Field], tokens: Sequence[int], extras: Sequence[Content] = ()
) -> list[tuple[bytes, int]]:
    """[(sequence hash, check hash)] of the full blocks; extras are (start, length, digest)."""
    block_size = fields[-1]
    assert isinstance(block_size, int)
    sequence = namespace_digest(fields)
    check = crc32c(sequence)
    names = []
    for first in range(0, len(tokens) - block_size + 1, block_size):
        piece = b"".join(struct.pack("<I", token) for token in tokens[first : first + block_size])
        for start, length, digest in sorted(extras, key=lambda extra: (extra[0], extra[2])):
            if start < first + block_size and start + length > first:
                piece += struct.pack("<II", start, len(digest)) + digest
        sequence = xxh3_128(sequence + piece)
        check = crc32c(piece, check)
        names.append((sequence, check))
    return names


def token_digest(tokens: Sequence[int], extras: Sequence[Content] = ()) -> bytes:
    raw = struct.pack("<Q", 4 * len(tokens)) + b"".join(struct.pack("<I", token) for token in tokens)
    for start, length, digest in sorted(extras, key=lambda extra: (extra[0], extra[2])):
        raw += struct.pack("<III", start, length, len(digest)) + digest
    return hashlib.blake2b(raw, digest_size=32, person=b"kv-tokens").digest()


TEXT = [(i * 7919 + 13) % 49152 for i in range(80)]
EXTREME = [0, 1, MASK32, MASK32 - 1] * 20
PICTURE = (20, 20, hashlib.sha256(b"a picture").digest())
OTHER = (20, 20, hashlib.sha256(b"another picture").digest())
PLAIN = ("llama-3-8b", "main", None, None, "", "bf16", "exact", 16)
CASES: list[tuple[str, tuple[Field, ...], list[int], tuple[Content, ...]]] = [
    ("text", PLAIN, TEXT, ()),
    ("no full block", PLAIN, TEXT[:15], ()),
    ("extreme tokens", PLAIN, EXTREME, ()),
    ("another revision", ("llama-3-8b", "step-2000", None, None, "", "bf16", "exact", 16), TEXT, ()),
    ("an adapter", ("llama-3-8b", "main", "x", "v1", "", "bf16", "exact", 16), TEXT, ()),
    ("an adapter, other weights", ("llama-3-8b", "main", "x", "v2", "", "bf16", "exact", 16), TEXT, ()),
    ("a salt of the adapter's name", ("llama-3-8b", "main", None, None, "x", "bf16", "exact", 16), TEXT, ()),
    ("another dtype", ("llama-3-8b", "main", None, None, "", "fp8_e4m3", "exact", 16), TEXT, ()),
    ("lossy", ("llama-3-8b", "main", None, None, "", "bf16", "fp8_e4m3/1", 16), TEXT, ()),
    ("names in other scripts", ("модель-λ", "版本", None, None, "sel", "fp16", "exact", 16), TEXT, ()),
    ("blocks of 1", ("m", "r", None, None, "", "fp32", "exact", 1), TEXT[:6], ()),
    ("blocks of 32", ("m", "r", None, None, "", "fp32", "exact", 32), TEXT, ()),
    ("blocks of 80", ("m", "r", None, None, "", "fp32", "exact", 80), TEXT, ()),
    ("a picture", PLAIN, TEXT, (PICTURE,)),
    ("another picture", PLAIN, TEXT, (OTHER,)),
    ("two contents", PLAIN, TEXT, (PICTURE, (50, 1, b"sound"))),
]


def vectors() -> list[dict[str, object]]:
    return [
        {
            "name": name,
            "namespace": list(fields),
            "tokens": tokens,
            "extras": [[start, length, digest.hex()] for start, length, digest in extras],
            "digest": namespace_digest(fields).hex(),
            "blocks": [[sequence.hex(), check] for sequence, check in block_names(fields, tokens, extras)],
            "token_digest": token_digest(tokens, extras).hex(),
        }
        for name, fields, tokens, extras in CASES
    ]


if __name__ == "__main__":
    json.dump(vectors(), sys.stdout, indent=None, separators=(",", ":"), ensure_ascii=True)
    sys.stdout.write("\n")
