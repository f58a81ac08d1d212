"""`kvctl replay` and `kvctl workload`: options in, tables or JSON out."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from rich.progress import Progress
from rich.table import Table

from kv_services.kvctl.output import console, messages, print_json
from kv_services.kvctl.replay.engine import Outcome, Setup, replay
from kv_services.kvctl.replay.plot import plot_hit_rates, require_plotting
from kv_services.kvctl.replay.trace import read_trace, write_trace
from kv_services.kvctl.replay.workload import generate

CURVE: Final = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Capacities of a curve, in parts of the one that was given."""


def run(
    trace: Path, setup: Setup, policies: Sequence[str], capacities: Sequence[int], plot: Path | None, as_json: bool
) -> int:
    """Replay a trace under each policy at each capacity.

    Args:
        capacities: with `plot` and only one, a curve around it is replayed.

    Raises:
        KVError: a trace that cannot be read, or options that do not go together.
    """
    if plot is not None:
        require_plotting()
    requests = read_trace(trace)
    longest = max((len(request.hash_ids) for request in requests), default=0)
    if plot is not None and len(capacities) == 1:
        capacities = [size for part in CURVE if (size := int(capacities[0] * part)) >= max(longest, 1)] or capacities
    setups = [replace(setup, policy=policy, capacity_blocks=size) for policy in policies for size in capacities]
    with Progress(console=messages(), disable=as_json) as progress:
        task = progress.add_task("replaying", total=len(requests) * len(setups))
        outcomes = [replay(requests, one, lambda: progress.advance(task)) for one in setups]
    if plot is not None:
        plot_hit_rates(outcomes, trace.name, plot)
    if as_json:
        distinct = len({block_id for request in requests for block_id in request.hash_ids})
        print_json({"trace": str(trace), "distinct": distinct, "runs": [asdict(outcome) for outcome in outcomes]})
    else:
        _show(trace, outcomes)
    return 0


def write_workload(kind: str, path: Path, num_requests: int, seed: int, as_json: bool) -> int:
    """Write a generated trace.

    Raises:
        KVError: no such kind, or the file cannot be written.
    """
    count = write_trace(path, generate(kind, num_requests, seed))
    if as_json:
        print_json({"trace": str(path), "kind": kind, "requests": count, "seed": seed})
    else:
        console().print(f"{path}: {count} requests of kind {kind}, seed {seed}", markup=False)
    return 0


def _show(trace: Path, outcomes: Sequence[Outcome]) -> None:
    first = outcomes[0]
    out = console()
    out.print(f"{trace}: {first.requests:,} requests, {first.references:,} block references", markup=False)
    table = Table()
    for name in (
        "policy",
        "evicts",
        "capacity",
        "nodes",
        "hits",
        "by block",
        "by token",
        "by request",
        "max/mean load",
    ):
        table.add_column(name, justify="left" if name in ("policy", "evicts") else "right")
    for outcome in outcomes:
        below = [
            f"{name} {hits:,}" for name, hits in (("disk", outcome.hits_disk), ("remote", outcome.hits_remote)) if hits
        ]
        table.add_row(
            outcome.policy,
            outcome.order,
            f"{outcome.capacity_blocks:,}",
            f"{outcome.nodes} {outcome.router}" if outcome.nodes > 1 else "1",
            f"{outcome.hits:,}" + (f" ({', '.join(below)})" if below else ""),
            f"{outcome.hit_rate:.4f}",
            f"{outcome.hit_rate_tokens:.4f}",
            f"{outcome.hit_rate_requests:.4f}",
            f"{outcome.load_max_over_mean:.2f}",
        )
    out.print(table)
