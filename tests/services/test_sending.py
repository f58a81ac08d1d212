"""A prefill's layers reach the hand-over once, in order, complete, and none is held for long."""

import asyncio
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from kv_consistency.update import OwnerEpoch
from kv_consistency.version_vector import Origin
from kv_core.block import BlockRef
from kv_core.ids import Generation, Incarnation, NodeId, RegionId, RequestId
from kv_services.node.prefill_events import OpenHandover
from kv_services.node.sending import HOLD_NS, Sending, SendingSink

NUM_BLOCKS, NUM_LAYERS = 6, 4
REFS = tuple(BlockRef(RegionId(1), slot, Generation(1)) for slot in range(10, 10 + NUM_BLOCKS))


class Arena:
    def __init__(self) -> None:
        self.sealed: set[tuple[int, int]] = set()

    def seal(self, layer: int, slots: Iterable[int]) -> None:
        self.sealed |= {(layer, slot) for slot in slots}


class Handover:
    """Takes each cell once, and only sealed ones."""

    def __init__(self, arena: Arena, first_block: int, ready_blocks: int) -> None:
        self.arena, self.first_block, self.ready_blocks = arena, first_block, ready_blocks
        self.cells: list[tuple[int, int]] = []

    def submit(self, layer: int, blocks: Sequence[BlockRef], start: int = 0) -> None:
        assert tuple(blocks) == REFS[self.first_block + start :][: len(blocks)]
        for number, ref in enumerate(blocks, self.first_block + start):
            assert (layer, ref.slot) in self.arena.sealed or number < self.ready_blocks
            assert (layer, ref.slot) not in self.cells
            self.cells.append((layer, ref.slot))

    submit_threadsafe = submit


@given(
    first_block=st.integers(0, NUM_BLOCKS - 1),
    ready=st.integers(0, NUM_BLOCKS),
    times_ns=st.lists(st.sampled_from([0, HOLD_NS // 3, HOLD_NS, 7 * HOLD_NS]), min_size=8, max_size=8),
    opened_at=st.integers(0, 8),
)
def test_every_cell_is_sent_once_sealed_and_held_for_less_than_a_bound(
    first_block: int, ready: int, times_ns: list[int], opened_at: int
) -> None:
    async def scenario() -> None:
        effect = OpenHandover(RequestId("r"), 1, NodeId("d"), first_block, ready, REFS)
        sending = Sending(effect, 10**9, OwnerEpoch(1, Origin(NodeId("g"), Incarnation(1))))
        arena = Arena()
        handover = Handover(arena, first_block, ready)
        now_ns = 0
        sink = SendingSink(arena, sending, [ref.slot for ref in REFS], lambda: now_ns)
        middle = (ready + NUM_BLOCKS) // 2
        pieces = [(layer, *span) for layer in range(NUM_LAYERS) for span in ((ready, middle), (middle, NUM_BLOCKS))]
        written_ns: dict[tuple[int, int], int] = {}
        for number, ((layer, first, end), took_ns) in enumerate(zip(pieces, times_ns, strict=True)):
            if number == opened_at:
                sending.begin(handover, NUM_LAYERS)
            now_ns += took_ns
            for ref in REFS[first:end]:
                written_ns[layer, ref.slot] = now_ns
            sink.layer_written(layer, first, end)
            if number >= opened_at:
                late = [c for c, at_ns in written_ns.items() if now_ns - at_ns >= HOLD_NS and c not in handover.cells]
                assert all(slot < REFS[first_block].slot for _, slot in late)
        sink.send()
        if opened_at == len(pieces):
            sending.begin(handover, NUM_LAYERS)
        wanted = {(layer, ref.slot) for layer in range(NUM_LAYERS) for ref in REFS[first_block:]}
        assert set(handover.cells) == wanted
        layers = [layer for layer, slot in handover.cells if slot >= REFS[0].slot + ready]
        assert layers == sorted(layers)

    asyncio.run(scenario())


def test_layers_that_follow_quickly_leave_together_and_slow_ones_at_once() -> None:
    async def scenario() -> None:
        effect = OpenHandover(RequestId("r"), 1, NodeId("d"), 0, 0, REFS)
        sending = Sending(effect, 10**9, OwnerEpoch(1, Origin(NodeId("g"), Incarnation(1))))
        arena = Arena()
        handover = Handover(arena, 0, 0)
        sending.begin(handover, NUM_LAYERS)
        now_ns = 0
        sink = SendingSink(arena, sending, [ref.slot for ref in REFS], lambda: now_ns)
        sink.layer_written(0, 0, NUM_BLOCKS)
        sink.layer_written(1, 0, NUM_BLOCKS)
        assert handover.cells == []
        now_ns = HOLD_NS
        sink.layer_written(2, 0, NUM_BLOCKS)
        assert [layer for layer, _ in handover.cells] == sorted([0, 1, 2] * NUM_BLOCKS)
        now_ns = 2 * HOLD_NS
        sink.layer_written(3, 0, NUM_BLOCKS)
        assert len(handover.cells) == NUM_LAYERS * NUM_BLOCKS

    asyncio.run(scenario())
