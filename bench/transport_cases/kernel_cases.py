"""The arithmetic on one core: CRC-64, FP8 there and back."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench import harness
from bench.transport_cases import places
from bench.transport_cases.plan import Effort, Outcome
from kv_core.checksum import crc64
from kv_transport import kernels

CRC_NEED = 10.0
FP8_NEED = 1.0


def kernel_cases(effort: Effort) -> Iterator[Outcome]:
    data = np.random.default_rng(1).integers(0, 256, 16 * places.MIB, np.uint8)
    source = np.random.default_rng(2).standard_normal((512, 64, 128), np.float32).view(np.uint32)
    bf16 = (source >> 16).astype(np.uint16)
    codes, scales = np.empty(bf16.shape, np.uint8), np.empty((512, 128), np.uint8)
    back = np.empty_like(bf16)

    def checksum() -> int:
        crc64(data.data)
        return data.nbytes

    def quantise() -> int:
        if not kernels.quantise_bf16(bf16, codes, scales):
            raise ValueError("a value was not finite")
        return bf16.nbytes

    def dequantise() -> int:
        kernels.dequantise_bf16(codes, scales, back)
        return bf16.nbytes

    works: dict[str, tuple[Callable[[], int], float]] = {
        "crc64": (checksum, CRC_NEED),
        "fp8_quantise": (quantise, FP8_NEED),
        "fp8_dequantise": (dequantise, FP8_NEED),
    }
    compiled = "compiled" if kernels.COMPILED else "plain twin"
    for name, (work, need) in works.items():
        found = harness.interleave({name: partial(_rate, work, effort.seconds)}, effort.rounds)
        note = "16 MiB" if name == "crc64" else f"of bf16, {compiled}"
        yield harness.compare(name, found[name].median, "GB/s", ours_need=need, note=f"one core; {note}")


def _rate(work: Callable[[], int], seconds: float) -> float:
    return harness.rate_of(work, seconds) / 1e9
