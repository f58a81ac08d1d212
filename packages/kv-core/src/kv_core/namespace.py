"""Identity: what changes the numbers of a KV block, or who may see them. And shape: how its bytes lie.

A `Namespace` is everything besides the tokens that two requests must share before they may share KV. Its digest is the
root of every hash chain, so blocks of two namespaces never have equal names. `Shape` is carried beside a block and
never part of its name, so re-sharding keeps its hits.

N1: fields are length-prefixed and presence is explicit, so no two different namespaces have the same bytes.
N2: the digest is the same in every process, on every machine, for ever; a change is a new `HASH_SCHEME`.
"""

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Final

from kv_core import limits
from kv_core.block import Layout
from kv_core.checksum import crc32c
from kv_core.dtypes import DType
from kv_core.errors import KVError

HASH_SCHEME: Final = "xxh3-128+crc32c/1"
"""Name and version of everything here and in `hashing`; peers that join compare it."""

NAMESPACE_DIGEST_BYTES: Final = 16


class InvalidNamespaceError(KVError):
    """A field of a namespace or shape that cannot be."""

    code = 1050
    template = "{what} = {value!r} is invalid: {reason}"


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Whether stored KV is what the model computed, or what a lossy codec left of it.

    `Fidelity()` is exact; `Fidelity("fp8_e4m3", 1)` is that codec in that version. Text form: `exact`, `fp8_e4m3/1`.
    """

    codec: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        if not self.codec and self.version == 0:
            return
        allowed = self.codec.isascii() and self.codec.replace("_", "a").replace("-", "a").isalnum()
        if not allowed or self.codec == "exact" or len(self.codec) > limits.MAX_NAME_BYTES:
            raise InvalidNamespaceError(what="codec", value=self.codec, reason="need letters, digits, _ and -")
        if type(self.version) is not int or not 1 <= self.version < 1 << 32:
            raise InvalidNamespaceError(what="codec version", value=self.version, reason="need a positive integer")

    @property
    def is_exact(self) -> bool:
        return not self.codec

    def __str__(self) -> str:
        return f"{self.codec}/{self.version}" if self.codec else "exact"

    @classmethod
    def parse(cls, text: str) -> "Fidelity":
        """The fidelity of that text form.

        Raises:
            InvalidNamespaceError: it is neither `exact` nor `codec/version`.
        """
        if text == "exact":
            return cls()
        codec, slash, version = text.rpartition("/")
        if not slash or not version.isascii() or not version.isdecimal() or version != str(int(version)):
            raise InvalidNamespaceError(what="fidelity", value=text, reason="need exact or codec/version")
        return cls(codec, int(version))


EXACT: Final = Fidelity()


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must agree before two requests may share KV.

    Args:
        model_id: the model's name.
        weights_revision: which weights of that name; new weights need a new revision.
        lora_name: adapter, or None.
        lora_revision: which weights of the adapter; needs `lora_name`.
        salt: the tenant's secret; tenants with different salts never share. Empty: shared by all. Not shown in `repr`.
        dtype: stored element type.
        fidelity: exact, or the lossy codec that the bytes went through.
        block_size: tokens per block.

    `digest` is 16 bytes, `check_seed` starts the CRC-32C chain.
    """

    model_id: str
    weights_revision: str
    lora_name: str | None = None
    lora_revision: str | None = None
    salt: str = field(default="", repr=False)
    dtype: DType = DType.BF16
    fidelity: Fidelity = EXACT
    block_size: int = 16
    digest: bytes = field(init=False, compare=False, repr=False)
    check_seed: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _require_name("model_id", self.model_id, least=1)
        _require_name("weights_revision", self.weights_revision, least=1)
        _require_name("salt", self.salt, least=0)
        if self.lora_name is not None:
            _require_name("lora_name", self.lora_name, least=1)
        if self.lora_revision is not None:
            _require_name("lora_revision", self.lora_revision, least=1)
        if (self.lora_name is None) != (self.lora_revision is None):
            raise InvalidNamespaceError(
                what="lora_revision", value=self.lora_revision, reason="an adapter has a name and a revision"
            )
        _require_int("block_size", self.block_size, limits.MIN_BLOCK_SIZE, limits.MAX_BLOCK_SIZE)
        digest = hashlib.blake2b(self.canonical(), digest_size=NAMESPACE_DIGEST_BYTES, person=b"kv-namespace").digest()
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "check_seed", crc32c(digest))

    def canonical(self) -> bytes:
        """The bytes that are hashed: the scheme, then each field as presence, length and value."""
        fields = (
            HASH_SCHEME,
            self.model_id,
            self.weights_revision,
            self.lora_name,
            self.lora_revision,
            self.salt,
            self.dtype.value,
            str(self.fidelity),
        )
        return b"".join(map(_prefixed, fields)) + struct.pack("<I", self.block_size)


@dataclass(frozen=True, slots=True)
class Shape:
    """Where and how the bytes of a block lie. Converted where a conversion is defined, else refused with both values.

    Args:
        layout: order of slots and layers in the arena.
        tp_rank: which slice of the heads, `0 <= tp_rank < tp_size`.
        tp_size: number of slices.
        layer_start: first layer held.
        layer_end: one past the last layer held.
    """

    layout: Layout
    tp_rank: int
    tp_size: int
    layer_start: int
    layer_end: int

    def __post_init__(self) -> None:
        _require_int("tp_size", self.tp_size, 1, limits.MAX_HEADS)
        _require_int("tp_rank", self.tp_rank, 0, self.tp_size - 1)
        _require_int("layer_start", self.layer_start, 0, limits.MAX_LAYERS)
        _require_int("layer_end", self.layer_end, self.layer_start + 1, limits.MAX_LAYERS)

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_start


def _prefixed(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    raw = text.encode()
    return b"\x01" + struct.pack("<I", len(raw)) + raw


def _require_name(what: str, value: str, least: int) -> None:
    try:
        nbytes = len(value.encode())
    except (AttributeError, UnicodeEncodeError):
        raise InvalidNamespaceError(what=what, value=repr(value), reason="need text that UTF-8 can hold") from None
    if not least <= nbytes <= limits.MAX_NAME_BYTES:
        raise InvalidNamespaceError(
            what=what, value=value[:64], reason=f"need {least} to {limits.MAX_NAME_BYTES} bytes, not {nbytes}"
        )


def _require_int(what: str, value: int, lowest: int, highest: int) -> None:
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidNamespaceError(what=what, value=value, reason=f"need an integer in [{lowest}, {highest}]")
