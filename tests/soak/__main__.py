"""`python -m tests.soak --minutes 3 --seed 1`: faults under load for a while. The last line is the result as JSON."""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.soak.run import Plan, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--pieces", action="store_true", help="requests that are larger than a node, of a tiny model")
    args = parser.parse_args()
    plan = Plan(args.seed, args.minutes * 60, args.clients, args.prefill, args.decode, gap_s=2.0, pieces=args.pieces)
    with tempfile.TemporaryDirectory(prefix="kv-soak-") as folder:
        report = asyncio.run(soak(plan, Path(folder), lambda line: print(line, flush=True)))
    print(json.dumps(report))
    return 0 if not (report["wrong"] or report["leaked"] or report["leftovers"]) and report["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
