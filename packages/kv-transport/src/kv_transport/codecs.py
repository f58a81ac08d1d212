"""Fewer bytes for slow links: what a codec makes of cells. Which one is worth its time: `codec_choice`. Pure.

| codec | for | bytes of bf16 | what comes back |
|---|---|---|---|
| `lz4` | anything | what it finds; a unit that does not shrink goes raw | the same bytes |
| `fp8_e4m3` | bf16 | 0.5, and a scale byte per channel (0.531 with 16 tokens a block) | `Fidelity("fp8_e4m3", 1)` |
| `int8` | bf16 | 0.5, and a scale byte per K channel and per V token | `Fidelity("int8", 1)` |

Scales are exponents in one byte: whole ones for INT8 (biased by 127), quarters for FP8 (`kernels`), which has exponents
of its own and gains by being rounded under the better of four. K has few channels with large values, so its scales are
per channel; V has none, so INT8 takes them per token, and a token that comes later does not change them (KIVI, Liu and
others, ICML 2024). FP8 takes channels for both.

C1: `decode(encode(x))` is x for a lossless codec; for a lossy one it is within the error of its format, and encoding
it once more changes nothing. C2: an encoded cell has a length that codec and geometry alone say, or it is a whole unit
of LZ4 that says how long it becomes. C3: what cannot be encoded (not finite, does not shrink) is said, never guessed.
"""

from enum import Enum
from typing import Final, cast

import lz4.block
import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry
from kv_core.checksum import crc64
from kv_core.dtypes import DType
from kv_core.namespace import EXACT, Fidelity
from kv_transport import kernels, limits
from kv_transport.errors import CodecFailed, FrameRefused, GeometryMismatch

LZ4_WORTH: Final = 0.95
"""A unit that LZ4 leaves longer than this part of itself goes raw."""

NO_SCALE: Final = "a value is not finite, or too large for FP8"
"""Why a cell has no form in FP8."""

_INT8_SCALE_MAX: Final = 249


class Codec(Enum):
    """How cells are written on a wire."""

    NONE = "none"
    LZ4 = "lz4"
    FP8_E4M3 = "fp8_e4m3"
    INT8 = "int8"
    FP8_CAST = "fp8_cast"
    """No form on a wire: the two arenas hold different element types, and values are cast (`casting`)."""

    @property
    def lossless(self) -> bool:
        return self in (Codec.NONE, Codec.LZ4)

    @property
    def on_wire(self) -> bool:
        """Whether a unit can be written so."""
        return self is not Codec.FP8_CAST

    @property
    def fidelity(self) -> Fidelity:
        """Under which blocks that came this way may be published."""
        return EXACT if self.lossless else Fidelity(self.value, 1)


def accepted_under(fidelity: Fidelity) -> tuple[Codec, ...]:
    """What may bring blocks that will be published under this fidelity: nothing lossy but its own codec."""
    return (Codec.LZ4, *(codec for codec in Codec if not codec.lossless and codec.fidelity == fidelity))


def require_form(codec: Codec, geometry: BlockGeometry) -> None:
    """Raise `GeometryMismatch` for a lossy codec over anything but bf16."""
    if codec.on_wire and not codec.lossless and geometry.dtype is not DType.BF16:
        raise GeometryMismatch(field=f"dtype for {codec.value}", ours=DType.BF16.value, theirs=geometry.dtype.value)


def encoded_cell_nbytes(codec: Codec, geometry: BlockGeometry) -> int:
    """Bytes of one (slot, layer) under a lossy codec, scales included; those of the cell itself under others."""
    require_form(codec, geometry)
    match codec:
        case Codec.FP8_E4M3:
            return geometry.slot_layer_nbytes // 2 + geometry.num_planes * _channels(geometry)
        case Codec.INT8:
            tokens = geometry.num_kv_heads * geometry.block_size * (geometry.num_planes - 1)
            return geometry.slot_layer_nbytes // 2 + _channels(geometry) + tokens
        case Codec.NONE | Codec.LZ4 | Codec.FP8_CAST:
            return geometry.slot_layer_nbytes


def encode_cell(codec: Codec, geometry: BlockGeometry, cell: memoryview, out: memoryview) -> None:
    """Write one cell under a lossy codec into `out`: the scales, then the codes, both in canonical order.

    Raises:
        CodecFailed: a value is not finite, or has no scale.
        GeometryMismatch: the codec is not for this element type.
    """
    if len(out) != encoded_cell_nbytes(codec, geometry):
        raise CodecFailed(codec=codec.value, reason=f"{len(out)} bytes for a cell")
    values = np.frombuffer(cell, np.uint16).reshape(_matrix_shape(geometry))
    raw = np.frombuffer(out, np.uint8)
    codes = raw[len(raw) - values.size :].reshape(values.shape)
    match codec:
        case Codec.FP8_E4M3:
            scales = raw[: len(raw) - values.size].reshape(values.shape[0], values.shape[2])
            if not kernels.quantise_bf16(values, codes, scales):
                raise CodecFailed(codec=codec.value, reason=NO_SCALE)
        case Codec.INT8:
            heads = geometry.num_kv_heads
            channels = _channels(geometry)
            raw[:channels] = _int8(values[:heads], codes[:heads], axis=1)
            if geometry.num_planes > 1:
                raw[channels : len(raw) - values.size] = _int8(values[heads:], codes[heads:], axis=2)
        case Codec.NONE | Codec.LZ4 | Codec.FP8_CAST:
            raise CodecFailed(codec=codec.value, reason="it has no form for single cells")


