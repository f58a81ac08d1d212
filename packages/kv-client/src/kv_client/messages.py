"""What a reader of prefixes and a node that holds them say to each other: introductions and read leases.

The roles of a cluster speak the same messages among themselves, so they are kept here, below them. Times on the wire
are durations. New fields go last and have defaults: older peers skip them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from kv_core import limits
from kv_core.dtypes import parse_dtype
from kv_core.namespace import Fidelity, Namespace
from kv_core.wire import Message

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_BYTES)]
Count = Annotated[int, Meta(ge=0, le=limits.MAX_INT64)]
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


READER_MESSAGES: tuple[type[Message], ...] = (IntroduceAgent, AgentIntroduced, LeasePrefix, PrefixLeased, ReleaseLease)
"""Everything above, for the registry of a process."""
