"""Each kernel against its plain twin, on every set of instructions this machine has."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_core.checksum import crc64
from kv_transport import kernels

LENGTHS = [0, 1, 7, 8, 15, 16, 17, 127, 128, 129, 255, 256, 257, 272, 1000, 1023, 1024, 1025, 4096]
LENGTHS += [9_215, 9_216, 9_217, 9_343, 9_344, 9_471, 9_472, 9_473, 12_289, 18_432, 40_003]
BEYOND = [(-1, 0, 1), (0, -1, 1), (0, 0, -1), (1, 0, 2**63 - 1), (2**63 - 1, 0, 1), (0, 100, 1)]
FEATURES = [(True, True, True), (True, True, False), (False, False, False)]
RNG = np.random.default_rng(5)


def bitwise_crc64(data: bytes) -> int:
    """CRC-64/NVME as it is defined."""
    crc = 2**64 - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (2**64 - 1)


@pytest.fixture(params=FEATURES, ids=["widest", "fast", "portable"])
def _features(request: pytest.FixtureRequest) -> Iterator[None]:
    if kernels._kernels is None:
        pytest.skip("built without a compiler: the twins are at work")
    kernels._kernels.set_features(*request.param)
    yield
    kernels._kernels.set_features(True, True, True)


def test_the_default_build_is_compiled() -> None:
    assert kernels.COMPILED


def test_the_bitwise_definition_gives_the_check_value() -> None:
    assert bitwise_crc64(b"123456789") == 0xAE8B14860A799888


@pytest.mark.usefixtures("_features")
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_a_copy_of_any_length_has_the_right_bytes_and_sum(nbytes: int) -> None:
    source = RNG.bytes(nbytes + 5)
    to = memoryview(bytearray(nbytes + 9))
    (check,) = kernels.copy_cells(to, memoryview(source), np.array([[4, 5, nbytes]], np.int64))
    assert to == bytes(4) + source[5:] + bytes(5)
    assert check == crc64(source[5:]) == (bitwise_crc64(source[5:]) if nbytes < 2000 else check)


@contextlib.contextmanager
def page_seen_twice() -> Iterator[memoryview]:
    """Two pages of address space that are one page of memory: what is written first is lost."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fixed, read_write = 0x10, mmap.PROT_READ | mmap.PROT_WRITE
    fd = os.memfd_create("page")
    os.ftruncate(fd, mmap.PAGESIZE)
    base = libc.mmap(None, 2 * mmap.PAGESIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for at in (base, base + mmap.PAGESIZE):
        assert libc.mmap(at, mmap.PAGESIZE, read_write, mmap.MAP_SHARED | fixed, fd, 0) == at
    os.close(fd)
    try:
        yield memoryview((ctypes.c_uint8 * (2 * mmap.PAGESIZE)).from_address(base)).cast("B")
    finally:
        libc.munmap(base, 2 * mmap.PAGESIZE)


@pytest.mark.usefixtures("_features")
def test_the_sum_is_of_what_has_arrived_and_not_of_what_was_read() -> None:
    source = RNG.bytes(2 * mmap.PAGESIZE)
    for copy in (kernels.copy_cells, kernels.plain_copy_cells):
        with page_seen_twice() as to:
            (check,) = copy(to, memoryview(source), np.array([[0, 0, len(source)]], np.int64))
            assert check == crc64(to) != crc64(source)
    with page_seen_twice() as to:
        arrived, read = kernels.copy_unsealed_cells(to, memoryview(source), np.array([[0, 0, len(source)]], np.int64))
        assert arrived == [crc64(to)] and read == [crc64(source)]


CELLS = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(0, 700)), max_size=8)


@pytest.mark.usefixtures("_features")
@given(CELLS)
def test_cells_are_copied_and_summed_as_the_twin_does(cells: list[tuple[int, int, int]]) -> None:
    table = np.array(cells, np.int64).reshape(-1, 3)
    source = memoryview(np.random.default_rng(1).bytes(1_200))
    one, other = memoryview(bytearray(1_200)), memoryview(bytearray(1_200))
    try:
        expected = kernels.plain_copy_cells(other, source, table)
    except IndexError as error:
        with pytest.raises(IndexError, match=str(error)):
            kernels.copy_cells(one, source, table)
        assert one == other == bytes(1_200), "nothing was copied"
        return
    assert kernels.copy_cells(one, source, table) == expected
    assert one == other


