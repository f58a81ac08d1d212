"""What the roles say to each other on the bus: the one schema file that every role shares.

What does not fit its schema is refused by the wire and counted. Times on the wire are
durations, never clock readings of another machine. New fields go last and have defaults: older peers
skip them.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kv_client.messages import READER_MESSAGES
from kv_client.messages import AgentIntroduced as AgentIntroduced
from kv_client.messages import IntroduceAgent as IntroduceAgent
from kv_client.messages import LeasePrefix as LeasePrefix
from kv_client.messages import NamespaceFields as NamespaceFields
from kv_client.messages import PrefixLeased as PrefixLeased
from kv_client.messages import ReleaseLease as ReleaseLease
from kv_consistency.messages import UpdateBatch
from kv_core import limits
from kv_core.compatibility import Compatibility
from kv_core.wire import Message

Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_BYTES)]
Count = Annotated[int, Meta(ge=0, le=limits.MAX_INT64)]
Epoch = Annotated[int, Meta(ge=1, le=1 << 31)]
ANNOUNCED_BLOCKS_MAX: Final = 4_096
"""Blocks named in one announcement (80 KiB of names): of a longer prompt the beginning is announced."""
TokenBytes = Annotated[bytes, Meta(min_length=4, max_length=4 * limits.MAX_TOKENS_PER_REQUEST)]


class OutputToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One generated token; log-probabilities are natural logarithms, None when none were asked for."""

    token_id: Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the decode node chooses tokens; fully determined, so that another node would go on identically."""

    max_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_TOKENS_PER_REQUEST)]
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)]
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)]
    seed: Annotated[int, Meta(ge=-(1 << 63), le=limits.MAX_INT64)]
    stop_token_ids: tuple[int, ...]
    top_logprobs: Annotated[int, Meta(ge=0, le=64)] | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """What a node says of its work and room in each heartbeat."""

    running: Count = 0
    waiting: Count = 0
    waiting_tokens: Count = 0
    slots_total: Count = 0
    slots_free: Count = 0
    slots_cached: Count = 0
    slots_pinned: Count = 0
    tokens_per_second: float = 0.0


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Published by every process at a steady pace: alive, in this role, with this load, and what it must agree on with
    the others to be one of them."""

    node_id: Name
    role: Name
    state: Name
    load: Load
    compatibility: Compatibility | None = None


class LifeIsOver(Message, frozen=True, tag="life_is_over"):
    """To a process that is still heard of after it was declared dead, or replaced: this life of yours has ended. Its
    claims are gone here, so it must begin a new one."""

    incarnation: Count


