"""Replay window, grant progress, cutting and merging, and the receiver's machine, each against something simpler."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_transport import frames, limits
from kv_transport import inbound_state as ins
from kv_transport.descriptors import Cells, cut_units, merge_offsets, split_pieces
from kv_transport.errors import (
    ConnectionLost,
    FrameRefused,
    GrantRefused,
    InvalidDescriptor,
    InvalidTransition,
    ReplayedNonce,
)
from kv_transport.progress import GrantProgress
from kv_transport.replay import ReplayWindow

WINDOW = limits.REPLAY_WINDOW
LOST = ConnectionLost(peer="p", transport="shm", cause="test")

# Replay.

JUMPS = st.one_of(st.integers(-3, 3), st.integers(-WINDOW - 3, -WINDOW + 3), st.integers(WINDOW - 3, WINDOW + 3))


@given(st.lists(JUMPS, max_size=100))
def test_a_nonce_is_accepted_once_and_only_while_it_is_remembered(jumps: list[int]) -> None:
    window, used, newest = ReplayWindow("p"), set[int](), -1
    at = 0
    for jump in jumps:
        at = max(0, at + jump)
        if at not in used and newest - at < WINDOW:
            window.use(at)
            used.add(at)
            newest = max(newest, at)
        else:
            with pytest.raises(ReplayedNonce):
                window.use(at)


# Progress.


STEPS = st.tuples(
    st.sampled_from(["begin", "begin", "land", "abort"]),
    st.sampled_from([0, 0, 1, 2]),
    st.integers(-1, 5),
    st.integers(-1, 7),
)


@given(st.integers(1, 6), st.lists(STEPS, min_size=10))
def test_a_position_is_written_by_one_unit_at_a_time_and_never_again_once_verified(
    positions: int, steps: list[tuple[str, int, int, int]]
) -> None:
    progress = GrantProgress(5, 8, positions)
    verified: list[set[int]] = [set(), set(), set()]
    landing: list[list[set[int]]] = [[], [], []]
    for what, index, start, end in steps:
        under_way = landing[index]
        if what == "begin":
            span = set(range(start, end))
            fits = bool(span) and span <= set(range(positions))
            if not fits or any(span & other for other in under_way):
                with pytest.raises(GrantRefused):
                    progress.begin(5 + index, start, end)
                continue
            fresh = progress.begin(5 + index, start, end)
            assert {bit for bit in range(positions) if fresh >> bit & 1} == span - verified[index]
            under_way.append(span - verified[index])
        elif under_way:
            bits = under_way.pop()
            mask = sum(1 << bit for bit in bits)
            if what == "abort":
                progress.abort(5 + index, mask)
                continue
            before = len(verified[index])
            verified[index] |= bits
            assert progress.land(5 + index, mask) is (before < len(verified[index]) == positions)
        assert progress.missing_layers() == [5 + i for i in range(3) if len(verified[i]) < positions]
        assert progress.complete is all(len(layer) == positions for layer in verified)
        assert progress.verified() == [sum(1 << bit for bit in layer) for layer in verified]


# Cutting and merging.


@st.composite
def cells(draw: st.DrawFn) -> Cells:
    """Cells that lie apart on each side, many of them adjacent on one or both."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=20))
    offsets = []
    for _ in range(2):
        gaps = draw(st.lists(st.sampled_from([0, 0, 0, 3]), min_size=len(sizes), max_size=len(sizes)))
        at, side = 0, []
        for size, gap in zip(sizes, gaps, strict=True):
            side.append(at + gap)
            at += gap + size
        offsets.append(side)
    order = list(range(len(sizes)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    pick = np.array(order, np.int64)
    local, remote, lengths = (np.array(values, np.int64) for values in (*offsets, sizes))
    return Cells(local[pick], remote[pick], lengths[pick])


def bytes_of(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Every byte as (local, remote), in order."""
    return [(local + at, remote + at) for local, remote, size in pieces for at in range(size)]


@given(cells())
def test_merged_runs_are_the_same_bytes_and_no_two_neighbours_could_be_merged(given_cells: Cells) -> None:
    plain = list(zip(given_cells.local.tolist(), given_cells.remote.tolist(), given_cells.sizes.tolist(), strict=True))
    runs = given_cells.runs()
    assert bytes_of([(run.local, run.remote, run.nbytes) for run in runs]) == bytes_of(plain)
    for first, second in pairwise(runs):
        adjacent = first.local + first.nbytes == second.local, first.remote + first.nbytes == second.remote
        assert adjacent != (True, True)


@given(cells())
def test_one_side_merged_is_the_same_bytes_in_fewest_pieces(given_cells: Cells) -> None:
    offsets, sizes = given_cells.local.tolist(), given_cells.sizes.tolist()
    merged = list(merge_offsets(offsets, sizes))
    plain = [offset + at for offset, size in zip(offsets, sizes, strict=True) for at in range(size)]
    assert [offset + at for offset, size in merged for at in range(size)] == plain
    assert all(first[0] + first[1] != second[0] for first, second in pairwise(merged))


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 120))
def test_units_are_full_and_never_too_large(sizes: list[int], unit_bytes: int) -> None:
    array = np.array(sizes, np.int64)
    if max(sizes, default=0) > unit_bytes:
        with pytest.raises(InvalidDescriptor):
            cut_units(array, unit_bytes)
        return
    units = cut_units(array, unit_bytes)
    assert [index for start, end in units for index in range(start, end)] == list(range(len(sizes)))
    totals = [sum(sizes[start:end]) for start, end in units]
    assert all(total <= unit_bytes for total in totals)
    for total, (_, end) in zip(totals[:-1], units[:-1], strict=True):
        assert total + sizes[end] > unit_bytes, "the next cell would have fitted"


def test_a_unit_has_a_bound_on_its_cells_too() -> None:
    count = limits.CELLS_PER_UNIT_MAX
    assert cut_units(np.ones(count + 1, np.int64), limits.UNIT_BYTES_MAX) == [(0, count), (count, count + 1)]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 40)), max_size=6), st.integers(1, 16))
def test_long_pieces_are_cut_into_cells_of_the_same_bytes(pieces: list[tuple[int, int, int]], cell: int) -> None:
    cut = split_pieces(pieces, cell)
    plain = list(zip(cut.local.tolist(), cut.remote.tolist(), cut.sizes.tolist(), strict=True))
    assert bytes_of(plain) == bytes_of(pieces)
    assert all(size <= cell for _, _, size in plain)


# The receiver's machine.

EVENTS = st.one_of(
    st.builds(ins.LayerDone, st.integers(0, 2)),
    st.builds(ins.WriterLost, st.just(LOST), st.booleans()),
    st.sampled_from([ins.Opened(), ins.GraceOver(), ins.Stopped(LOST), ins.Fenced(), ins.FenceTimedOut()]),
)


@given(st.lists(EVENTS, max_size=30))
def test_a_receiver_is_answered_once_and_its_slots_are_free_only_after_completion_or_a_fence(
    events: list[ins.Event],
) -> None:
    machine = ins.InboundTransfer("r", range(3))
    ready: set[int] = set()
    failed = fence_asked = fence_proved = quarantined = False
    answers = releases = 0
    for event in events:
        # The ledger reports a layer once, and a fence only after it was asked for one.
        impossible = (
            (isinstance(event, ins.LayerDone) and event.layer in ready and not failed and not releases)
            or (isinstance(event, ins.Fenced) and (not fence_asked or fence_proved))
            or (isinstance(event, ins.FenceTimedOut) and not fence_asked)
        )
        assume(not (impossible and releases and not isinstance(event, ins.Fenced)))
        if impossible:
            if not (isinstance(event, ins.FenceTimedOut) and releases):
                with pytest.raises(InvalidTransition):
                    machine.step(event)
            continue
        fence_proved |= isinstance(event, ins.Fenced)
        for effect in machine.step(event):
            match effect:
                case ins.LayerReady(layer):
                    assert not failed
                    ready.add(layer)
                case ins.Succeed():
                    assert ready == {0, 1, 2}
                    answers += 1
                case ins.Fail():
                    failed = True
                    answers += 1
                case ins.Fence():
                    assert failed
                    fence_asked = True
                case ins.Quarantine():
                    assert fence_asked and not fence_proved and not quarantined
                    quarantined = True
                case ins.Release():
                    releases += 1
                    assert answers == 1
                    assert fence_proved if failed else ready == {0, 1, 2}
                case ins.ArmGrace():
                    assert not answers
        assert answers <= 1 and releases <= 1
    assert machine.missing_layers == [layer for layer in range(3) if layer not in ready]


def test_a_writer_that_comes_back_in_time_goes_on() -> None:
    machine = ins.InboundTransfer("r", range(2))
    machine.step(ins.Opened())
    assert machine.step(ins.LayerDone(0)) == [ins.LayerReady(0)]
    assert machine.step(ins.WriterLost(LOST, dead=False)) == [ins.ArmGrace()]
    assert machine.step(ins.Opened()) == []
    assert machine.step(ins.GraceOver()) == []
    assert machine.step(ins.LayerDone(1)) == [ins.LayerReady(1), ins.Succeed(), ins.Release()]


@pytest.mark.parametrize("frame", [frames.Note, lambda text: frames.Placed(1, frames.UnitHead(0, 1, notif=text))])
def test_a_notification_in_a_frame_is_as_long_as_it_may_be_and_no_longer(
    frame: Callable[[bytes], frames.FromInitiator],
) -> None:
    longest = frame(bytes(limits.NOTIF_BYTES_MAX))
    assert frames.decode_from_initiator(frames.encode(longest), "peer") == longest
    with pytest.raises(FrameRefused):
        frames.decode_from_initiator(frames.encode(frame(bytes(limits.NOTIF_BYTES_MAX + 1))), "peer")