def decode_cell(codec: Codec, geometry: BlockGeometry, data: memoryview | bytes, cell: memoryview) -> None:
    """Write the cell that `encode_cell` gave `data` for.

    Raises:
        CodecFailed: wrong length, or a scale that no encoding makes; the cell may be half written.
    """
    if len(data) != encoded_cell_nbytes(codec, geometry):
        raise CodecFailed(codec=codec.value, reason=f"{len(data)} bytes for a cell")
    out = np.frombuffer(cell, np.uint16).reshape(_matrix_shape(geometry))
    raw = np.frombuffer(data, np.uint8)
    codes = raw[len(raw) - out.size :].reshape(out.shape)
    match codec:
        case Codec.FP8_E4M3:
            scales = raw[: len(raw) - out.size].reshape(out.shape[0], out.shape[2])
            kernels.dequantise_bf16(codes, scales, out)
        case Codec.INT8:
            heads, channels = geometry.num_kv_heads, _channels(geometry)
            per_channel = raw[:channels].reshape(heads, 1, geometry.head_dim)
            _from_int8(codes[:heads], per_channel, out[:heads])
            if geometry.num_planes > 1:
                per_token = raw[channels : len(raw) - out.size].reshape(heads, geometry.block_size, 1)
                _from_int8(codes[heads:], per_token, out[heads:])
        case Codec.NONE | Codec.LZ4 | Codec.FP8_CAST:
            raise CodecFailed(codec=codec.value, reason="it has no form for single cells")


def decoded_checks(codec: Codec, geometry: BlockGeometry, data: memoryview) -> list[int]:
    """CRC-64 of each cell that a receiver makes of these encoded ones, which lie one after the other."""
    nbytes = encoded_cell_nbytes(codec, geometry)
    cell, found = memoryview(bytearray(geometry.slot_layer_nbytes)), []
    for at in range(0, len(data), nbytes):
        decode_cell(codec, geometry, data[at : at + nbytes], cell)
        found.append(crc64(cell))
    return found


def compress(unit: bytes | memoryview) -> bytes | None:
    """LZ4 block of a whole unit; None where it is not worth it."""
    packed = cast(bytes, lz4.block.compress(unit, store_size=False))
    return packed if len(packed) <= LZ4_WORTH * len(unit) else None


def decompress(data: bytes | memoryview, nbytes: int) -> bytes:
    """The unit of exactly `nbytes`; never takes more memory than that.

    Raises:
        CodecFailed: it is no LZ4 block, or of another length.
    """
    if not 0 <= nbytes <= limits.UNIT_BYTES_MAX:
        raise CodecFailed(codec="lz4", reason=f"a unit of {nbytes} bytes")
    try:
        unit = cast(bytes, lz4.block.decompress(data, uncompressed_size=nbytes))
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise CodecFailed(codec="lz4", reason=str(error)) from error
    if len(unit) != nbytes:
        raise CodecFailed(codec="lz4", reason=f"{len(unit)} bytes instead of {nbytes}")
    return unit


def wire_codec(name: str, peer: str) -> Codec:
    """The codec that a frame names. Raises `FrameRefused` for one that nothing is written with."""
    if not name:
        return Codec.NONE
    try:
        codec = Codec(name)
    except ValueError:
        raise FrameRefused(peer=peer, reason=f"unknown codec {name!r}") from None
    if codec is Codec.NONE or not codec.on_wire:
        raise FrameRefused(peer=peer, reason=f"{name} is no form on a wire")
    return codec


def codec_name(codec: Codec) -> str:
    """As frames carry it: empty for raw bytes."""
    return "" if codec is Codec.NONE else codec.value


def _channels(geometry: BlockGeometry) -> int:
    return geometry.num_kv_heads * geometry.head_dim


def _matrix_shape(geometry: BlockGeometry) -> tuple[int, int, int]:
    return geometry.num_planes * geometry.num_kv_heads, geometry.block_size, geometry.head_dim


def _int8(values: NDArray[np.uint16], codes: NDArray[np.uint8], axis: int) -> NDArray[np.uint8]:
    """Quantise with one scale along `axis`; writes the codes and gives the scales."""
    top = (values & 0x7FFF).max(axis=axis, keepdims=True)
    if int(top.max(initial=0)) >= 0x7F80:
        raise CodecFailed(codec=Codec.INT8.value, reason="a value is not finite")
    # The least power of two that brings the largest to at most 127.
    scales = np.maximum((top >> 7).astype(np.int32) - 6 + ((top & 0x7F) == 0x7F), 1)
    floats = (values.astype(np.uint32) << 16).view(np.float32)
    codes[:] = np.rint(np.ldexp(floats, 127 - scales)).astype(np.int8).view(np.uint8)
    packed: NDArray[np.uint8] = scales.astype(np.uint8).ravel()
    return packed


def _from_int8(codes: NDArray[np.uint8], scales: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    if int(scales.max(initial=0)) > _INT8_SCALE_MAX:
        raise CodecFailed(codec=Codec.INT8.value, reason=f"a scale of {int(scales.max())}")
    floats = np.ldexp(codes.view(np.int8).astype(np.float32), scales.astype(np.int32) - 127)
    bits = floats.view(np.uint32)
    out[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
