"""How fast the codecs are on this machine: tried once, then learnt from use. Thread-safe.

By the processor time of the thread at work, as what bytes cost a thread is (`MovingMeter`): the two are added, and how
often other work interrupted a trial says nothing of the codec.
"""

import threading
from typing import Final

import numpy as np

from kv_core.block import BlockGeometry
from kv_core.clock import thread_cpu_ns
from kv_core.dtypes import DType
from kv_transport.codec_choice import GAIN_MIN, CodecCost, DecayedRate
from kv_transport.codecs import Codec, compress, decode_cell, decompress, encode_cell, encoded_cell_nbytes

_TRIAL: Final = BlockGeometry(num_layers=1, num_kv_heads=8, head_dim=128, dtype=DType.BF16, block_size=16)
"""64 KiB of bf16: a cell of a common model."""
_TRIALS: Final = 3


class CodecRates:
    """KV bytes a second, encoding and decoding. The peer is taken to be as fast as we are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._encode: dict[Codec, DecayedRate] = {}
        self._decode: dict[Codec, DecayedRate] = {}

    def begin_trial(self) -> None:
        """Try every codec once, in a thread of its own; nothing is known until then. Idempotent."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self.try_out, name="kv-codec-trial", daemon=True).start()

    def try_out(self) -> None:
        """Encode and decode one cell with each codec, a few times: some 20 ms."""
        rng = np.random.default_rng(0)
        values = rng.standard_normal(_TRIAL.slot_layer_nbytes // 2, np.float32)
        cell = memoryview((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        out = memoryview(bytearray(len(cell)))
        # Half of it repeats, or LZ4 would have nothing to do.
        text = bytes(cell[: len(cell) // 2]) + bytes(len(cell) // 2)
        for _ in range(_TRIALS):
            started = thread_cpu_ns()
            packed = compress(text) or b""
            started = self.encoded(Codec.LZ4, len(text), started)
            decompress(packed, len(text))
            self.decoded(Codec.LZ4, len(text), started)
            for codec in (Codec.FP8_E4M3, Codec.INT8):
                data = memoryview(bytearray(encoded_cell_nbytes(codec, _TRIAL)))
                started = thread_cpu_ns()
                encode_cell(codec, _TRIAL, cell, data)
                started = self.encoded(codec, len(cell), started)
                decode_cell(codec, _TRIAL, data, out)
                self.decoded(codec, len(cell), started)

    def now_ns(self) -> int:
        """Where a measurement begins, in the thread that also ends it."""
        return thread_cpu_ns()

    def encoded(self, codec: Codec, nbytes: int, started_ns: int) -> int:
        """So many bytes of KV were encoded since then; the time now."""
        return self._note(self._encode, codec, nbytes, started_ns)

    def decoded(self, codec: Codec, nbytes: int, started_ns: int) -> int:
        """So many bytes of KV were decoded since then; the time now."""
        return self._note(self._decode, codec, nbytes, started_ns)

    def may_help(self, codec: Codec, link_rate: float) -> bool:
        """Whether it could be worth it over such a link, however little it left."""
        with self._lock:
            return codec in self._encode and self._encode[codec].rate >= GAIN_MIN * link_rate

    def sample_lz4(self, data: memoryview) -> float:
        """What part of itself LZ4 leaves of this, at most 1."""
        packed = compress(data)
        return 1.0 if packed is None else len(packed) / len(data)

    def costs(self, geometry: BlockGeometry | None, lz4_ratio: float | None) -> list[CodecCost]:
        """What is known, for cells of this form (None: plain bytes) and data that LZ4 leaves this part of."""
        found = []
        with self._lock:
            for codec in (Codec.LZ4, Codec.FP8_E4M3, Codec.INT8):
                if codec not in self._encode or codec not in self._decode:
                    continue
                ratio = lz4_ratio
                if codec is not Codec.LZ4:
                    if geometry is None or geometry.dtype is not DType.BF16:
                        continue
                    ratio = encoded_cell_nbytes(codec, geometry) / geometry.slot_layer_nbytes
                if ratio is not None:
                    found.append(CodecCost(codec, ratio, self._encode[codec].rate, self._decode[codec].rate))
        return found

    def _note(self, rates: dict[Codec, DecayedRate], codec: Codec, nbytes: int, started_ns: int) -> int:
        now = thread_cpu_ns()
        with self._lock:
            rates.setdefault(codec, DecayedRate()).add(nbytes, now - started_ns)
        return now
