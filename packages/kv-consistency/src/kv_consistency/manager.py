"""The facade: what exists, whether it may be read, and who holds which prefix.

`KvCacheConsistencyManager` is a replica and a set of questions about it. Everything that changes it is an event, given
to `step`, or one of the methods below, which make that event and keep its effects for `drain`. Questions change
nothing but an entry's access time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_consistency.effects import Effect
from kv_consistency.events import NOTHING, Event, Instant
from kv_consistency.hlc import Timestamp
from kv_consistency.update import NamespaceRef, OwnerEpoch, Tier
from kv_consistency.version_vector import CausalToken, Origin, VersionVector
from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId, RequestId

FIRST_LIFE: Final = Incarnation(1)


@dataclass(frozen=True, slots=True)
class KvCacheEntry:
    """What a replica knows of one request's KV.

    Attributes:
        version: stamp of the last update; it only grows.
        seq_len: tokens of KV.
        checksum: XXH3 over the block CRCs in order; 0 when it is not known yet.
        nodes: living nodes that hold all of it.
        access_ns: monotonic time of the last read or write here.
        epoch: the request's owner.
        token: what a read elsewhere must follow to find this.
    """

    request_id: RequestId
    version: Timestamp
    seq_len: int
    checksum: int
    nodes: tuple[NodeId, ...]
    access_ns: int
    epoch: OwnerEpoch
    namespace: NamespaceRef | None
    token: CausalToken


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A holder of a prefix: which life of which node, and the fastest tier that has every block of the overlap."""

    holder: Origin
    tier: Tier


@dataclass(frozen=True, slots=True)
class PrefixOverlap:
    """The longest prefix that is held: `num_blocks` from block 0 on, without a hole, and who holds all of them."""

    num_blocks: int
    num_tokens: int
    holders: tuple[PrefixHolder, ...]


class KvCacheConsistencyManager:
    """One replica of the cluster's metadata.

    Args:
        node: this node.
        incarnation: this life of it, above every one before (`next_incarnation`).
    """

    def __init__(self, node: NodeId, incarnation: Incarnation = FIRST_LIFE) -> None:
        self.origin = Origin(node, incarnation)

    def step(self, event: Event) -> list[Effect]:
        """Apply one event; returns what must be done. Typed errors for what is refused; then nothing was changed."""
        raise NotImplementedError

    def drain(self) -> list[Effect]:
        """The effects of the methods called since the last time."""
        raise NotImplementedError

    def register_update(
        self,
        request_id: RequestId,
        new_seq_len: int,
        written_nodes: Sequence[NodeId],
        *,
        checksum: int = 0,
        start: int | None = None,
        epoch: OwnerEpoch | None = None,
        namespace: NamespaceRef | None = None,
        after: CausalToken = NOTHING,
        at: Instant | None = None,
    ) -> Timestamp:
        """The KV of a request now reaches `new_seq_len` tokens, all of it on `written_nodes` (see `LocalRegister`).

        Returns:
            The version of the entry; it only grows.

        Raises:
            ShrinkingUpdateError, SkippingUpdateError: it would lose or skip tokens; both name both lengths.
            FencedError: the request has a newer owner than `epoch`.
            StaleReplicaError: `after` is not applied here yet.
        """
        raise NotImplementedError

    def verify_readable(
        self,
        request_id: RequestId,
        required_seq_len: int,
        *,
        after: CausalToken = NOTHING,
        epoch: OwnerEpoch | None = None,
        at: Instant | None = None,
    ) -> Timestamp:
        """The version of a request whose KV of `[0, required_seq_len)` is readable now.

        Raises:
            NotFoundError: never registered, ended or purged.
            IncompleteError: it has fewer tokens.
            StaleReplicaError: this replica has not applied `after`; wait for it with `WaitFor`.
            FencedError: the caller works for a former owner.
            HolderLostError: every node that held it, or the origin of a dot in `after`, died.
        """
        raise NotImplementedError

    def find_prefix_match(
        self, prefix_hash: bytes | Sequence[BlockHash] | Sequence[bytes], min_overlap: int = 1
    ) -> PrefixOverlap | None:
        """The longest held prefix of at least `min_overlap` tokens.

        Args:
            prefix_hash: the hashes of a prompt's blocks in order; or the sequence hash of one whole prefix, which is
                then found exactly or not at all.

        A claim is a hint: the holder compares tokens when it grants a read.
        """
        raise NotImplementedError

    def take_ownership(self, request_id: RequestId, *, keep: bool = False, at: Instant | None = None) -> OwnerEpoch:
        """This node owns the request now; writers of former epochs are fenced."""
        raise NotImplementedError

    def end_request(self, request_id: RequestId, epoch: OwnerEpoch | None = None, *, at: Instant | None = None) -> None:
        """The request is over; unknown requests are ignored.

        Raises:
            FencedError: it has a newer owner than `epoch`.
        """
        raise NotImplementedError

    def entry(self, request_id: RequestId) -> KvCacheEntry:
        """What is known of a request.

        Raises:
            NotFoundError: nothing readable.
        """
        raise NotImplementedError

    def token(self, request_id: RequestId) -> CausalToken:
        """What a read elsewhere must follow to see the entry as it is here.

        Raises:
            NotFoundError: nothing readable.
        """
        raise NotImplementedError

    def vector(self) -> VersionVector:
        """What is applied here."""
        raise NotImplementedError

    def lag(self) -> dict[Origin, int]:
        """Replication lag in versions: for each living origin, its updates known to exist and not applied here."""
        raise NotImplementedError
