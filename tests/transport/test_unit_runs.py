"""Where a unit of plain bytes says that it goes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import Incarnation, NodeId
from kv_transport.descriptors import Cells
from kv_transport.errors import InvalidDescriptor
from kv_transport.frames import UnitHead
from kv_transport.ticket_checks import unpack_runs
from kv_transport.types import PeerName

PEER = PeerName(NodeId("peer"), Incarnation(1))
REGION_NBYTES = 1_000


@given(st.lists(st.tuples(st.integers(-3, 1_010), st.integers(-3, 300)), min_size=1, max_size=8))
def test_runs_are_taken_if_all_of_them_lie_in_the_region(pairs: list[tuple[int, int]]) -> None:
    head = UnitHead(ticket=0, region=1, runs=[number for pair in pairs for number in pair])
    inside = all(at >= 0 and size >= 1 and at + size <= REGION_NBYTES for at, size in pairs)
    if inside:
        assert unpack_runs(head, REGION_NBYTES, PEER) == ([at for at, _ in pairs], [size for _, size in pairs])
    else:
        with pytest.raises(InvalidDescriptor):
            unpack_runs(head, REGION_NBYTES, PEER)


@given(st.lists(st.tuples(st.integers(0, 1_000), st.integers(1, 300)), min_size=1, max_size=8))
def test_what_is_sent_of_cells_is_what_the_owner_unpacks(pairs: list[tuple[int, int]]) -> None:
    remote, sizes = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    cells = Cells(remote * 7, remote, sizes)
    head = UnitHead(ticket=0, region=1, runs=cells.remote_runs())
    assert unpack_runs(head, 10_000, PEER) == (remote.tolist(), sizes.tolist())
    assert cells.remote_runs() == head.runs
