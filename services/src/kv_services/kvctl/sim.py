"""`kvctl sim`: run seeds of the simulator, in several processes, and say which failed and how to repeat it."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial

from rich.progress import Progress

from kv_core.errors import KVError
from kv_services.kvctl.output import console, print_json
from kv_services.sim.chaos import KINDS
from kv_services.sim.world import SimResult, simulate

Outcome = SimResult | str


def run(
    first_seed: int, num_seeds: int, seconds: float, num_nodes: int, kinds: tuple[str, ...], as_json: bool, jobs: int
) -> int:
    """Run seeds `first_seed ..` with these kinds of faults (none named: all); 1 if one failed, 2 for unknown kinds."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        console().print(f"no kind of fault is called {unknown[0]!r}; there are: {', '.join(KINDS)}", markup=False)
        return 2
    failures: list[str] = []
    results: list[SimResult] = []
    with Progress(console=console(), disable=as_json) as progress:
        task = progress.add_task("seeds", total=num_seeds)
        for outcome in _outcomes(range(first_seed, first_seed + num_seeds), seconds, num_nodes, kinds or KINDS, jobs):
            if isinstance(outcome, str):
                failures.append(outcome)
                progress.console.print(outcome, style="red", markup=False)
            else:
                results.append(outcome)
            progress.advance(task)
    summary = {
        "seeds": num_seeds,
        "failures": len(failures),
        "virtual_seconds": round(sum(result.virtual_seconds for result in results), 1),
        "events": sum(result.events for result in results),
        "restarts": sum(result.restarts for result in results),
        "requests": sum(result.requests for result in results),
        "failed": failures,
    }
    if as_json:
        if num_seeds == 1 and results:
            summary["result"] = asdict(results[0])
        print_json(summary)
    else:
        for result in results[:20]:
            faults = ", ".join(f"{count} {kind}" for kind, count in result.faults.items())
            console().print(
                f"seed {result.seed}: {result.events} events, {faults}; digest {result.digest}", markup=False
            )
        console().print(f"{num_seeds - len(failures)} of {num_seeds} seeds held in {summary['virtual_seconds']} s")
    return 1 if failures else 0


def _outcomes(seeds: range, seconds: float, num_nodes: int, kinds: tuple[str, ...], jobs: int) -> Iterator[Outcome]:
    if len(seeds) == 1 or jobs == 1:
        for seed in seeds:
            yield _one(seed, seconds, num_nodes, kinds)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(partial(_one, seconds=seconds, num_nodes=num_nodes, kinds=kinds), seeds)


def _one(seed: int, seconds: float, num_nodes: int, kinds: tuple[str, ...]) -> Outcome:
    # Suspicions and restarts are the point of the run, not news.
    logging.disable(logging.CRITICAL)
    try:
        return simulate(seed, seconds=seconds, num_nodes=num_nodes, kinds=kinds)
    except KVError as error:
        return str(error)


def default_jobs() -> int:
    """One process a core."""
    return os.cpu_count() or 1
