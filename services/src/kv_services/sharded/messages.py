"""What gateway, coordinator and holders of pieces say to each other.

Rows travel as fp32, little-endian, without a shape: both ends know the model's. The caller of a holder is known by the
bus (its key and its life); a holder works only for the one that opened the piece.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kv_consistency.messages import UpdateBatch
from kv_core import limits
from kv_core.sharding import Placement
from kv_core.wire import Message
from kv_services.messages import Count, Epoch, Name, NamespaceFields, ReserveDecode, Sampling, TokenBytes

SINCE_REVISION: Final = 1
"""The wire revision that brought these messages."""

PIECES_MAX: Final = 256
"""Nodes that hold one sequence: more would spend their time on messages."""

ROWS_BYTES_MAX: Final = 4 * limits.MIB
"""One list of rows; a token's own are far below it for any model that the wire's limits allow."""

PASS_BYTES: Final = 512 * limits.KIB
"""What the rows of one message of a prefill's pass may take together: decoding more would hold up the loop."""

Rows = Annotated[bytes, Meta(max_length=ROWS_BYTES_MAX)]
Layer = Annotated[int, Meta(ge=0, le=limits.MAX_LAYERS)]
Position = Annotated[int, Meta(ge=0, le=limits.MAX_TOKENS_PER_REQUEST)]


class PieceFields(msgspec.Struct, frozen=True, array_like=True):
    """The layers and tokens that one node holds; ends are exclusive."""

    node: Name
    layer_start: Layer
    layer_end: Layer
    token_start: Position
    token_end: Position


class ReserveSharded(Message, frozen=True, tag="reserve_sharded"):
    """Gateway to coordinator: hold this sequence in these pieces, compute its KV and decode. The reply is
    `DecodeReserved` without a grant; tokens, giving up and ending are those of any request."""

    request_id: Name
    epoch: Epoch
    namespace: NamespaceFields
    tokens: TokenBytes
    num_confirmed: Count
    sampling: Sampling
    deadline_ns: Count
    pieces: Annotated[tuple[PieceFields, ...], Meta(min_length=1, max_length=PIECES_MAX)]
    after: bytes = b""
    news: UpdateBatch | None = None


class OpenShard(Message, frozen=True, tag="open_shard"):
    """Coordinator to holder: take all slots of this piece, for the namespace's tenant and at most this long."""

    request_id: Name
    epoch: Epoch
    namespace: NamespaceFields
    piece: PieceFields
    deadline_ns: Count


class ShardOpened(Message, frozen=True, tag="shard_opened"):
    """The piece's slots are held."""

    request_id: Name
    epoch: Epoch
    slots: Count


class RunLayers(Message, frozen=True, tag="run_layers"):
    """Coordinator to the only holder of some layers: take these tokens through all layers of your piece."""

    request_id: Name
    epoch: Epoch
    start: Position
    decoding: bool
    hidden: Rows


class LayersRan(Message, frozen=True, tag="layers_ran"):
    """The tokens' state after the piece's last layer."""

    hidden: Rows


class AttendShard(Message, frozen=True, tag="attend_shard"):
    """Coordinator to one holder of several: attend over your tokens in this layer. `keys_values` of the queries' own
    tokens are stored first; empty unless the piece holds them."""

    request_id: Name
    epoch: Epoch
    layer: Layer
    start: Position
    queries: Rows
    keys_values: Rows = b""


class ShardAttended(Message, frozen=True, tag="shard_attended"):
    """What the piece's keys say; see `engine.shard_math.Partials`."""

    maxima: Rows
    sums: Rows
    outputs: Rows


class CloseShard(Message, frozen=True, tag="close_shard"):
    """Coordinator to holder: this epoch is over. Known or not, it is fenced afterwards."""

    request_id: Name
    epoch: Epoch
    cause: Name


def in_pieces(message: ReserveDecode, pieces: Sequence[Placement]) -> ReserveSharded:
    """The same request, to be held in pieces."""
    return ReserveSharded(
        request_id=message.request_id,
        epoch=message.epoch,
        namespace=message.namespace,
        tokens=message.tokens,
        num_confirmed=message.num_confirmed,
        sampling=message.sampling,
        deadline_ns=message.deadline_ns,
        pieces=tuple(PieceFields(p.node, p.layer_start, p.layer_end, p.token_start, p.token_end) for p in pieces),
        after=message.after,
        news=message.news,
    )


SHARD_MESSAGES: tuple[type[Message], ...] = (
    ReserveSharded,
    OpenShard,
    ShardOpened,
    RunLayers,
    LayersRan,
    AttendShard,
    ShardAttended,
    CloseShard,
)
"""Everything above, for the registry of a process."""
