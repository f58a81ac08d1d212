"""`kvctl sim`: run seeds of the simulator, in several processes, and say which failed and how to repeat it."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from rich.progress import Progress

from kv_core.errors import KVError
from kv_services.kvctl.output import console, print_json
from kv_services.sim.world import SimResult, simulate

Outcome = SimResult | str


def run(first_seed: int, num_seeds: int, seconds: float, num_nodes: int, as_json: bool, jobs: int) -> int:
    """Run seeds `first_seed ..`; 1 if one failed."""
    failures: list[str] = []
    results: list[SimResult] = []
    with Progress(console=console(), disable=as_json) as progress:
        task = progress.add_task("seeds", total=num_seeds)
        for outcome in _outcomes(range(first_seed, first_seed + num_seeds), seconds, num_nodes, jobs):
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


def _outcomes(seeds: range, seconds: float, num_nodes: int, jobs: int) -> Iterator[Outcome]:
    if len(seeds) == 1 or jobs == 1:
        for seed in seeds:
            yield _one(seed, seconds, num_nodes)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(_one, seeds, [seconds] * len(seeds), [num_nodes] * len(seeds))


def _one(seed: int, seconds: float, num_nodes: int) -> Outcome:
    # Suspicions and restarts are the point of the run, not news.
    logging.disable(logging.CRITICAL)
    try:
        return simulate(seed, seconds=seconds, num_nodes=num_nodes)
    except KVError as error:
        return str(error)
    except Exception as error:
        # A bug of the code under test: named with its seed, so that it can be repeated.
        return f"seed {seed}: {type(error).__name__}: {error}; repeat it with: make sim SEED={seed}"


def default_jobs() -> int:
    """One process a core."""
    return os.cpu_count() or 1
