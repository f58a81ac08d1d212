"""How fast KV moves, against the memory, the wire, and what others offer.

    python bench/transport.py [--json] [--quick] [--case NAME]...

Every case compares within one run, in interleaved rounds; checksums are on in all of ours. `--json` prints one object
a line. What the reference side of a case does is said in the module it comes from (`bench/transport_cases/`). Links
are emulated with network namespaces (as root), peers are measured when `make bench-peers` has installed them.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import harness
from bench.transport_cases.kernel_cases import kernel_cases
from bench.transport_cases.latency_cases import idle_cases, latency_cases
from bench.transport_cases.link_cases import link_cases
from bench.transport_cases.memory_cases import engine_cases, memory_cases
from bench.transport_cases.peer_cases import peer_cases
from bench.transport_cases.plan import Effort, Group, Skipped, as_json, as_text
from bench.transport_cases.ucx_cases import ucx_cases
from bench.transport_cases.wire_cases import wire_cases

GROUPS: Final[dict[str, Group]] = {
    "kernels": kernel_cases,
    "latency": latency_cases,
    "idle": idle_cases,
    "shm": memory_cases,
    "engine": engine_cases,
    "tcp": wire_cases,
    "ucx": ucx_cases,
    "link": link_cases,
    "peers": peer_cases,
}


def _extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--case", action="append", choices=list(GROUPS), help="only this group of cases; may be repeated (default: all)"
    )


def main() -> int:
    description = __doc__.splitlines()[0] if __doc__ else ""
    options = harness.arguments(description, rounds=11, seconds=0.1, extend=_extend)
    effort = Effort(options.rounds, min(options.seconds, 0.02) if options.quick else options.seconds, options.quick)
    before = harness.calibrate()
    failed = False
    for name in options.case or GROUPS:
        for outcome in GROUPS[name](effort):
            print(as_json(outcome) if options.json else as_text(outcome), flush=True)
            failed |= not isinstance(outcome, Skipped) and not outcome.ok
    after = harness.calibrate()
    print(f"calibration {before:.1f} / {after:.1f} Msteps/s", file=sys.stderr)
    # A quick run shows that the cases work; its figures are too few to judge by.
    return 1 if failed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
