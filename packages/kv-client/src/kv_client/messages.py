"""What a client and a node that holds KV say to each other: introductions, read leases, questions, puts and pins.

The roles of a cluster speak the same messages among themselves, so they are kept here, below them. Times on the wire
are durations. New fields go last and have defaults: older peers skip them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from kv_core import limits
from kv_core.dtypes import parse_dtype
from kv_core.hashing import BlockHash
from kv_core.namespace import Fidelity, Namespace
from kv_core.wire import Message

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_BYTES)]
Count = Annotated[int, Meta(ge=0, le=limits.MAX_INT64)]
TokenBytes = Annotated[bytes, Meta(min_length=4, max_length=limits.MAX_BINARY_BYTES - 4096)]
"""Tokens as uint32 little-endian."""
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]


class NamespaceFields(msgspec.Struct, frozen=True, array_like=True):
    """A `Namespace` on the wire."""

    model_id: Name
    weights_revision: Name
    salt: Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)]
    dtype: Name
    fidelity: Name
    block_size: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCK_SIZE)]
    lora_name: Name | None = None
    lora_revision: Name | None = None

    @classmethod
    def of(cls, namespace: Namespace) -> "NamespaceFields":
        return cls(
            namespace.model_id,
            namespace.weights_revision,
            namespace.salt,
            namespace.dtype.value,
            str(namespace.fidelity),
            namespace.block_size,
            namespace.lora_name,
            namespace.lora_revision,
        )

    def namespace(self) -> Namespace:
        """The namespace these fields name.

        Raises:
            InvalidNamespaceError, UnknownDTypeError: fields that cannot be.
        """
        return Namespace(
            model_id=self.model_id,
            weights_revision=self.weights_revision,
            lora_name=self.lora_name,
            lora_revision=self.lora_revision,
            salt=self.salt,
            dtype=parse_dtype(self.dtype),
            fidelity=Fidelity.parse(self.fidelity),
            block_size=self.block_size,
        )

    def __repr__(self) -> str:
        # The salt is the tenant's secret.
        return f"NamespaceFields({self.model_id}@{self.weights_revision[:12]}, {self.dtype}, {self.fidelity})"


class IntroduceAgent(Message, frozen=True, tag="introduce_agent"):
    """Here is how to reach my arena; the reply is the peer's own. Travels on the authenticated bus only."""

    metadata: bytes


class AgentIntroduced(Message, frozen=True, tag="agent_introduced"):
    """The reply to `IntroduceAgent`."""

    metadata: bytes


class LeasePrefix(Message, frozen=True, tag="lease_prefix"):
    """Let me read blocks `[first_block, num_blocks)` of the prefix of `num_blocks` blocks whose last hash is this. The
    holder compares `token_digest`, over all tokens of the prefix, with its own stored tokens."""

    namespace: NamespaceFields
    sequence: Digest
    check: Count
    first_block: Count
    num_blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_MESSAGE)]
    token_digest: bytes
    lease_ns: Count


class PrefixLeased(Message, frozen=True, tag="prefix_leased"):
    """The blocks stay where they are for `lease_ns`, or until `ReleaseLease`."""

    lease_id: Count
    grant: bytes
    lease_ns: Count


class ReleaseLease(Message, frozen=True, tag="release_lease"):
    """The reader is done."""

    lease_id: Count


class RenewLease(Message, frozen=True, tag="renew_lease"):
    """Let the lease live `lease_ns` from now."""

    lease_id: Count
    lease_ns: Count


class LeaseRenewed(Message, frozen=True, tag="lease_renewed"):
    """It lives that long; the holder may grant less than was asked for."""

    lease_ns: Count


class LookupPrefix(Message, frozen=True, tag="lookup_prefix"):
    """How much of this prompt do you hold? The holder compares all tokens."""

    namespace: NamespaceFields
    tokens: TokenBytes


class PrefixFound(Message, frozen=True, tag="prefix_found"):
    """So many full blocks from the first on, without a hole; `by_tier` says in which tier each is (`Tier`)."""

    num_blocks: Count
    by_tier: tuple[Count, Count, Count, Count]


class AskExist(Message, frozen=True, tag="ask_exist"):
    """Which blocks of these names do you hold, wherever in a prefix? A hint: no tokens are compared."""

    names: Annotated[tuple[BlockHash, ...], Meta(max_length=limits.MAX_BLOCKS_PER_MESSAGE)]


class Existing(Message, frozen=True, tag="existing"):
    """One byte a name, in order: 1 for those that are held."""

    flags: Annotated[bytes, Meta(max_length=limits.MAX_BLOCKS_PER_MESSAGE)]


class ReservePut(Message, frozen=True, tag="reserve_put"):
    """I have the KV of the first `num_blocks` blocks of these tokens: take what you lack of it."""

    namespace: NamespaceFields
    tokens: TokenBytes
    num_blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_MESSAGE)]
    timeout_ns: Count


class PutReserved(Message, frozen=True, tag="put_reserved"):
    """Write blocks from `first_block` on under `grant`, then say `FinishPut`; no grant: all of it is held already."""

    put_id: Count
    first_block: Count
    grant: bytes | None


class FinishPut(Message, frozen=True, tag="finish_put"):
    """Everything was written."""

    put_id: Count


class PutStored(Message, frozen=True, tag="put_stored"):
    """Every byte was verified and the blocks can be found."""

    num_blocks: Count


class PinBlocks(Message, frozen=True, tag="pin_blocks"):
    """Keep the first `num_blocks` blocks of these tokens in memory until I release them, or am gone."""

    namespace: NamespaceFields
    tokens: TokenBytes
    num_blocks: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCKS_PER_MESSAGE)]


class BlocksPinned(Message, frozen=True, tag="blocks_pinned"):
    """They stay."""

    pin_id: Count


class UnpinBlocks(Message, frozen=True, tag="unpin_blocks"):
    """I need them no more."""

    pin_id: Count


class Unpinned(Message, frozen=True, tag="unpinned"):
    """The reply to `UnpinBlocks`."""


READER_MESSAGES: tuple[type[Message], ...] = (
    IntroduceAgent,
    AgentIntroduced,
    LeasePrefix,
    PrefixLeased,
    ReleaseLease,
    RenewLease,
    LeaseRenewed,
    LookupPrefix,
    PrefixFound,
    AskExist,
    Existing,
    ReservePut,
    PutReserved,
    FinishPut,
    PutStored,
    PinBlocks,
    BlocksPinned,
    UnpinBlocks,
    Unpinned,
)
"""Everything above, for the registry of a process."""
