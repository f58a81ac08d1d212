"""What the index is told of claims: which blocks are a run of one prompt, and which only came together."""

import pytest

from kv_consistency.effects import ClaimsAdded
from kv_consistency.update import NamespaceRef, Tier
from kv_consistency.version_vector import Origin
from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId
from kv_prefix.index_table import COMPILED
from kv_prefix.prefix_index import PrefixIndex
from kv_services.replica.index_feed import feed

PROMPT = [BlockHash(bytes([i]) * 16, i) for i in range(3)]
OTHER = BlockHash(b"o" * 16, 9)


def told(names: list[BlockHash], positions: range | tuple[int, ...]) -> PrefixIndex:
    index = PrefixIndex()
    holder, namespace = Origin(NodeId("a"), Incarnation(1)), NamespaceRef(bytes(16), 16)
    hashes, checks = tuple(name.sequence for name in names), tuple(name.check for name in names)
    feed(index, ClaimsAdded(holder, namespace, Tier.HOST, b"", hashes, checks, positions))
    return index


def test_neighbours_in_a_snapshot_are_no_run_so_a_hole_between_them_is_seen() -> None:
    index = told([PROMPT[0], OTHER, PROMPT[2]], (0, 7, 2))
    assert [match.num_blocks for match in index.lookup(PROMPT)] == [1]


@pytest.mark.skipif(not COMPILED, reason="installed without a compiler: the plain table looks at every block")
def test_a_claimed_run_is_one_stretch() -> None:
    index = told(PROMPT, range(3))
    # No prompt has these names; they show that the one between is not looked at.
    assert [match.num_blocks for match in index.lookup([PROMPT[0], OTHER, PROMPT[2]])] == [3]
