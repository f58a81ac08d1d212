"""Hypothesis strategies for the types of this package; needs the extra `kv-core[testing]`."""

from kv_core import limits
from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_core.errors import MissingExtraError
from kv_core.geometry import Attention, ModelGeometry, attention_of
from kv_core.hashing import Extra
from kv_core.header import MAX_REQUEST_ID_BYTES, KVCacheTransferHeader
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.namespace import EXACT, Fidelity, Namespace
from kv_core.wire import Envelope, Message

try:
    from hypothesis import strategies as st
except ImportError:
    raise MissingExtraError(
        feature="kv_core.testing.strategies", module="hypothesis", package="kv-core", extra="testing"
    ) from None


def names(max_nbytes: int = limits.MAX_NAME_BYTES) -> st.SearchStrategy[str]:
    """Text of 1 to `max_nbytes` bytes in UTF-8."""
    text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=min(max_nbytes, 40))
    return text.filter(lambda name: len(name.encode()) <= max_nbytes)


def dtypes() -> st.SearchStrategy[DType]:
    return st.sampled_from(DType)


def fidelities() -> st.SearchStrategy[Fidelity]:
    lossy = st.builds(Fidelity, st.sampled_from(["fp8_e4m3", "int8", "x-y"]), st.integers(1, (1 << 32) - 1))
    return st.just(EXACT) | lossy


@st.composite
def namespaces(draw: st.DrawFn, block_size: int | None = None) -> Namespace:
    """Any valid namespace; with `block_size` given, of that one."""
    lora_name = draw(st.none() | names())
    return Namespace(
        draw(names()),
        draw(names()),
        lora_name,
        None if lora_name is None else draw(names()),
        draw(st.just("") | names()),
        draw(dtypes()),
        draw(fidelities()),
        block_size or draw(st.integers(limits.MIN_BLOCK_SIZE, limits.MAX_BLOCK_SIZE)),
    )


def token_lists(max_size: int = 200) -> st.SearchStrategy[list[int]]:
    """Tokens, small and extreme ones."""
    token = st.integers(0, 50_000) | st.sampled_from([0, 1, limits.MAX_TOKEN_ID])
    return st.lists(token, max_size=max_size)


def extras(num_tokens: int) -> st.SearchStrategy[list[Extra]]:
    """Content within a sequence of that many tokens; no two begin at one place."""
    if num_tokens == 0:
        return st.just([])
    extra = st.builds(
        Extra,
        st.integers(0, num_tokens - 1),
        st.binary(min_size=1, max_size=limits.MAX_EXTRA_DIGEST_BYTES),
        st.integers(1, num_tokens),
    )
    return st.lists(extra, max_size=4, unique_by=lambda extra: extra.start)


@st.composite
def model_geometries(draw: st.DrawFn) -> ModelGeometry:
    """Any valid model: MHA, GQA, MQA or MLA."""
    num_kv_heads, group = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    num_layers, head_dim = draw(st.integers(1, 200)), draw(st.integers(1, 512))
    num_heads = num_kv_heads * group
    if draw(st.booleans()):
        attention = attention_of(num_heads, num_kv_heads)
        return ModelGeometry("model", num_layers, num_heads, num_kv_heads, head_dim, attention)
    return ModelGeometry(
        "model",
        num_layers,
        num_heads,
        1,
        head_dim,
        Attention.MLA,
        latent_dim=draw(st.integers(1, 1024)),
        rope_dim=draw(st.integers(0, 128)),
    )


def block_geometries() -> st.SearchStrategy[BlockGeometry]:
    """Blocks from one byte to some megabytes."""
    return st.builds(
        BlockGeometry,
        num_layers=st.integers(1, 8),
        num_kv_heads=st.integers(1, 8),
        head_dim=st.integers(1, 64),
        dtype=dtypes(),
        block_size=st.integers(1, 32),
        num_planes=st.integers(1, 2),
    )


@st.composite
def headers(draw: st.DrawFn) -> KVCacheTransferHeader:
    """Any header that the binary form can hold."""
    layer_start = draw(st.integers(0, limits.MAX_LAYERS - 1))
    seq_start = draw(st.integers(0, limits.MAX_TOKENS_PER_REQUEST - 1))
    return KVCacheTransferHeader(
        request_id=RequestId(draw(names(MAX_REQUEST_ID_BYTES))),
        layer_start=layer_start,
        layer_end=draw(st.integers(layer_start + 1, limits.MAX_LAYERS)),
        seq_start=seq_start,
        seq_end=draw(st.integers(seq_start + 1, limits.MAX_TOKENS_PER_REQUEST)),
        num_heads=draw(st.integers(1, limits.MAX_HEADS)),
        head_dim=draw(st.integers(1, limits.MAX_HEAD_DIM)),
        dtype=draw(dtypes()),
        nonce=draw(st.integers(0, limits.MAX_UINT64)),
        checksum=draw(st.integers(0, limits.MAX_UINT64)),
    )


def envelopes(bodies: st.SearchStrategy[Message]) -> st.SearchStrategy[Envelope]:
    """Envelopes around these bodies."""
    uint = st.integers(0, limits.MAX_INT64)
    return st.builds(
        Envelope,
        sender=names().map(NodeId),
        sender_incarnation=uint.map(Incarnation),
        target_incarnation=uint.map(Incarnation),
        wall_ns=uint,
        logical=st.integers(0, limits.MAX_UINT32),
        correlation_id=uint,
        deadline_ns=uint,
        body=bodies,
    )
