"""Checksums against their published check values, a bitwise twin, and any cutting."""

from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.checksum import Buffer, crc32c, crc64, xxh3_64, xxh3_128
from kv_core.dtypes import DType, UnknownDTypeError, parse_dtype
from tests.core import plain_hashing


def test_published_check_values() -> None:
    assert crc64(b"123456789") == 0xAE8B14860A799888
    assert crc32c(b"123456789") == 0xE3069283
    assert xxh3_64(b"") == 0x2D06800538D394C2
    assert xxh3_128(b"").hex() == "99aa06d3014798d86001c324468d497f"


@given(st.binary(max_size=200), st.integers(0, 200))
def test_crcs_are_those_of_the_bitwise_twin_in_one_piece_and_in_two(data: bytes, cut: int) -> None:
    assert crc64(data) == plain_hashing.crc64_nvme(data) == crc64(data[cut:], crc64(data[:cut]))
    assert crc32c(data) == plain_hashing.crc32c(data) == crc32c(data[cut:], crc32c(data[:cut]))


@given(st.binary(min_size=17, max_size=3000))
def test_xxh3_is_that_of_the_plain_twin(data: bytes) -> None:
    assert xxh3_128(data) == plain_hashing.xxh3_128(data)


@pytest.mark.parametrize("function", [crc64, crc32c, xxh3_64, xxh3_128])
def test_any_contiguous_buffer_will_do(function: Callable[[Buffer], object]) -> None:
    numbers = np.arange(64, dtype=np.uint32)
    expected = function(numbers.tobytes())
    forms: list[Buffer] = [numbers.data, numbers.reshape(8, 8).data, array("I", numbers.tolist())]
    assert [function(form) for form in [*forms, bytearray(numbers.tobytes())]] == [expected] * 4


@pytest.mark.parametrize("function", [crc64, crc32c, xxh3_64, xxh3_128])
def test_strided_memory_and_text_are_refused(function: Callable[[object], object]) -> None:
    with pytest.raises(BufferError):
        function(np.arange(64, dtype=np.uint8)[::2])
    with pytest.raises(BufferError):
        function(np.zeros((4, 8), dtype=np.uint8).T)
    with pytest.raises(TypeError):
        function("text")


def test_dtypes_have_their_sizes_and_read_their_names() -> None:
    assert {dtype.value: dtype.itemsize for dtype in DType} == {
        "fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
    }  # fmt: skip
    assert all(parse_dtype(dtype.value) is dtype for dtype in DType)


@pytest.mark.parametrize("name", ["bf18", "BF16", "float16", "", "fp8", " bf16"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownDTypeError, match="fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8"):
        parse_dtype(name)
