"""Arenas on a device: the array code in NumPy against the host's kernels, the CUDA source by its compiler and, as far
as it can run without a GPU, by running its element functions on the host."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.block import BlockGeometry, Layout
from kv_core.checksum import crc64
from kv_core.dtypes import DType
from kv_core.errors import MissingExtraError
from kv_core.ids import RegionId
from kv_transport import Arena, cuda_kernels, device_kernels, kernels
from kv_transport.codecs import Codec, encode_cell, encoded_cell_nbytes
from kv_transport.device_arena import CudaDevice, Device, DeviceArena, HostDevice
from kv_transport.errors import (
    ChecksumMismatch,
    CodecFailed,
    DeviceUnavailable,
    GeometryMismatch,
    InvalidDescriptor,
    StaleGeneration,
)
from tests.transport.helpers_transport import NO_RESERVE, SMALL

FP32 = BlockGeometry(num_layers=4, num_kv_heads=2, head_dim=16, dtype=DType.FP32, block_size=8)
NVCC = shutil.which("nvcc")


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """bf16 bits of numbers of all sizes that have a scale."""
    bits = rng.integers(0, kernels.TOP_MAX + 1, shape) | (rng.integers(0, 2, shape) << 15)
    near = ((rng.standard_normal(shape).astype(np.float32)).view(np.uint32) >> 16).astype(np.int64)
    mixed = np.where(rng.random(shape) < 0.5, bits, near)
    return np.where(rng.random(shape) < 0.1, bits & 0x8000, mixed).astype(np.uint16)  # of both zeros many


# Array code, in NumPy.


@given(st.integers(0, 2**32), st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 12)))
def test_fp8_is_bit_for_bit_that_of_the_host(seed: int, shape: tuple[int, int, int]) -> None:
    values = random_bf16(np.random.default_rng(seed), shape)
    codes, scales = np.empty(shape, np.uint8), np.empty((shape[0], shape[2]), np.uint8)
    assert kernels.plain_quantise_bf16(values, codes, scales)
    got_codes, got_scales, finite = device_kernels.quantise_bf16(np, values)
    assert finite and np.array_equal(got_codes, codes) and np.array_equal(got_scales, scales)
    back = np.empty(shape, np.uint16)
    kernels.plain_dequantise_bf16(codes, scales, back)
    assert np.array_equal(device_kernels.dequantise_bf16(np, codes, scales), back)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC1, 0x4DC4, 0xCDC4])
def test_what_has_no_scale_is_said(bits: int) -> None:
    values = np.full((1, 2, 3), 0x3F80, np.uint16)
    values[0, 1, 2] = bits
    assert not device_kernels.quantise_bf16(np, values)[2]


@pytest.mark.parametrize("layout", list(Layout))
def test_cells_are_gathered_from_and_scattered_to_where_the_arena_has_them(layout: Layout) -> None:
    with Arena.create(SMALL, 8, layout, budget=NO_RESERVE) as arena:
        arena.data[:] = np.random.default_rng(1).integers(0, 256, arena.nbytes)
        slots = np.array([5, 0, 7], np.int64)
        offsets = arena.shape.offsets(slots, 2)
        rows = device_kernels.gather_cells(np, arena.data, offsets, SMALL.slot_layer_nbytes)
        assert [bytes(row) for row in rows] == [bytes(arena.cell(slot, 2)) for slot in slots]
        before = arena.data.copy()
        device_kernels.scatter_cells(np, arena.data, offsets, rows[::-1].copy())
        assert bytes(arena.cell(5, 2)) == rows[2].tobytes() and bytes(arena.cell(7, 2)) == rows[0].tobytes()
        device_kernels.scatter_cells(np, arena.data, offsets, rows)
        assert np.array_equal(arena.data, before)


# The arena.


def device_pair(device: Device, geometry: BlockGeometry = SMALL) -> tuple[DeviceArena, Arena]:
    return (
        DeviceArena.create(geometry, 6, Layout.BLOCK_FIRST, device=device),
        Arena.create(geometry, 9, Layout.LAYER_FIRST, budget=NO_RESERVE),
    )


def check_arena(device: Device) -> None:
    """Everything an arena on this device must do; the same for NumPy and a GPU."""
    there, host = device_pair(device)
    with host:
        rng = np.random.default_rng(7)
        for slot in range(host.num_slots):
            host.raise_generation(slot)
            host.array[slot] = random_bf16(rng, host.array[slot].shape)
            host.seal_block(slot)
        wanted = [bytes(host.cell(slot, layer)) for layer in range(4) for slot in (8, 1, 3)]
        for layer in range(4):
            there.copy_in(layer, [0, 5, 2], host, [8, 1, 3])
        for slot in (4, 6, 7):
            host.raise_generation(slot)
        for layer in range(4):
            there.copy_out(layer, [0, 5, 2], host, [4, 6, 7])
        assert [bytes(host.cell(slot, layer)) for layer in range(4) for slot in (4, 6, 7)] == wanted
        assert all(host.verify(slot) for slot in (4, 6, 7))  # by sums that the device took
        rows, checks = there.encode_fp8(2, [5, 2])
        for row, check, slot in zip(rows, checks, (1, 3), strict=True):
            oracle = bytearray(encoded_cell_nbytes(Codec.FP8_E4M3, SMALL))
            encode_cell(Codec.FP8_E4M3, SMALL, host.cell(slot, 2), memoryview(oracle))
            assert row.tobytes() == bytes(oracle) and int(check) == crc64(bytes(oracle))
        host.cell(1, 0)[3] ^= 1  # no longer what was sealed
        old = there.ref(RegionId(1), 5)
        with pytest.raises(ChecksumMismatch):
            there.copy_in(0, [0, 5], host, [8, 1])
        with pytest.raises(StaleGeneration):
            there.require([old])
        there.require([there.ref(RegionId(1), 0)])


def test_an_arena_moves_blocks_both_ways_with_their_checksums() -> None:
    check_arena(HostDevice())


def test_an_arena_refuses_what_does_not_fit() -> None:
    there, host = device_pair(HostDevice())
    with host, Arena.create(FP32, 4, budget=NO_RESERVE) as other:
        with pytest.raises(GeometryMismatch):
            there.copy_out(0, [0], other, [0])
        for layer, slots, host_slots in [(0, [6], [0]), (4, [0], [0]), (0, [0, 0], [1, 2]), (0, [0], [9]), (0, [], [])]:
            with pytest.raises(InvalidDescriptor):
                there.copy_out(layer, slots, host, host_slots)
        with pytest.raises(InvalidDescriptor, match="not sealed"):
            there.copy_in(0, [0], host, [0])
        with pytest.raises(GeometryMismatch):
            DeviceArena.create(FP32, 2, device=HostDevice()).encode_fp8(0, [0])
        there.data[:] = 0xFF
        with pytest.raises(CodecFailed):
            there.encode_fp8(0, [0])


# Without a GPU.


def fake_cupy(monkeypatch: pytest.MonkeyPatch, count: object) -> None:
    module = ModuleType("cupy")
    vars(module)["cuda"] = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count))
    monkeypatch.setitem(sys.modules, "cupy", module)


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> int:
        raise RuntimeError("CUDA driver version is insufficient")

    fake_cupy(monkeypatch, no_driver)
    with pytest.raises(DeviceUnavailable, match="driver version"):
        DeviceArena.create(SMALL, 4)
    fake_cupy(monkeypatch, lambda: 0)
    with pytest.raises(DeviceUnavailable, match="no CUDA device"):
        DeviceArena.create(SMALL, 4)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=r"kv-transport\[cuda\]"):
        DeviceArena.create(SMALL, 4)


# The fused source.


@given(st.integers(0, 2**32), st.integers(1, 3000))
def test_pieces_joined_by_shifts_give_the_checksum_of_the_whole(seed: int, nbytes: int) -> None:
    """What a thread block does, in Python, with the tables that it is given."""
    data = np.random.default_rng(seed).bytes(nbytes)
    pieces, part = cuda_kernels.pieces_of(nbytes), nbytes // cuda_kernels.pieces_of(nbytes)
    sums = [crc64(data[at * part : (at + 1) * part]) for at in range(pieces)]
    for shift in cuda_kernels.crc_shifts(nbytes):
        if len(sums) == 1:
            break
        moved = [np.bitwise_xor.reduce(shift[[value >> bit & 1 == 1 for bit in range(64)]]) for value in sums[::2]]
        sums = [int(left) ^ right for left, right in zip(moved, sums[1::2], strict=True)]
    assert sums == [crc64(data)]


HARNESS = """
#include <cstdio>
#include <vector>
#include "fused.cu"
int main(int, char **argv) {
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    std::vector<u64> tables(2048);
    u32 nbytes;
    if (fread(tables.data(), 8, 2048, in) != 2048 || fread(&nbytes, 4, 1, in) != 1) return 1;
    std::vector<u8> bytes(nbytes);
    if (fread(bytes.data(), 1, nbytes, in) != nbytes) return 1;
    u64 shift[64];
    if (fread(shift, 8, 64, in) != 64) return 1;
    u64 sums[3] = {kv_crc(bytes.data(), nbytes, tables.data()), kv_crc(bytes.data() + 3, nbytes - 3, tables.data()), 0};
    sums[2] = kv_shift(sums[0], shift);
    fwrite(sums, 8, 3, out);
    u32 shape[3];
    if (fread(shape, 4, 3, in) != 3) return 1;
    u32 matrices = shape[0], tokens = shape[1], channels = shape[2];
    std::vector<u16> values(matrices * tokens * channels);
    if (fread(values.data(), 2, values.size(), in) != values.size()) return 1;
    for (u32 i = 0; i < matrices * channels; ++i) {
        const u16 *first = values.data() + i / channels * tokens * channels + i % channels;
        u32 top = 0;
        for (u32 token = 0; token < tokens; ++token)
            if ((first[token * channels] & 0x7FFFu) > top) top = first[token * channels] & 0x7FFFu;
        int scale = kv_choose_scale(first, tokens, channels, top);
        fputc(scale, out);
        for (u32 token = 0; token < tokens; ++token) fputc((int)kv_quantise(first[token * channels], scale), out);
    }
    return fclose(out);
}
"""


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on this machine")
def test_the_fused_source_compiles_and_its_functions_are_those_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "fused.cu").write_text(cuda_kernels.source())
    (tmp_path / "harness.cu").write_text(HARNESS)
    assert NVCC is not None
    command = [NVCC, "-arch=sm_80", "-Werror", "all-warnings", "-o", "harness", "harness.cu"]  # device code, too
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data, other = np.random.default_rng(5).bytes(4099), np.random.default_rng(6).bytes(5)
    (shift,) = cuda_kernels.crc_shifts(5)  # one piece of 5 bytes
    parts = [cuda_kernels.crc_tables().tobytes(), np.uint32(len(data)).tobytes(), data, shift.tobytes()]
    # Every magnitude alone in its channel, and channels of numbers of all sizes and of like ones.
    rng, alone = np.random.default_rng(8), np.arange(kernels.TOP_MAX + 1, dtype=np.uint16)
    cells = [alone.reshape(1, 1, -1), random_bf16(rng, (50, 16, 64)), random_bf16(rng, (50, 16, 64)) & 0x007F | 0x3F80]
    shaped = [np.array(cell.shape, np.uint32).tobytes() + cell.tobytes() for cell in cells]
    for cell, tail_of_input in zip(cells, shaped, strict=True):
        (tmp_path / "in").write_bytes(b"".join([*parts, tail_of_input]))
        subprocess.run([str(tmp_path / "harness"), "in", "out"], cwd=tmp_path, check=True, timeout=60)
        told = (tmp_path / "out").read_bytes()
        whole, tail, moved = np.frombuffer(told[:24], np.uint64).tolist()
        assert (whole, tail) == (crc64(data), crc64(data[3:]))
        assert moved ^ crc64(other) == crc64(data + other)
        codes, scales = np.empty(cell.shape, np.uint8), np.empty((cell.shape[0], cell.shape[2]), np.uint8)
        assert kernels.plain_quantise_bf16(cell, codes, scales)
        columns = np.frombuffer(told[24:], np.uint8).reshape(cell.shape[0], cell.shape[2], 1 + cell.shape[1])
        assert np.array_equal(columns[:, :, 0], scales)
        assert np.array_equal(columns[:, :, 1:].transpose(0, 2, 1), codes)


@pytest.mark.gpu
def test_the_fused_kernels_do_the_same_on_a_gpu() -> None:
    try:
        device = CudaDevice()
    except (MissingExtraError, DeviceUnavailable) as error:
        pytest.skip(str(error))
    check_arena(device)
