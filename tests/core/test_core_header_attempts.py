"""A header under another nonce and checksum."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_core.header import (
    HEADER_NBYTES,
    CorruptHeaderError,
    InvalidHeaderError,
    KVCacheTransferHeader,
    PackedHeader,
    read_stamps,
)
from kv_core.ids import RequestId

UINT64 = st.integers(0, 2**64 - 1)


def header(nonce: int, checksum: int) -> KVCacheTransferHeader:
    return KVCacheTransferHeader(RequestId("r-1"), 3, 5, 16, 32, 8, 128, DType.BF16, nonce, checksum)


@given(first=UINT64, nonce=UINT64, checksum=UINT64)
def test_an_attempt_is_the_header_made_with_those_numbers(first: int, nonce: int, checksum: int) -> None:
    found = header(first, 7).attempt(nonce, checksum)
    assert found == header(nonce, checksum)
    assert KVCacheTransferHeader.unpack(found.pack()) == found


@pytest.mark.parametrize(("nonce", "checksum"), [(-1, 0), (0, 2**64), ("1", 0), (0, None)])
def test_an_attempt_checks_its_numbers(nonce: int, checksum: int) -> None:
    with pytest.raises(InvalidHeaderError):
        header(0, 0).attempt(nonce, checksum)


@given(nonce=UINT64, checksum=UINT64)
def test_a_packed_header_makes_and_knows_its_attempts(nonce: int, checksum: int) -> None:
    packed, raw = PackedHeader(header(3, 4)), header(nonce, checksum).pack()
    assert packed.attempt(nonce, checksum) == raw
    assert read_stamps(raw) == (nonce, checksum)
    assert packed.is_attempt(raw)


@given(bit=st.integers(0, HEADER_NBYTES * 8 - 1))
def test_stamps_are_read_from_whole_headers_only(bit: int) -> None:
    raw = bytearray(header(1, 2).pack())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptHeaderError):
        read_stamps(bytes(raw))


@pytest.mark.parametrize("changed", [{"layer_start": 2}, {"layer_end": 6}, {"seq_start": 15}, {"request_id": "r-2"}])
def test_another_header_is_no_attempt(changed: dict[str, object]) -> None:
    assert not PackedHeader(header(3, 4)).is_attempt(replace(header(3, 4), **changed).pack())  # type: ignore[arg-type]
    with pytest.raises(CorruptHeaderError):
        read_stamps(header(3, 4).pack()[:-1])
