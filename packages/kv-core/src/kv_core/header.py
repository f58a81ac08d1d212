"""The header that goes with every run of KV bytes: what they are, for whom, and how to know that they are right.

Fixed binary form of 128 bytes, little-endian:

    offset  size  field
    0       4     magic "KVTH"
    4       2     version, 1
    6       1     dtype
    7       1     length of request_id
    8       16    layer_start, layer_end, seq_start, seq_end    uint32 each, ends exclusive
    24      8     num_heads, head_dim                           uint32 each
    32      8     nonce                                         uint64, one for each attempt
    40      8     checksum                                      uint64, CRC-64/NVME of the payload
    48      72    request_id                                    UTF-8, zero padded
    120     8     CRC-64/NVME of the 120 bytes before

Whether a nonce was seen before is the receiver's question (its replay window), not the header's.

K1: `unpack(pack(h)) == h`. K2: a header that differs in any bit is refused: the CRC finds every burst of up to 64 bits.
K3: a new field needs a new version; a version that this code does not know is refused with both numbers.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final

from kv_core import limits
from kv_core.checksum import Buffer, crc64
from kv_core.dtypes import DType
from kv_core.errors import KVError, RemoteProtocolError
from kv_core.ids import RequestId

HEADER_VERSION: Final = 1
HEADER_NBYTES: Final = 128
MAX_REQUEST_ID_BYTES: Final = 72

_MAGIC: Final = b"KVTH"
_BODY: Final = struct.Struct("<4sHBBIIIIIIQQ72s")
_CRC: Final = struct.Struct("<Q")
_DTYPE_CODES: Final = {
    DType.FP32: 1,
    DType.FP16: 2,
    DType.BF16: 3,
    DType.FP8_E4M3: 4,
    DType.FP8_E5M2: 5,
    DType.INT8: 6,
}
_DTYPE_OF: Final = {code: dtype for dtype, code in _DTYPE_CODES.items()}


class InvalidHeaderError(KVError):
    """A header that the binary form cannot hold, or whose ranges are empty."""

    code = 1070
    template = "transfer header: {what} = {value!r} is invalid: {reason}"


class CorruptHeaderError(RemoteProtocolError):
    """Bytes that are no header, or a damaged one."""

    code = 1071
    template = "refused a transfer header: {reason}"


class UnsupportedHeaderVersionError(RemoteProtocolError):
    """A header of a version that this process does not know."""

    code = 1072
    template = "transfer header of version {theirs}, this process knows {ours}"


@dataclass(frozen=True, slots=True)
class KVCacheTransferHeader:
    """What a run of KV bytes is.

    Args:
        request_id: 1 to 72 bytes of UTF-8.
        layer_start, layer_end: layers, end exclusive.
        seq_start, seq_end: token positions, end exclusive.
        num_heads: KV heads in the payload.
        head_dim: elements per head and token.
        dtype: element type of the payload.
        nonce: drawn for each attempt, so that a replay is seen.
        checksum: CRC-64/NVME of the payload.

    Raises:
        InvalidHeaderError: a value that the binary form cannot hold, or an empty range.
    """

    NBYTES: ClassVar[int] = HEADER_NBYTES

    request_id: RequestId
    layer_start: int
    layer_end: int
    seq_start: int
    seq_end: int
    num_heads: int
    head_dim: int
    dtype: DType
    nonce: int
    checksum: int

    def __post_init__(self) -> None:
        _encoded(self.request_id)
        _require("layer_start", self.layer_start, 0, limits.MAX_LAYERS - 1)
        _require("layer_end", self.layer_end, self.layer_start + 1, limits.MAX_LAYERS)
        _require("seq_start", self.seq_start, 0, limits.MAX_TOKENS_PER_REQUEST - 1)
        _require("seq_end", self.seq_end, self.seq_start + 1, limits.MAX_TOKENS_PER_REQUEST)
        _require("num_heads", self.num_heads, 1, limits.MAX_HEADS)
        _require("head_dim", self.head_dim, 1, limits.MAX_HEAD_DIM)
        _require("nonce", self.nonce, 0, limits.MAX_UINT64)
        _require("checksum", self.checksum, 0, limits.MAX_UINT64)
        if not isinstance(self.dtype, DType):
            raise InvalidHeaderError(what="dtype", value=repr(self.dtype), reason="need a DType")

    def attempt(self, nonce: int, checksum: int) -> "KVCacheTransferHeader":
        """The same bytes under another nonce and checksum; what stays the same is not checked again.

        Raises:
            InvalidHeaderError: not unsigned integers of 64 bits.
        """
        _require("nonce", nonce, 0, limits.MAX_UINT64)
        _require("checksum", checksum, 0, limits.MAX_UINT64)
        made = object.__new__(KVCacheTransferHeader)
        for name in _FIXED:
            object.__setattr__(made, name, getattr(self, name))
        object.__setattr__(made, "nonce", nonce)
        object.__setattr__(made, "checksum", checksum)
        return made

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def num_tokens(self) -> int:
        return self.seq_end - self.seq_start

    def payload_nbytes(self, num_planes: int = 2) -> int:
        """Bytes that the header announces: K and V, or one plane for latent attention."""
        cells = self.num_layers * self.num_tokens
        return num_planes * cells * self.num_heads * self.head_dim * self.dtype.itemsize

    def pack(self) -> bytes:
        """The 128 bytes."""
        raw_id = _encoded(self.request_id)
        body = _BODY.pack(
            _MAGIC,
            HEADER_VERSION,
            _DTYPE_CODES[self.dtype],
            len(raw_id),
            self.layer_start,
            self.layer_end,
            self.seq_start,
            self.seq_end,
            self.num_heads,
            self.head_dim,
            self.nonce,
            self.checksum,
            raw_id,
        )
        return body + _CRC.pack(crc64(body))

    @classmethod
    def unpack(cls, data: Buffer) -> "KVCacheTransferHeader":
        """The header that exactly these bytes hold.

        Raises:
            CorruptHeaderError: wrong length, magic, CRC or field.
            UnsupportedHeaderVersionError: another version.
        """
        raw = bytes(memoryview(data).cast("B"))
        nonce, checksum = read_stamps(raw)
        fixed = raw[:_STAMPS_AT] + _NO_STAMPS + raw[_STAMPS_END : _BODY.size]
        return _fixed_part(fixed).attempt(nonce, checksum)


class PackedHeader:
    """The binary form of a header whose attempts are made, or looked for, again and again."""

    __slots__ = ("_after", "_before", "header")

    def __init__(self, header: KVCacheTransferHeader) -> None:
        """Nonce and checksum of `header` do not matter."""
        self.header: Final = header
        raw = header.pack()
        self._before, self._after = raw[:_STAMPS_AT], raw[_STAMPS_END : _BODY.size]

    def attempt(self, nonce: int, checksum: int) -> bytes:
        """`header.attempt(nonce, checksum).pack()`, for unsigned integers of 64 bits."""
        body = self._before + _STAMPS.pack(nonce, checksum) + self._after
        return body + _CRC.pack(crc64(body))

    def is_attempt(self, raw: bytes) -> bool:
        """Whether these 128 bytes, whose CRC was found to hold, are this header under whatever nonce and checksum."""
        return raw[:_STAMPS_AT] == self._before and raw[_STAMPS_END : _BODY.size] == self._after


def read_stamps(raw: bytes) -> tuple[int, int]:
    """Nonce and checksum of the header that these bytes are, so far as its CRC tells.

    Raises:
        CorruptHeaderError: wrong length, magic or CRC.
    """
    if len(raw) != HEADER_NBYTES:
        raise CorruptHeaderError(reason=f"{len(raw)} bytes, need {HEADER_NBYTES}")
    magic, nonce, checksum, crc = _ENDS.unpack(raw)
    if magic != _MAGIC:
        raise CorruptHeaderError(reason=f"magic {magic!r}")
    found = crc64(raw[: _BODY.size])
    if found != crc:
        raise CorruptHeaderError(reason=f"its CRC is {found:#018x}, it says {crc:#018x}")
    return nonce, checksum


_FIXED: Final = ("request_id", "layer_start", "layer_end", "seq_start", "seq_end", "num_heads", "head_dim", "dtype")
_STAMPS: Final = struct.Struct("<QQ")
_STAMPS_AT: Final = 32
_STAMPS_END: Final = _STAMPS_AT + _STAMPS.size
_NO_STAMPS: Final = bytes(_STAMPS.size)
_ENDS: Final = struct.Struct("<4s28xQQ72xQ")
"""Magic, the stamps and the CRC."""


@lru_cache(maxsize=4096)
def _fixed_part(body: bytes) -> KVCacheTransferHeader:
    """What all attempts at the same bytes have in common: the header with nonce and checksum 0.

    Raises:
        CorruptHeaderError, UnsupportedHeaderVersionError.
    """
    _, version, dtype_code, id_nbytes, *numbers, raw_id = _BODY.unpack(body)
    if version != HEADER_VERSION:
        raise UnsupportedHeaderVersionError(theirs=version, ours=HEADER_VERSION)
    dtype = _DTYPE_OF.get(dtype_code)
    if dtype is None:
        raise CorruptHeaderError(reason=f"dtype code {dtype_code}")
    if id_nbytes > MAX_REQUEST_ID_BYTES or any(raw_id[id_nbytes:]):
        raise CorruptHeaderError(reason=f"request id of {id_nbytes} bytes is not what its field holds")
    try:
        request_id = RequestId(raw_id[:id_nbytes].decode())
        layer_start, layer_end, seq_start, seq_end, num_heads, head_dim, nonce, checksum = numbers
        return KVCacheTransferHeader(
            request_id, layer_start, layer_end, seq_start, seq_end, num_heads, head_dim, dtype, nonce, checksum
        )
    except (InvalidHeaderError, UnicodeDecodeError) as error:
        raise CorruptHeaderError(reason=str(error)) from None


def _encoded(request_id: str) -> bytes:
    try:
        raw = request_id.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidHeaderError(what="request_id", value=ascii(request_id), reason="need UTF-8 text") from None
    if not 1 <= len(raw) <= MAX_REQUEST_ID_BYTES:
        raise InvalidHeaderError(
            what="request_id", value=request_id[:64], reason=f"{len(raw)} bytes, need 1 to {MAX_REQUEST_ID_BYTES}"
        )
    return raw


def _require(what: str, value: int, lowest: int, highest: int) -> None:
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidHeaderError(what=what, value=value, reason=f"need an integer in [{lowest}, {highest}]")
