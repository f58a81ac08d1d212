"""`kvctl sim`: run seeds of the simulator, in several processes, and say which failed and how to repeat it."""

import gc
import json
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, TextIO

from rich.progress import Progress

from kv_core.errors import KVError
from kv_services.kvctl.output import console, messages, print_json
from kv_services.sim.chaos import KINDS
from kv_services.sim.world import SimResult, simulate


class RecordError(KVError):
    """The file for `--record` cannot be written."""

    code = 7094
    template = "--record {path}: {cause}"


Outcome = SimResult | str
GC_THRESHOLD: Final = 50_000
"""New objects between two looks of the garbage collector, in a process that does nothing but run seeds."""


def run(
    first_seed: int,
    num_seeds: int,
    seconds: float,
    num_nodes: int,
    kinds: tuple[str, ...],
    as_json: bool,
    jobs: int,
    record: Path | None = None,
) -> int:
    """Run seeds `first_seed ..` with these kinds of faults (none named: all); 1 if one failed, 2 for unknown kinds.

    Args:
        record: a file to which a line of JSON is added for each seed, as soon as it and those before it have ended.

    Progress and failures go to standard error. Ctrl-C and SIGTERM end the processes and leave no file behind; called
    from the main thread, as signals are handled there.

    Raises:
        RecordError: the file cannot be opened; nothing was run.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        console().print(f"no kind of fault is called {unknown[0]!r}; there are: {', '.join(KINDS)}", markup=False)
        return 2
    failures: list[str] = []
    results: list[SimResult] = []
    seeds = range(first_seed, first_seed + num_seeds)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _terminated))
        lines = None if record is None else stack.enter_context(_open_record(record))
        outcomes = stack.enter_context(closing(_outcomes(seeds, seconds, num_nodes, kinds or KINDS, jobs)))
        progress = stack.enter_context(Progress(console=messages()))
        task = progress.add_task("seeds", total=num_seeds)
        for seed, outcome in zip(seeds, outcomes, strict=True):
            if lines is not None:
                lines.write(_line(seed, outcome))
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


def _outcomes(
    seeds: range, seconds: float, num_nodes: int, kinds: tuple[str, ...], jobs: int
) -> Generator[Outcome, None, None]:
    if len(seeds) == 1 or jobs == 1:
        for seed in seeds:
            yield _one(seed, seconds, num_nodes, kinds)
        return
    with tempfile.TemporaryDirectory(prefix="kv-sims-") as folder:
        # Spawned: our own threads, such as the one that draws the progress, are not for them.
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_worker, (folder,))
        try:
            yield from pool.map(partial(_one, seconds=seconds, num_nodes=num_nodes, kinds=kinds), seeds)
        except BaseException:
            # Whatever it was: nobody wants to know any more, and their files are in our folder.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
                process.join()
            raise
        pool.shutdown()


def _terminated(number: int, frame: FrameType | None) -> None:
    """End as after Ctrl-C: without it the semaphores of the pool would stay in /dev/shm."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; what is being cleared away must not be cut short
    raise SystemExit(128 + number)


def _open_record(path: Path) -> TextIO:
    try:
        return path.open("a", buffering=1)
    except OSError as error:
        raise RecordError(path=str(path), cause=error.strerror or str(error)) from error


def _line(seed: int, outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return json.dumps({"seed": seed, "ok": False, "error": outcome}) + "\n"
    return json.dumps({**asdict(outcome), "ok": True}) + "\n"


def _begin_worker(folder: str) -> None:
    """Leave Ctrl-C to whoever started this process, and make files in his folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = folder
    # What was imported stays, and a run makes few cycles: looking at everything so often costs a twentieth of it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _one(seed: int, seconds: float, num_nodes: int, kinds: tuple[str, ...]) -> Outcome:
    # Suspicions and restarts are the point of the run, not news.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return simulate(seed, seconds=seconds, num_nodes=num_nodes, kinds=kinds)
    except KVError as error:
        return str(error)
    finally:
        logging.disable(before)


def default_jobs() -> int:
    """One process a core."""
    return os.cpu_count() or 1
