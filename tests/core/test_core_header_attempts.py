"""A header under another nonce and checksum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_core.header import InvalidHeaderError, KVCacheTransferHeader
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
