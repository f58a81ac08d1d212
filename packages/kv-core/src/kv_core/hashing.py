"""The names of KV blocks: two chained hashes over tokens, rooted in a namespace.

For block `i` of a sequence, with `tokens_i` as little-endian uint32 and `extra_i` as below:

    sequence_i = XXH3-128(sequence_{i-1} || tokens_i || extra_i)    sequence_{-1} = namespace.digest
    check_i    = CRC-32C(tokens_i || extra_i) continued from check_{i-1}; check_{-1} = namespace.check_seed

`extra_i` is empty for text. A picture or sound whose placeholder run touches block `i` adds
`start (u32 LE) || length of digest (u32 LE) || digest`, in order of `start`. `tokens_i` has a fixed length within a
namespace, so the three parts cannot run into each other.

A hash names tokens; equal hashes are a hit only after the tokens of the whole prefix were compared. `token_digest` is
that comparison when the tokens are on another machine. Whoever holds a partial block holds no name for it.

H1: equal input, equal names: in every process and Python version. H2: extending is the same as hashing at once.
H3: nothing here uses Python's `hash()`.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Final

import xxhash

from kv_core import limits
from kv_core.block_hashes import BlockHash as BlockHash
from kv_core.block_hashes import BlockHashes as BlockHashes
from kv_core.checksum import Buffer
from kv_core.errors import KVError
from kv_core.hash_chain import PACKED_BYTES, chain_blocks, plain_chain_blocks, split_blocks, unpack
from kv_core.namespace import Namespace

Tokens = Buffer | Sequence[int]
"""Tokens as a buffer of little-endian uint32 (raw bytes, `array("I")`, a NumPy uint32 array) or as integers."""

TOKEN_BYTES: Final = 4
TOKEN_DIGEST_BYTES: Final = 32


class InvalidTokensError(KVError):
    """Tokens or extras that cannot be hashed."""

    code = 1060
    template = "invalid tokens: {reason}"


@dataclass(frozen=True, slots=True)
class Extra:
    """Content that stands behind placeholder tokens `[start, start + length)`, by its digest."""

    start: int
    digest: bytes
    length: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start < limits.MAX_TOKENS_PER_REQUEST or self.length < 1:
            raise InvalidTokensError(reason=f"extra at {self.start} of length {self.length}")
        if not 1 <= len(self.digest) <= limits.MAX_EXTRA_DIGEST_BYTES:
            raise InvalidTokensError(reason=f"extra digest of {len(self.digest)} bytes")


def hash_tokens(namespace: Namespace, tokens: Tokens, extras: Sequence[Extra] = ()) -> list[BlockHash]:
    """The names of the full blocks of `tokens`; tokens after the last full block are left out.

    Raises:
        InvalidTokensError: a token outside uint32, a buffer of another element type, too many tokens.
    """
    return extend(namespace, None, 0, tokens, extras)


def hash_packed(namespace: Namespace, tokens: Tokens, extras: Sequence[Extra] = ()) -> BlockHashes:
    """`hash_tokens` as one packed value: several times as fast, for whoever needs the names and not an object each."""
    return extend_packed(namespace, None, 0, tokens, extras)


def extend(
    namespace: Namespace,
    parent: BlockHash | None,
    start: int,
    tokens: Tokens,
    extras: Sequence[Extra] = (),
) -> list[BlockHash]:
    """The names of the full blocks of `tokens`, which follow the block named `parent` at token position `start`.

    Args:
        parent: the last full block's names; None at the beginning of a sequence.
        start: position of `tokens[0]` in the sequence, a multiple of the block size.
        extras: with positions in the sequence, not in `tokens`.
    """
    return list(starmap(BlockHash, unpack(extend_packed(namespace, parent, start, tokens, extras).packed)))


def extend_packed(
    namespace: Namespace,
    parent: BlockHash | None,
    start: int,
    tokens: Tokens,
    extras: Sequence[Extra] = (),
) -> BlockHashes:
    """`extend` as one packed value."""
    block_size = namespace.block_size
    if start % block_size or (start == 0) != (parent is None):
        raise InvalidTokensError(reason=f"position {start} does not follow a full block of {block_size}")
    raw = token_bytes(tokens)
    if start + len(raw) // TOKEN_BYTES > limits.MAX_TOKENS_PER_REQUEST:
        raise InvalidTokensError(reason=f"more than {limits.MAX_TOKENS_PER_REQUEST} tokens")
    names = (namespace.digest, namespace.check_seed) if parent is None else (parent.sequence, parent.check)
    nbytes = block_size * TOKEN_BYTES
    num_blocks = len(raw) // nbytes
    suffixes = _suffixes(extras, start, num_blocks, block_size)
    if not suffixes:
        return BlockHashes(chain_blocks(raw, nbytes, *names))
    # Runs of plain blocks, and between them the blocks with extras, one by one.
    packed: list[bytes] = []
    done = 0
    for i in [*sorted(suffixes), num_blocks]:
        packed.append(chain_blocks(raw[done * nbytes : i * nbytes], nbytes, *names))
        names = _last(packed[-1], names)
        if i < num_blocks:
            text = raw[i * nbytes : (i + 1) * nbytes] + suffixes[i]
            packed.append(plain_chain_blocks(text, len(text), *names))
            names = _last(packed[-1], names)
        done = i + 1
    return BlockHashes(b"".join(packed))


def extend_columns(
    namespace: Namespace,
    parent: BlockHash | None,
    start: int,
    tokens: Tokens,
    extras: Sequence[Extra] = (),
) -> tuple[list[bytes], list[int]]:
    """`extend` as two columns (sequence hashes, check hashes)."""
    names = list(unpack(extend_packed(namespace, parent, start, tokens, extras).packed))
    return [sequence for sequence, _ in names], [check for _, check in names]


def local_hashes(block_size: int, tokens: Tokens, extras: Sequence[Extra] = ()) -> list[int]:
    """XXH3-64 of each full block's own tokens and extras: what a block holds, whatever stands before it.

    It names content, not a place in a sequence: two blocks with equal local hashes have different KV unless everything
    before them is equal too. For matching against engines' own indexes and for statistics, never for a hit.
    """
    pieces = split_blocks(token_bytes(tokens), block_size * TOKEN_BYTES)
    for i, suffix in _suffixes(extras, 0, len(pieces), block_size).items():
        pieces[i] += suffix
    return [xxhash.xxh3_64_intdigest(piece) for piece in pieces]


class HashChain:
    """The names of a growing sequence, block by block as it fills.

    >>> chain = HashChain(Namespace("llama-3-8b", "main"))
    >>> len(chain.extend(range(40))), chain.num_tokens
    (2, 40)
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._extras: list[Extra] = []
        self._tail = b""
        self._last: BlockHash | None = None
        self._num_hashed = 0

    @property
    def num_tokens(self) -> int:
        """Tokens given so far."""
        return self._num_hashed + len(self._tail) // TOKEN_BYTES

    @property
    def last(self) -> BlockHash | None:
        """The last full block's names; None before the first."""
        return self._last

    def extend(self, tokens: Tokens, extras: Sequence[Extra] = ()) -> list[BlockHash]:
        """Append tokens; the names of the blocks that are full now and were not before.

        Args:
            tokens: what follows the tokens given so far.
            extras: with positions in the sequence; content of several blocks is given once.

        Raises:
            InvalidTokensError: bad tokens, or an extra that begins in a block that has its name already; the chain is
                unchanged.
        """
        if any(extra.start < self._num_hashed for extra in extras):
            raise InvalidTokensError(reason=f"an extra begins before position {self._num_hashed}, which is named")
        raw = self._tail + token_bytes(tokens)
        known = [*self._extras, *extras]
        new = extend(self._namespace, self._last, self._num_hashed, raw, known)
        nbytes = len(new) * self._namespace.block_size * TOKEN_BYTES
        self._tail = raw[nbytes:]
        self._num_hashed += nbytes // TOKEN_BYTES
        self._last = new[-1] if new else self._last
        self._extras = [extra for extra in known if extra.start + extra.length > self._num_hashed]
        return new


