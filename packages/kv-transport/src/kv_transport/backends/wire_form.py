"""A unit's cells as they cross a network: raw, in LZ4, or through a lossy codec; and back.

| form | payload | its checksums |
|---|---|---|
| raw | the cells | of the cells: before them where they are known, else after them, taken on the way |
| LZ4 | one block of all cells, if that is worth it, else raw | of the cells, after decompression |
| lossy | each cell encoded | of the encoded cells, made after those of the cells were verified |

WF1: the receiver decodes nothing whose checksums it has not verified. WF2: a decoded cell gets a checksum of its own,
taken where it lies. WF3: a cell that the receiver has already is not touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from kv_core.block import BlockGeometry
from kv_core.checksum import crc64
from kv_transport import kernels
from kv_transport.backends.payload import Sink, Source, spans_of
from kv_transport.codec_rates import CodecRates
from kv_transport.codecs import Codec, compress, decode_cell, decompress, encode_cell, encoded_cell_nbytes
from kv_transport.descriptors import merge_offsets
from kv_transport.errors import ChecksumMismatch, CodecFailed, FrameRefused
from kv_transport.frames import Sums, encode
from kv_transport.regions import Memory
from kv_transport.stream_io import Spans


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

    def spans(self) -> Spans:
        """Where each cell lies."""
        return spans_of(self.offsets, self.sizes)

    def sums(self) -> list[int]:
        """The CRC-64 of each cell, taken now."""
        return kernels.sum_cells(self.memory.data_view, self.spans())

    def merged(self) -> Spans:
        """The same bytes in as few pieces as they lie in."""
        return np.array(list(merge_offsets(self.offsets, self.sizes)), np.int64)

    def joined(self) -> memoryview:
        """The same bytes one after the other, copied if they do not lie so."""
        view = self.memory.data_view
        pieces = [view[offset : offset + size] for offset, size in merge_offsets(self.offsets, self.sizes)]
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def wire_sizes(self, codec: Codec) -> list[int]:
        """Bytes that each cell counts for in the payload's checksums."""
        if codec.lossless or self.geometry is None:
            return list(self.sizes)
        return [encoded_cell_nbytes(codec, self.geometry)] * len(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class WireForm:
    """What is sent: how it was written, the checksums that go before it (none: they follow), and the payload."""

    codec: Codec
    checks: list[int]
    source: Source

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def sums_of(self, seq: int) -> Callable[[], bytes] | None:
        """Makes the frame with the checksums that follow, if they do."""
        found = self.source.checks
        return None if found is None else lambda: encode(Sums(seq, found.tobytes()))


def summed_form(place: Place) -> WireForm:
    """Raw cells whose checksums nobody knows yet: they are taken while the cells are sent."""
    return WireForm(Codec.NONE, [], Source(place.memory.data_view, place.spans(), summed=True))


def write_form(codec: Codec, place: Place, checks: list[int], rates: CodecRates, owner: str) -> WireForm:
    """Encode cells whose checksums are known.

    Raises:
        CodecFailed: a value is not finite.
        ChecksumMismatch: our own cells are not what they were when they were sealed.
        GeometryMismatch: the codec is not for this element type.
    """
    if codec is Codec.NONE:
        return _raw(place, checks)
    started = rates.now_ns()
    if codec is Codec.LZ4:
        packed = compress(place.joined())
        rates.encoded(codec, place.nbytes, started)
        return _raw(place, checks) if packed is None else WireForm(codec, checks, Source.whole(memoryview(packed)))
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
    found = [crc64(payload[at : at + nbytes]) for at in range(0, len(payload), nbytes)]
    return WireForm(codec, found, Source.whole(payload))


def _raw(place: Place, checks: list[int]) -> WireForm:
    return WireForm(Codec.NONE, checks, Source(place.memory.data_view, place.merged()))


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
        self._stage = memoryview(b"") if codec is Codec.NONE else memoryview(bytearray(payload))
        if codec is Codec.NONE:
            self.sink = Sink(place.memory.data_view, place.spans(), [not fresh for fresh in writable], diverted)
        else:
            pieces = [payload] if codec is Codec.LZ4 else sizes
            begins = [0, *accumulate(pieces[:-1])]
            self.sink = Sink(self._stage, spans_of(begins, pieces), [False] * len(pieces), diverted)

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