class Retention(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """For how long a request's prompt is kept before others once it is over; the lowest priority goes first."""

    priority: Annotated[int, Meta(ge=0, le=100)]
    ttl_ns: Annotated[int, Meta(ge=1, le=limits.MAX_INT64)]


class ReserveDecode(Message, frozen=True, tag="reserve_decode"):
    """Gateway to decode node: hold slots for these tokens and decode when their KV is there.

    `tokens` are the prompt and the `num_confirmed` tokens the client already has. With `compute_locally` no prefill
    node will hand over: the decode node computes what it lacks itself. `news` are the updates of the sender that are
    not published yet, here and below: among them what `after` names, if it is so fresh.
    """

    request_id: Name
    epoch: Epoch
    namespace: NamespaceFields
    tokens: TokenBytes
    num_confirmed: Count
    sampling: Sampling
    deadline_ns: Count
    compute_locally: bool = False
    after: bytes = b""
    retention: Retention | None = None
    news: UpdateBatch | None = None


class DecodeReserved(Message, frozen=True, tag="decode_reserved"):
    """The slots are held. `grant` is None when the node needs no hand-over; else it covers the blocks from
    `first_block` on, as far as the prompt reaches without its last token."""

    request_id: Name
    epoch: Epoch
    cached_tokens: Count
    first_block: Count
    grant: bytes | None


class RunPrefill(Message, frozen=True, tag="run_prefill"):
    """Gateway to prefill node: make the KV of all of `tokens` exist and hand it over under `grant`."""

    request_id: Name
    epoch: Epoch
    namespace: NamespaceFields
    tokens: TokenBytes
    decode_node: Name
    first_block: Count
    grant: bytes
    deadline_ns: Count
    after: bytes = b""
    retention: Retention | None = None
    news: UpdateBatch | None = None


class PrefillDone(Message, frozen=True, tag="prefill_done"):
    """Every byte was verified at the decode node. Token counts say where the prompt's KV came from; `tail_ns` is the
    time from the last layer computed to the decode node's word that all of it is there and right."""

    request_id: Name
    epoch: Epoch
    local_tokens: Count
    pulled_tokens: Count
    computed_tokens: Count
    bytes_moved: Count
    bytes_pulled: Count
    units: Count
    retries: Count
    transport: Name
    handover_ns: Count
    queued_ns: Count
    compute_ns: Count
    tail_ns: Count = 0


class HandoverDone(Message, frozen=True, tag="handover_done"):
    """Prefill to decode node: all was sent; the XXH3 over the CRCs of all blocks that were
    handed over, in order, must come out as this."""

    request_id: Name
    epoch: Epoch
    num_tokens: Count
    checksum: Annotated[bytes, Meta(min_length=8, max_length=8)]
    after: bytes = b""
    news: UpdateBatch | None = None


class HandoverAccepted(Message, frozen=True, tag="handover_accepted"):
    """The reply to `HandoverDone`."""

    request_id: Name
    epoch: Epoch


class TokenBatch(Message, frozen=True, tag="token_batch"):
    """Decode node to gateway: tokens `first_index ..` of the answer; `finish` (stop or length) on the last batch."""

    request_id: Name
    epoch: Epoch
    first_index: Count
    tokens: tuple[OutputToken, ...]
    finish: Name | None = None


class DecodeGaveUp(Message, frozen=True, tag="decode_gave_up"):
    """Decode node to gateway: this epoch of the request ends here with an error."""

    request_id: Name
    epoch: Epoch
    error_code: int
    error_fields: dict[str, str | int | float | bool | None]
    may_retry: bool


class EndRequest(Message, frozen=True, tag="end_request"):
    """Gateway to a node: this epoch is over; release what it held. Known or not, the epoch is fenced afterwards."""

    request_id: Name
    epoch: Epoch
    cause: Name


class PrefixComputing(Message, frozen=True, tag="prefix_computing"):
    """Published by a node that begins to compute blocks: consecutive ones, named as `BlockHashes.packed`. All of them
    are expected in `ready_ns`; after `until_ns` nobody need believe it. A hint: whoever misses it computes."""

    computation: Name
    names: Annotated[bytes, Meta(min_length=20, max_length=20 * ANNOUNCED_BLOCKS_MAX)]
    ready_ns: Count
    until_ns: Count


class PrefixComputed(Message, frozen=True, tag="prefix_computed"):
    """Published when that computation is over, well or badly. Whoever follows `after` sees the blocks that came of it
    as claims."""

    computation: Name
    after: bytes = b""


class AdoptPrefix(Message, frozen=True, tag="adopt_prefix"):
    """A node to another that shall hold a prefix from now on: its tokens, and leave to read its blocks from
    `first_block` on. Those before it are there already, or the answer is an error. A `copy` of what is asked for often
    may take the place of colder blocks."""

    namespace: Annotated[bytes, Meta(min_length=16, max_length=16)]
    scopes: tuple[bytes, ...]
    tokens: TokenBytes
    first_block: Count
    grant: bytes
    copy: bool = False


class PrefixAdopted(Message, frozen=True, tag="prefix_adopted"):
    """The reply to `AdoptPrefix`: every block is verified and findable, and claimed in the replica."""

    num_blocks: Count
    nbytes: Count


class Ack(Message, frozen=True, tag="ack"):
    """Heard; nothing more to say."""


ROLE_MESSAGES: tuple[type[Message], ...] = (
    Heartbeat,
    LifeIsOver,
    IntroduceAgent,
    AgentIntroduced,
    ReserveDecode,
    DecodeReserved,
    RunPrefill,
    PrefillDone,
    HandoverDone,
    HandoverAccepted,
    TokenBatch,
    DecodeGaveUp,
    EndRequest,
    PrefixComputing,
    PrefixComputed,
    AdoptPrefix,
    PrefixAdopted,
    Ack,
    *(message for message in READER_MESSAGES if message not in (IntroduceAgent, AgentIntroduced)),
)
"""Everything above and what readers of prefixes say, for the registry of a process."""
