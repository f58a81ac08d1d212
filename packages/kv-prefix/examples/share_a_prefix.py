"""Two prompts share a system prompt on one node; a second node reads it; a router chooses where a third prompt goes.

NumPy stands in for the KV memory: one row per slot. Run it: `python share_a_prefix.py`.
"""

import numpy as np

from kv_core.hashing import hash_tokens
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError
from kv_prefix.events import BlocksStored, Tier
from kv_prefix.matching import prefix_digest
from kv_prefix.placement import Candidate, PlacementRequest, make_placement_policy
from kv_prefix.prefix_index import Holder, PrefixIndex

BLOCK_SIZE = 16
NAMESPACE = Namespace("toy", weights_revision="1", block_size=BLOCK_SIZE)
SYSTEM_PROMPT = list(range(100))


def serve(pool: BlockPool, memory: np.ndarray, name: str, prompt: list[int]) -> int:
    """Run one prompt; returns how many tokens had to be computed."""
    names = hash_tokens(NAMESPACE, prompt)
    match = pool.match(NAMESPACE.digest, names, prompt)
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    opened = pool.open(name, match, num_blocks - len(match.refs))
    if opened.copy is not None:
        kept = opened.copy.num_tokens
        memory[opened.copy.dst.slot, :kept] = memory[opened.copy.src.slot, :kept]
        pool.release(opened.copy.receipt)
    for position in range(opened.num_matched_tokens, len(prompt)):
        slot = opened.refs[position // BLOCK_SIZE].slot
        memory[slot, position % BLOCK_SIZE] = sum(prompt[: position + 1])
    first, end = len(match.refs), len(prompt) // BLOCK_SIZE
    pool.commit(opened.table, NAMESPACE.digest, first, names[first:], prompt[first * BLOCK_SIZE : end * BLOCK_SIZE])
    if end < num_blocks:
        pool.commit_tail(opened.table, NAMESPACE.digest, prompt[end * BLOCK_SIZE :])
    read = [int(memory[opened.refs[i // BLOCK_SIZE].slot, i % BLOCK_SIZE]) for i in range(len(prompt))]
    assert read == list(np.cumsum(prompt)), "every token's KV depends on all tokens before it"
    pool.release(opened.table)
    return len(prompt) - opened.num_matched_tokens


def main() -> None:
    """The story of the module's docstring."""
    pool = BlockPool(32, BLOCK_SIZE, region=RegionId(1))
    memory = np.zeros((32, BLOCK_SIZE), dtype=np.int64)
    index, here = PrefixIndex(), Holder(NodeId("a"), Incarnation(1))
    for name, question in (("first", [501, 502, 503]), ("second", [501, 777])):
        print(f"{name}: computed {serve(pool, memory, name, SYSTEM_PROMPT + question)} tokens")
        for event in pool.take_events():  # a node publishes these; here they go straight into the index
            if isinstance(event, BlocksStored):
                index.stored(here, Tier.HOST, event.block_hashes, consecutive=True)

    prompt = [*SYSTEM_PROMPT, 999]
    names = hash_tokens(NAMESPACE, prompt)
    (held,) = index.lookup(names)
    print(f"{held.holder.node} holds {held.num_blocks} blocks of a third prompt")

    num_tokens = held.num_blocks * BLOCK_SIZE
    digest = prefix_digest(prompt, (), num_tokens)
    lease = pool.lease(NodeId("b"), NAMESPACE.digest, names[held.num_blocks - 1], digest, until_ns=1_000)
    print(f"b may read slots {[ref.slot for ref in lease.refs]}")
    try:
        pool.open("too big", None, 27)
    except NoSpaceError as error:
        print(error)
    print(f"leases that ended at 1000 ns: {len(pool.expire(1_000))}")

    request = PlacementRequest(b"third", names[0].sequence, len(names))
    candidates = [Candidate(NodeId("a"), load=10, by_tier=held.by_tier), Candidate(NodeId("b"), load=0)]
    placement = make_placement_policy("kv_aware").place(request, candidates)
    print(f"third goes to {placement.node}: {placement.reason}")
    stats = pool.stats()
    print(f"free {stats.free} + cached {stats.cached} + pinned {stats.pinned} = {stats.total}")


if __name__ == "__main__":
    main()
