"""Which bytes go from which rank to which when two sides split the KV heads over different tensor-parallel sizes. Pure.

In canonical order `[plane][head][token][dim]` the heads of a rank are one contiguous run in each plane of a cell. So a
re-shard is a list of runs: no element is touched, only where it lies. With fewer KV heads than ranks a head is held by
several ranks, which all have the same bytes; the reads of different targets are then spread over them.

RS1: every byte of the target's cell comes from exactly one place. RS2: runs that are adjacent on both sides are one.
"""

from dataclasses import dataclass

from kv_core.block import BlockGeometry
from kv_transport.errors import GeometryMismatch, InvalidDescriptor

TP_SIZE_MAX = 1024


def heads_of(num_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """The KV heads of one rank: as evenly as whole heads allow; with more ranks than heads, one head each, repeated.

    Raises:
        InvalidDescriptor: the numbers cannot be.
    """
    if num_kv_heads < 1 or not 1 <= tp_size <= TP_SIZE_MAX or not 0 <= tp_rank < tp_size:
        raise InvalidDescriptor(
            what="split of heads",
            value=[num_kv_heads, tp_rank, tp_size],
            reason="need heads, and a rank below the size",
        )
    first = tp_rank * num_kv_heads // tp_size
    if tp_size > num_kv_heads:
        return range(first, first + 1)
    return range(first, (tp_rank + 1) * num_kv_heads // tp_size)


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Bytes of one cell that are contiguous on both sides: offsets count from the beginning of the cell."""

    source_rank: int
    source_offset: int
    target_offset: int
    nbytes: int


def reshard_runs(
    target: BlockGeometry, num_kv_heads: int, target_rank: int, target_size: int, source_size: int
) -> list[HeadRun]:
    """What fills one cell of `target_rank` out of the cells of the `source_size` ranks of the other side.

    Args:
        target: how the target rank stores a block; the sources store theirs alike, but for the number of heads.
        num_kv_heads: of the whole model.

    Raises:
        GeometryMismatch: `target` does not hold as many heads as its rank has.
        InvalidDescriptor: the numbers cannot be.
    """
    mine = heads_of(num_kv_heads, target_rank, target_size)
    if target.num_kv_heads != len(mine):
        raise GeometryMismatch(field="num_kv_heads", ours=target.num_kv_heads, theirs=len(mine))
    plane_nbytes = target.slot_layer_nbytes // target.num_planes
    head_nbytes = plane_nbytes // len(mine)
    holders = [_holder(num_kv_heads, head, source_size, target_rank) for head in mine]
    runs: list[HeadRun] = []
    for plane in range(target.num_planes):
        for index, (rank, held) in enumerate(holders):
            source_plane = plane * len(held) * head_nbytes
            run = HeadRun(
                source_rank=rank,
                source_offset=source_plane + (mine[index] - held.start) * head_nbytes,
                target_offset=plane * plane_nbytes + index * head_nbytes,
                nbytes=head_nbytes,
            )
            if runs and _adjoins(runs[-1], run):
                last = runs.pop()
                run = HeadRun(rank, last.source_offset, last.target_offset, last.nbytes + run.nbytes)
            runs.append(run)
    return runs


def source_geometry(target: BlockGeometry, num_kv_heads: int, rank: int, size: int) -> BlockGeometry:
    """How `rank` of the other side stores a block, if it differs by its heads only."""
    return BlockGeometry(
        num_layers=target.num_layers,
        num_kv_heads=len(heads_of(num_kv_heads, rank, size)),
        head_dim=target.head_dim,
        dtype=target.dtype,
        block_size=target.block_size,
        num_planes=target.num_planes,
    )


def _holder(num_kv_heads: int, head: int, source_size: int, target_rank: int) -> tuple[int, range]:
    """The rank that this target reads a head from."""
    ranks = [rank for rank in range(source_size) if head in heads_of(num_kv_heads, rank, source_size)]
    rank = ranks[target_rank % len(ranks)]
    return rank, heads_of(num_kv_heads, rank, source_size)


def _adjoins(first: HeadRun, second: HeadRun) -> bool:
    return (
        first.source_rank == second.source_rank
        and first.source_offset + first.nbytes == second.source_offset
        and first.target_offset + first.nbytes == second.target_offset
    )
