"""The element types that KV may be stored or sent in.

An unknown name is an error that lists the known ones; there are no aliases, so that a misspelling is never guessed.
"""

from enum import Enum

from kv_core.errors import KVError


class UnknownDTypeError(KVError):
    """A dtype name that is not one of the known ones."""

    code = 1010
    template = "unknown dtype {name!r}; known are {known}"


class DType(Enum):
    """A KV element type; the value is the name that users write."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FP32: 4,
    DType.FP16: 2,
    DType.BF16: 2,
    DType.FP8_E4M3: 1,
    DType.FP8_E5M2: 1,
    DType.INT8: 1,
}


def parse_dtype(name: str) -> DType:
    """The dtype of that name.

    Raises:
        UnknownDTypeError: the name is not one of the known ones; the message lists them.
    """
    try:
        return DType(name)
    except ValueError:
        raise UnknownDTypeError(name=name, known=", ".join(d.value for d in DType)) from None
