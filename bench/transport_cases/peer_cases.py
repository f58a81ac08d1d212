"""Ours against other transfer engines on the same machine, each in its own environment (`make bench-peers`)."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench import harness
from bench.transport_cases import places
from bench.transport_cases.near import connected
from bench.transport_cases.places import Pattern
from bench.transport_cases.plan import Effort, Outcome, Skipped
from kv_transport import XferOp
from kv_transport.config import TransportName

PEERS: Final = places.ROOT / "bench" / "peers"


@dataclass(frozen=True, slots=True)
class PeerCase:
    """Ours over one transport against a peer in one mode, and how many times better ours must be."""

    peer: str
    mode: str
    transport: TransportName
    pattern: Pattern
    op: XferOp
    need: float | None

    @property
    def name(self) -> str:
        polled = "_polled" if self.mode.endswith("-polled") else ""
        return f"{self.transport}_{self._op}_{self.pattern.name}_vs_{self.peer}{polled}"

    @property
    def _op(self) -> str:
        return "put" if self.op is XferOp.WRITE else "get"


def _cases() -> Iterator[PeerCase]:
    for op in XferOp:
        for pattern in (places.LARGE, places.MEDIUM, places.BLOCKS):
            for mode in ("default", "default-polled"):
                yield PeerCase("nixl", mode, "shm", pattern, op, 0.9)
    for pattern, mooncake, nixl in (
        (places.LARGE, 1.5, 2.0),
        (places.BLOCKS, 1.5, 2.0),
        (places.SMALL_BLOCKS, 1.5, 1.5),
    ):
        yield PeerCase("mooncake", "tcp", "tcp", pattern, XferOp.READ, mooncake)
        yield PeerCase("nixl", "tcp", "tcp", pattern, XferOp.READ, nixl)
        yield PeerCase("nixl", "tcp-polled", "tcp", pattern, XferOp.READ, None)


class PeerEngine:
    """A peer at work in its own environment; it moves what a pattern says and answers with GB/s.

    Its processes are stopped while it is not asked: some of their threads spin, which would slow whoever is measured.
    """

    def __init__(self, peer: str, mode: str) -> None:
        command = [str(environment(peer) / "bin" / "python"), str(PEERS / f"{peer}_peer.py"), mode]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._heard()
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)  # of its session: the process and its target

    def rate(self, op: XferOp, pairs: Sequence[tuple[int, int]], piece: int, seconds: float) -> float:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        order = {"op": op.value, "pairs": list(pairs), "piece": piece, "seconds": seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        gbps = float(self._heard()["gbps"])
        self._signal(signal.SIGSTOP)
        return gbps

    def _heard(self) -> dict[str, float]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # peers print their own lines, too
                heard: dict[str, float] = json.loads(line)
                return heard
        raise RuntimeError(f"the peer ended with {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()


def environment(peer: str) -> Path:
    return PEERS / ".envs" / peer


def peer_cases(effort: Effort) -> Iterator[Outcome]:
    for case in _cases():
        if not (environment(case.peer) / "installed").exists():
            yield Skipped(case.name, f"{case.peer} is not installed: make bench-peers")
            continue
        try:
            yield _measure(case, effort)
        except (RuntimeError, OSError) as error:
            yield Skipped(case.name, f"{case.peer} does not work here: {error}")


def _measure(case: PeerCase, effort: Effort) -> Outcome:
    peer = PeerEngine(case.peer, case.mode)
    try:
        with connected(case.transport) as near:
            near.share_buffers(places.BUFFER_NBYTES)
            near.introduce()
            pattern = case.pattern
            found = harness.interleave(
                {
                    "ours": partial(near.rate, near.xfer(case.op, pattern), effort.seconds),
                    "peer": partial(peer.rate, case.op, pattern.offsets(), pattern.piece, effort.seconds),
                },
                effort.rounds,
            )
    finally:
        peer.close()
    ours, theirs = found["ours"], found["peer"]
    return harness.compare(
        case.name,
        ours.median,
        "GB/s",
        reference=f"{case.peer}, {case.mode}",
        reference_value=theirs.median,
        ratio=harness.paired_ratio(ours, theirs),
        ratio_need=case.need,
        note=f"the peer checks nothing; spread {ours.spread:.0%}, {theirs.spread:.0%}",
    )