@pytest.mark.parametrize("cell", BEYOND)
def test_a_cell_beyond_its_memory_is_refused(cell: tuple[int, int, int]) -> None:
    to = memoryview(bytearray(100))
    for copy in (kernels.copy_cells, kernels.plain_copy_cells):
        with pytest.raises(IndexError):
            copy(to, memoryview(bytes(100)), np.array([cell], np.int64))


def test_read_only_memory_is_not_written() -> None:
    with pytest.raises((BufferError, TypeError, ValueError)):
        kernels.copy_cells(memoryview(bytes(8)), memoryview(bytes(8)), np.array([[0, 0, 8]], np.int64))


def test_other_threads_run_during_a_copy() -> None:
    """The GIL is given back: where nobody is made to give it up, another thread can only run while we copy."""
    source, to = memoryview(bytearray(32 << 20)), memoryview(bytearray(32 << 20))
    table = np.array([[0, 0, 32 << 20]], np.int64)
    go, ran = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: ran.set() if go.wait() else None)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        go.set()
        for _ in range(200):  # the system may have nothing left for the other thread in one copy
            kernels.copy_cells(to, source, table)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(before)
        thread.join()


# FP8.

SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 70))


@st.composite
def bf16(draw: st.DrawFn) -> NDArray[np.uint16]:
    shape = draw(SHAPES)
    seed, kind = draw(st.integers(0, 2**32)), draw(st.sampled_from(["normal", "bits", "tiny", "large", "zero"]))
    rng = np.random.default_rng(seed)
    if kind == "bits":
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        return np.where((bits & 0x7FFF) > kernels.TOP_MAX, bits & 0xBFFF, bits).astype(np.uint16)
    scale = {"normal": 1.0, "tiny": 1e-14, "large": 5e7, "zero": 0.0}[kind]
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def as_float(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def both(values: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    codes, scales = np.empty(values.shape, np.uint8), np.empty((values.shape[0], values.shape[2]), np.uint8)
    assert kernels.quantise_bf16(values, codes, scales)
    return codes, scales


@pytest.mark.usefixtures("_features")
@given(bf16())
def test_quantisation_is_the_twins_bit_by_bit(values: NDArray[np.uint16]) -> None:
    codes, scales = both(values)
    plain_codes, plain_scales = np.empty_like(codes), np.empty_like(scales)
    assert kernels.plain_quantise_bf16(values, plain_codes, plain_scales)
    assert np.array_equal(scales, plain_scales)
    assert np.array_equal(codes, plain_codes)


@pytest.mark.usefixtures("_features")
@given(bf16())
def test_what_comes_back_is_within_the_error_of_the_format(values: NDArray[np.uint16]) -> None:
    """Half a step of 3 mantissa bits, or of the smallest code of the channel; and what bf16 rounds off that."""
    codes, scales = both(values)
    back = np.empty_like(values)
    kernels.dequantise_bf16(codes, scales, back)
    was, found = as_float(values), as_float(back)
    half = kernels.SCALES[scales].astype(np.float64)[:, None, :] * 2.0**-10
    assert (np.abs(found - was) <= np.maximum(np.abs(was) / 16, half) + np.abs(was) / 256).all()


@pytest.mark.usefixtures("_features")
@given(bf16())
def test_what_was_quantised_once_is_exact_from_then_on(values: NDArray[np.uint16]) -> None:
    codes, scales = both(values)
    once, again = np.empty_like(values), np.empty_like(values)
    kernels.dequantise_bf16(codes, scales, once)
    kernels.dequantise_bf16(*both(once), again)
    assert np.array_equal(again, once)


@pytest.mark.usefixtures("_features")
@given(st.integers(0, 2**32), st.integers(1, 16), st.floats(-9, 7))
def test_no_other_scale_of_its_octave_loses_less(seed: int, tokens: int, size: float) -> None:
    """Against the true squared error in float64, code by code, of each scale that cuts nothing off."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal((2, tokens, 8)) * 10**size).astype(np.float32)
    values = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    _, scales = both(values)
    was, least = np.abs(as_float(values)), kernels.least_scales((values & 0x7FFF).max(axis=1))
    lost = []
    for byte in range(4):
        power = np.exp2((least + byte - 176) / 4)[:, None, :, None]
        distance = np.abs(was[..., None] / power - kernels.E4M3_VALUES).min(axis=-1, keepdims=True) * power
        lost.append((distance[..., 0] ** 2).sum(axis=1))
    chosen = np.take_along_axis(np.array(lost), (scales - least)[None], axis=0)[0]
    assert (chosen <= np.min(lost, axis=0) * 1.001 + 1e-30).all()


@pytest.mark.usefixtures("_features")
def test_a_quarter_of_an_octave_gains_a_third_of_the_error() -> None:
    """What the choice is for: on numbers without a pattern, against the least scale of each channel."""
    rng = np.random.default_rng(4)
    values = (rng.standard_normal((64, 16, 64)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes, scales = both(values)
    back = np.empty_like(values)
    kernels.dequantise_bf16(codes, scales, back)
    was = as_float(values)
    least = kernels.SCALES[kernels.least_scales((values & 0x7FFF).max(axis=1))].astype(np.float64)[:, None, :]
    plain = kernels.E4M3_VALUES[kernels.nearest_codes(np.abs(was) / least)] * least
    gained = ((as_float(back) - was) ** 2).sum() / ((plain - np.abs(was)) ** 2).sum()
    assert 0.5 < gained < 0.75


@pytest.mark.usefixtures("_features")
def test_every_code_under_every_scale_is_dequantised_as_the_twin_does() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 256).reshape(-1, 256, 1)
    scales = np.arange(256, dtype=np.uint8).reshape(-1, 1)
    one, other = np.empty(codes.shape, np.uint16), np.empty(codes.shape, np.uint16)
    kernels.dequantise_bf16(codes, scales, one)
    kernels.plain_dequantise_bf16(codes, scales, other)
    assert np.array_equal(one, other)


@pytest.mark.usefixtures("_features")
def test_a_magnitude_has_the_least_scale_that_does_not_cut_it_off() -> None:
    top = np.arange(kernels.TOP_MAX + 1, dtype=np.uint16)
    fits = as_float(top)[:, None] <= 464 * np.exp2((np.arange(256) - 176) / 4)
    assert np.array_equal(kernels.least_scales(top), fits.argmax(axis=1)) and fits.any(axis=1).all()
    codes, scales = both(top.reshape(1, 1, -1)[:, :, -1024:])
    assert (codes < 0x7F).all() and scales.max() == 255


@pytest.mark.usefixtures("_features")
@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x4DC4, 0xCDC4])
def test_what_is_not_finite_or_too_large_is_not_quantised(bits: int) -> None:
    values = np.zeros((2, 16, 8), np.uint16)
    values[1, 3, 5] = bits
    codes, scales = np.empty(values.shape, np.uint8), np.empty((2, 8), np.uint8)
    assert not kernels.quantise_bf16(values, codes, scales)
    assert not kernels.plain_quantise_bf16(values, codes, scales)


def test_shapes_that_cannot_be_are_refused() -> None:
    values, codes, scales = np.zeros((2, 4, 8), np.uint16), np.zeros((2, 4, 8), np.uint8), np.zeros((2, 8), np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.quantise_bf16(values, codes, scales[:1])
    with pytest.raises(ValueError, match="do not fit"):
        kernels.dequantise_bf16(codes[:1], scales, values)


def test_without_the_compiled_part_the_twins_stand_in() -> None:
    """In a process where the extension cannot be imported, the same calls give the same results."""
    program = """
import sys
sys.modules["kv_transport._kernels"] = None
import numpy as np
from kv_transport import kernels
assert not kernels.COMPILED
to = memoryview(bytearray(9))
print(kernels.copy_cells(to, memoryview(b"123456789"), np.array([[0, 0, 9]], np.int64)), bytes(to))
codes, scales = np.empty((1, 2, 1), np.uint8), np.empty((1, 1), np.uint8)
print(kernels.quantise_bf16(np.array([[[0x3F80], [0x4000]]], np.uint16), codes, scales), codes.ravel(), scales)
back = np.empty((1, 2, 1), np.uint16)
kernels.dequantise_bf16(codes, scales, back)
print(back.ravel())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"[{0xAE8B14860A799888}] b'123456789'",
        "True [112 120] [[148]]",
        "[16256 16384]",
    ]