def token_digest(tokens: Tokens, extras: Sequence[Extra] = ()) -> bytes:
    """BLAKE2b (32 bytes) over all tokens and extras: what a reader sends to prove that it means the same prefix."""
    raw = token_bytes(tokens)
    state = hashlib.blake2b(digest_size=TOKEN_DIGEST_BYTES, person=b"kv-tokens")
    state.update(struct.pack("<Q", len(raw)))
    state.update(raw)
    for extra in sorted(extras, key=_extra_order):
        state.update(struct.pack("<III", extra.start, extra.length, len(extra.digest)) + extra.digest)
    return state.digest()


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as little-endian uint32.

    Raw bytes are taken as they are; other buffers must hold 4-byte unsigned integers.

    Raises:
        InvalidTokensError: a token outside uint32, or a buffer of another element type.
    """
    if isinstance(tokens, bytes):
        raw = tokens
    else:
        try:
            view = memoryview(tokens)  # type: ignore[arg-type]  # a sequence of integers raises TypeError
        except TypeError:
            return _integers(tokens)  # type: ignore[arg-type]
        raw = _from_view(view)
    if len(raw) % TOKEN_BYTES:
        raise InvalidTokensError(reason=f"{len(raw)} bytes are not a whole number of uint32")
    return raw


def token_view(raw: bytes) -> Sequence[int]:
    """The integers in raw little-endian uint32, not to be changed, without an object for each.

    Raises:
        InvalidTokensError: not a whole number of them.
    """
    try:
        tokens = array("I", raw)
    except ValueError:
        raise InvalidTokensError(reason=f"{len(raw)} bytes are not a whole number of uint32") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    return memoryview(tokens).toreadonly()


def _from_view(view: memoryview) -> bytes:
    native = view.format.lstrip("@=<") if sys.byteorder == "little" else view.format.lstrip("<")
    if view.ndim == 1 and (view.format == "B" or (native in ("I", "L") and view.itemsize == TOKEN_BYTES)):
        return view.tobytes()
    if view.ndim == 1 and sys.byteorder == "big" and view.format in ("I", "L", "@I", "@L", "=I", "=L"):
        return _integers(view.tolist())
    raise InvalidTokensError(reason=f"buffer of format {view.format!r}, {view.ndim} dimensions; need uint32 in one")


def _integers(tokens: Sequence[int]) -> bytes:
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidTokensError(reason=str(error)) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _last(packed: bytes, before: tuple[bytes, int]) -> tuple[bytes, int]:
    """The names of the last block; those `before` when there is none."""
    return next(unpack(packed[-PACKED_BYTES:])) if packed else before


def _extra_order(extra: Extra) -> tuple[int, bytes]:
    return extra.start, extra.digest


def _suffixes(extras: Sequence[Extra], start: int, num_blocks: int, block_size: int) -> dict[int, bytes]:
    """What the extras add to each block, by the block's index from `start`."""
    if len(extras) > limits.MAX_EXTRAS_PER_REQUEST:
        raise InvalidTokensError(reason=f"{len(extras)} extras, at most {limits.MAX_EXTRAS_PER_REQUEST}")
    suffixes: dict[int, bytes] = {}
    if len({(extra.start, extra.digest) for extra in extras}) != len(extras):
        raise InvalidTokensError(reason="the same extra is given twice")
    for extra in sorted(extras, key=_extra_order):
        first = max((extra.start - start) // block_size, 0)
        last = min((extra.start + extra.length - 1 - start) // block_size, num_blocks - 1)
        encoded = struct.pack("<II", extra.start, len(extra.digest)) + extra.digest
        for i in range(first, last + 1):
            suffixes[i] = suffixes.get(i, b"") + encoded
    return suffixes
