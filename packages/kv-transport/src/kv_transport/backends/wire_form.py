"""A unit's cells as they cross a network: raw, in LZ4, or through a lossy codec; and back.

| form | payload | its checksums |
|---|---|---|
| raw | the cells | of the cells |
| LZ4 | one block of all cells, if that is worth it, else raw | of the cells, after decompression |
| lossy | each cell encoded | of the encoded cells, made after those of the cells were verified |

WF1: the receiver decodes nothing whose checksums it has not verified. WF2: a decoded cell gets a checksum of its own,
taken where it lies. WF3: a cell that the receiver has already is not touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.block import BlockGeometry
from kv_core.checksum import crc64
from kv_transport.backends.stream import Sink
from kv_transport.codec_rates import CodecRates
from kv_transport.codecs import Codec, compress, decode_cell, decompress, encode_cell, encoded_cell_nbytes
from kv_transport.descriptors import merge_offsets
from kv_transport.errors import ChecksumMismatch, CodecFailed, FrameRefused
from kv_transport.regions import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Cells of one memory: where each lies and how long it is; `geometry` when they are KV."""

    memory: Memory
    offsets: Sequence[int]
    sizes: Sequence[int]
    geometry: BlockGeometry | None = None

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def cells(self) -> list[memoryview]:
        view = self.memory.data_view
        return [view[offset : offset + size] for offset, size in zip(self.offsets, self.sizes, strict=True)]

    def merged(self) -> list[memoryview]:
        """The same bytes in as few pieces as they lie in."""
        view = self.memory.data_view
        return [view[offset : offset + size] for offset, size in merge_offsets(self.offsets, self.sizes)]

    def wire_sizes(self, codec: Codec) -> list[int]:
        """Bytes that each cell counts for in the payload's checksums."""
        if codec.lossless or self.geometry is None:
            return list(self.sizes)
        return [encoded_cell_nbytes(codec, self.geometry)] * len(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class WireForm:
    """What is sent: how it was written, the checksums that go with it, the pieces of the payload."""

    codec: Codec
    checks: list[int]
    parts: list[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)


def write_form(codec: Codec, place: Place, checks: list[int], rates: CodecRates, owner: str) -> WireForm:
    """Encode cells whose checksums are known.

    Raises:
        CodecFailed: a value is not finite, or has no scale.
        ChecksumMismatch: our own cells are not what they were when they were sealed.
        GeometryMismatch: the codec is not for this element type.
    """
    if codec is Codec.NONE:
        return WireForm(codec, checks, place.merged())
    started = rates.now_ns()
    if codec is Codec.LZ4:
        raw = place.merged()
        packed = compress(raw[0] if len(raw) == 1 else b"".join(raw))
        rates.encoded(codec, place.nbytes, started)
        if packed is None:
            return WireForm(Codec.NONE, checks, raw)
        return WireForm(codec, checks, [memoryview(packed)])
    if place.geometry is None:
        raise CodecFailed(codec=codec.value, reason="these are plain bytes")
    cells = place.cells()
    bad = sum(crc64(cell) != check for cell, check in zip(cells, checks, strict=True))
    if bad:
        raise ChecksumMismatch(peer=owner, transport="memory", bad=bad, total=len(cells), layer="any")
    nbytes = encoded_cell_nbytes(codec, place.geometry)
    payload = memoryview(bytearray(nbytes * len(cells)))
    for index, cell in enumerate(cells):
        encode_cell(codec, place.geometry, cell, payload[index * nbytes : (index + 1) * nbytes])
    rates.encoded(codec, place.nbytes, started)
    return WireForm(codec, [crc64(payload[at : at + nbytes]) for at in range(0, len(payload), nbytes)], [payload])


class Arrival:
    """Where a payload goes, and what becomes of it. Lives in one IO thread.

    Args:
        place: the cells in our memory.
        writable: per cell, whether it is still to be written.
        payload: bytes that will arrive.
        diverted: once true, nothing of it may reach the memory any more.

    Raises:
        FrameRefused: so many bytes cannot be these cells.
    """

    def __init__(
        self,
        codec: Codec,
        place: Place,
        writable: Sequence[bool],
        payload: int,
        diverted: Callable[[], bool],
        peer: str,
    ) -> None:
        self._codec = codec
        self._place = place
        self._writable = writable
        self._diverted = diverted
        self.payload: Final = payload
        sizes = place.wire_sizes(codec)
        fits = 0 < payload < place.nbytes if codec is Codec.LZ4 else payload == sum(sizes)
        if not fits:
            raise FrameRefused(peer=peer, reason=f"{payload} bytes of {codec.value} for a unit of {place.nbytes}")
        self._stage = memoryview(b"")
        into: list[memoryview | None]
        if codec is Codec.NONE:
            into = [cell if fresh else None for cell, fresh in zip(place.cells(), writable, strict=True)]
        else:
            self._stage = memoryview(bytearray(payload))
            if codec is Codec.LZ4:
                sizes, into = [payload], [self._stage]
            else:
                into = [self._stage[at * sizes[0] : (at + 1) * sizes[0]] for at in range(len(sizes))]
        self.sink = Sink(into, sizes, diverted)

    def finish(self, expected: list[int], rates: CodecRates) -> tuple[list[int], list[int]]:
        """The sink is full: write the cells, if the payload is right.

        Returns:
            The checksums found, to be compared with `expected` (a cell that was not written counts as right), and
            those of the cells in our memory.

        Raises:
            CodecFailed: it is nothing that the codec writes.
        """
        found = [
            check if check is not None else right for check, right in zip(self.sink.checks, expected, strict=False)
        ]
        if self._codec is Codec.NONE:
            return found, found
        if self._diverted() or None in self.sink.checks:
            return expected, expected
        started = rates.now_ns()
        if self._codec is Codec.LZ4:
            stored = self._decompress(expected)
            found = stored
        else:
            if found != expected:
                return found, found
            stored = self._decode(expected)
        rates.decoded(self._codec, self._place.nbytes, started)
        return found, stored

    def _decompress(self, expected: list[int]) -> list[int]:
        data = memoryview(decompress(self._stage, self._place.nbytes))
        stored, at = [], 0
        for cell, fresh, check in zip(self._place.cells(), self._writable, expected, strict=True):
            if fresh:
                cell[:] = data[at : at + len(cell)]
                check = crc64(cell)
            stored.append(check)
            at += len(cell)
        return stored

    def _decode(self, expected: list[int]) -> list[int]:
        geometry = self._place.geometry
        assert geometry is not None, "lossy codecs have cells"
        nbytes = len(self._stage) // len(expected)
        stored = []
        for index, (cell, fresh) in enumerate(zip(self._place.cells(), self._writable, strict=True)):
            if fresh:
                decode_cell(self._codec, geometry, self._stage[index * nbytes : (index + 1) * nbytes], cell)
            stored.append(crc64(cell) if fresh else 0)
        return stored
