"""The transfer header: round trip, every damaged bit refused, nothing packed that cannot be read."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.checksum import crc64
from kv_core.dtypes import DType
from kv_core.errors import RemoteProtocolError
from kv_core.header import (
    HEADER_NBYTES,
    CorruptHeaderError,
    InvalidHeaderError,
    KVCacheTransferHeader,
    UnsupportedHeaderVersionError,
)
from kv_core.ids import RequestId
from kv_core.testing.strategies import headers

HEADER = KVCacheTransferHeader(RequestId("req-1"), 0, 30, 16, 48, 3, 64, DType.BF16, 0xDEADBEEF, 0x1122334455667788)


def sealed(body: bytes) -> bytes:
    """A body with a right CRC."""
    return body + struct.pack("<Q", crc64(body))


@given(headers())
def test_what_is_packed_is_unpacked(header: KVCacheTransferHeader) -> None:
    raw = header.pack()
    assert len(raw) == HEADER_NBYTES == KVCacheTransferHeader.NBYTES
    assert KVCacheTransferHeader.unpack(raw) == header
    assert KVCacheTransferHeader.unpack(memoryview(bytearray(raw))) == header


def test_the_binary_form_is_for_ever() -> None:
    assert (
        HEADER.pack().hex()
        == (
            "4b56544801000305"  # magic, version, dtype, length of the id
            "000000001e0000001000000030000000"  # layers, tokens
            "0300000040000000"  # heads, head_dim
            "efbeadde00000000"  # nonce
            "8877665544332211"  # checksum
            + b"req-1".hex().ljust(144, "0")
            + struct.pack("<Q", crc64(HEADER.pack()[:120])).hex()
        )
    )


@given(headers(), st.integers(0, HEADER_NBYTES * 8 - 1))
def test_one_flipped_bit_is_refused(header: KVCacheTransferHeader, bit: int) -> None:
    raw = bytearray(header.pack())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError):
        KVCacheTransferHeader.unpack(raw)


@given(st.binary(max_size=200) | st.binary(min_size=128, max_size=128))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptHeaderError):
        KVCacheTransferHeader.unpack(data)


@given(st.binary(min_size=113, max_size=113))
def test_random_fields_under_a_right_crc_are_read_or_refused(data: bytes) -> None:
    try:
        header = KVCacheTransferHeader.unpack(sealed(b"KVTH\x01\x00" + bytes([data[0] % 8]) + data[1:]))
    except CorruptHeaderError:
        return
    assert KVCacheTransferHeader.unpack(header.pack()) == header


@pytest.mark.parametrize("raw", [b"", HEADER.pack()[:-1], HEADER.pack() + b"\0", bytes(HEADER_NBYTES)])
def test_wrong_length_or_magic_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptHeaderError):
        KVCacheTransferHeader.unpack(raw)


def test_another_version_is_refused_with_both_numbers() -> None:
    body = HEADER.pack()[:120]
    with pytest.raises(UnsupportedHeaderVersionError, match="version 2, this process knows 1"):
        KVCacheTransferHeader.unpack(sealed(body[:4] + b"\x02\x00" + body[6:]))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (6, b"\x00"),  # no dtype has this code
        (6, b"\x07"),
        (7, b"\x00"),  # an empty id
        (7, b"\x04"),  # an id longer than said
        (7, b"\x49"),  # longer than the field
        (8, b"\x1e"),  # layer_start == layer_end
        (12, b"\xff\xff"),  # too many layers
        (16, b"\x30"),  # seq_start == seq_end
        (24, b"\x00"),  # no heads
        (28, b"\x00"),  # no dimension
        (48, b"\xff"),  # no UTF-8
        (119, b"x"),  # padding that is not zero
    ],
)
def test_fields_that_cannot_be_are_refused_even_under_a_right_crc(at: int, value: bytes) -> None:
    body = HEADER.pack()[:120]
    with pytest.raises(CorruptHeaderError):
        KVCacheTransferHeader.unpack(sealed(body[:at] + value + body[at + len(value) :]))


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": ""},
        {"request_id": "x" * 73},
        {"request_id": "é" * 37},
        {"request_id": "\ud800"},
        {"request_id": b"bytes"},
        {"layer_start": -1},
        {"layer_end": 0},
        {"layer_end": 4097},
        {"seq_end": 16},
        {"seq_end": 1 << 21},
        {"num_heads": 0},
        {"num_heads": (1 << 16) + 1},
        {"head_dim": 0},
        {"head_dim": True},
        {"nonce": -1},
        {"nonce": 1 << 64},
        {"checksum": 1 << 64},
        {"checksum": 1.0},
        {"dtype": "bf16"},
    ],
    ids=str,
)
def test_what_the_form_cannot_hold_is_refused_by_name(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidHeaderError, match=next(iter(fields))):
        replace(HEADER, **fields)  # type: ignore[arg-type]


def test_a_header_announces_its_payload() -> None:
    assert (HEADER.num_layers, HEADER.num_tokens) == (30, 32)
    assert HEADER.payload_nbytes() == 30 * 32 * 2 * 3 * 64 * 2
    assert HEADER.payload_nbytes(num_planes=1) * 2 == HEADER.payload_nbytes()
