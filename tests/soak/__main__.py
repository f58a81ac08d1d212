"""`python -m tests.soak --minutes 3 --seed 1`: faults under load for a while. The last line is the result as JSON."""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.soak.run import Plan, soak
from tests.soak.wires import alone, unavailable

MUST_BE_0 = ("wrong", "ended", "leaked", "leftovers")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between the end of a fault and the next")
    parser.add_argument("--pieces", action="store_true", help="requests that are larger than a node, of a tiny model")
    parser.add_argument(
        "--netns",
        action="store_true",
        help="over a network of namespaces, which loses packets, instead of proxies; needs root",
    )
    parser.add_argument("--kinds", help="only faults of these kinds, separated by commas")
    parser.add_argument(
        "--logs", type=Path, help="where the processes' logs go; those of a run that fails are kept anyway"
    )
    args = parser.parse_args()
    if args.netns:
        reason = unavailable()
        if reason is not None:
            parser.error(reason)
        alone([sys.executable, "-m", "tests.soak", *sys.argv[1:]])
    plan = Plan(
        args.seed,
        args.minutes * 60,
        args.clients,
        args.prefill,
        args.decode,
        gap_s=args.gap,
        pieces=args.pieces,
        netns=args.netns,
        kinds=tuple(args.kinds.split(",")) if args.kinds else (),
    )
    report: dict[str, object] = {}
    # Told to end, it ends as after Ctrl-C: processes, mounts and namespaces are taken down. A shell starts what it puts
    # in the background with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="kv-soak-") as folder:
        try:
            report = asyncio.run(soak(plan, Path(folder), lambda line: print(line, flush=True)))
        finally:
            good = bool(report) and not any(report[name] for name in MUST_BE_0) and bool(report["right"])
            _keep_logs(Path(folder) / "logs", args.logs, good)
    print(json.dumps(report))
    return 0 if good else 1


def _keep_logs(written: Path, wanted: Path | None, good: bool) -> None:
    """Copy the logs to where they are wanted, or, of a run that failed, to a folder that stays."""
    if written.is_dir() and (wanted or not good):
        kept = wanted or Path(tempfile.mkdtemp(prefix="kv-soak-logs-"))
        shutil.copytree(written, kept, dirs_exist_ok=True)
        print(f"the processes' logs are in {kept}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
