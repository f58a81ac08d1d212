"""What kv-core is for, in one page: sizes, names, messages, headers and plans. Runs alone."""

import sys

from kv_core.checksum import crc64
from kv_core.compatibility import Compatibility, IncompatiblePeerError, ServedModel, check_compatible
from kv_core.dtypes import DType
from kv_core.geometry import Attention
from kv_core.hashing import HashChain, hash_tokens, token_digest
from kv_core.header import KVCacheTransferHeader
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.namespace import Namespace
from kv_core.presets import preset
from kv_core.sharding import plan_by_layer
from kv_core.wire import Envelope, Message, Registry, WireError, decode, encode


class Lookup(Message, frozen=True, tag="lookup"):
    """Who holds these blocks?"""

    namespace: bytes
    sequence_hashes: list[bytes]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def sizes() -> None:
    model = preset("llama-3-70b")
    for geometry in (model, model.with_attention(Attention.MHA)):
        total = geometry.bytes_per_sequence(131_072, DType.FP16)
        say(f"{geometry.attention.value}: {geometry.bytes_per_token(DType.FP16)} B/token, {total >> 30} GiB at 128K")


def names() -> list[bytes]:
    namespace = Namespace("llama-3-70b", weights_revision="main", salt="tenant-7")
    prompt = list(range(40))
    blocks = hash_tokens(namespace, prompt)
    say(f"{len(prompt)} tokens are {len(blocks)} full blocks; the second is {blocks[1].sequence.hex()}")
    growing = HashChain(namespace)
    grown = growing.extend(prompt[:30]) + growing.extend(prompt[30:])
    say(f"grown in two steps: {'the same' if grown == blocks else 'different'}")
    other = hash_tokens(Namespace("llama-3-70b", "main", salt="tenant-8"), prompt)
    say(f"shared with another tenant: {len(set(blocks) & set(other))} blocks")
    say(f"proof of the whole prefix: {token_digest(prompt).hex()[:16]}...")
    return [block.sequence for block in blocks]


def messages(sequence_hashes: list[bytes]) -> None:
    registry = Registry(Lookup)
    body = Lookup(b"n" * 16, sequence_hashes)
    sent = Envelope(
        NodeId("gateway-1"), Incarnation(3), Incarnation(9), 1_700_000_000_000_000_000, 0, 1, 50_000_000, body
    )
    data = encode(sent, registry)
    say(f"message of {len(data)} B arrives {'whole' if decode(data, registry) == sent else 'changed'}")
    try:
        decode(data[:-1], registry)
    except WireError as error:
        say(str(error))


def headers() -> None:
    payload = bytes(2 * 4 * 16 * 64 * 2)
    header = KVCacheTransferHeader(
        RequestId("req-1"), 0, 1, 0, 16, num_heads=4, head_dim=64, dtype=DType.BF16, nonce=1, checksum=crc64(payload)
    )
    back = KVCacheTransferHeader.unpack(header.pack())
    right = back.checksum == crc64(payload) and back.payload_nbytes() == len(payload)
    say(f"header of {len(header.pack())} B fits its payload: {right}")


def plans() -> None:
    plan = plan_by_layer(80, 131_072, [NodeId("a"), NodeId("b"), NodeId("c")])
    plan, moves = plan.rebalance([NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")])
    say("node d joins: " + ", ".join(f"layers {m.layer_start}-{m.layer_end} from {m.source}" for m in moves))


def joining() -> None:
    ours = Compatibility((ServedModel("llama-3-70b", "main", 16),))
    theirs = Compatibility((ServedModel("llama-3-70b", "main", 32),))
    try:
        check_compatible("node-9", ours, theirs)
    except IncompatiblePeerError as error:
        say(str(error))


if __name__ == "__main__":
    sizes()
    messages(names())
    headers()
    plans()
    joining()
