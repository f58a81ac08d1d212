"""Notifications there and back between two processes, and what an idle process costs."""

import os
import time
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import zmq

from bench import harness
from bench.transport_cases import places
from bench.transport_cases.near import FAR, Near, connected
from bench.transport_cases.places import Pattern
from bench.transport_cases.plan import Effort, Outcome, Skipped
from kv_transport import XferOp

PAYLOAD = bytes(range(64))
SMALL_PUT = Pattern("4KiB", 4 * places.KIB, 1)


class RoundTrips:
    """Median round trip in microseconds; all that were taken are kept for the 99th percentile."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken: list[float] = []

    def median_of(self, times: list[float]) -> float:
        self.taken += times
        return float(np.median(times)) * 1e6

    @property
    def p99(self) -> float:
        return float(np.percentile(self.taken, 99)) * 1e6


def latency_cases(effort: Effort) -> Iterator[Outcome]:
    """As the system places the two processes, and the put again with each on a processor of its own: it may well leave
    both on one, where waking the other costs little and every step of both counts.
    """
    count = 50 if effort.quick else 400
    with connected("shm") as near:
        near.share_buffers(places.MIB)
        near.introduce()
        bare, put, blocking = RoundTrips(count), RoundTrips(count), RoundTrips(count)
        with zmq.Context() as context, context.socket(zmq.REQ) as asker:
            asker.linger = 0
            address = f"ipc://{near.folder / 'zmq'}"
            near.far.ask("zmq_echo", address=address)
            asker.connect(address)
            found = harness.interleave(
                {
                    "bare": partial(_bare, near, bare),
                    "put": partial(_put, near, put),
                    "zmq": partial(_blocking_zmq, asker, blocking),
                },
                effort.rounds,
            )
        yield harness.compare(
            "notification_64B",
            found["bare"].median,
            "us",
            reference="blocking pyzmq over ipc, 64 B there and back",
            reference_value=found["zmq"].median,
            ratio=harness.paired_ratio(found["bare"], found["zmq"], "lower"),
            better="lower",
            ratio_need=1.0,
            note=f"there and back; p99 {bare.p99:.0f}, reference {blocking.p99:.0f}",
        )
        yield _put_case("put_4KiB_with_notification", found, put, bare)
        yield _apart(near, count, effort.rounds)


def _apart(near: Near, count: int, rounds: int) -> Outcome:
    name, processors = "put_4KiB_with_notification_apart", os.sched_getaffinity(0)
    if len(processors) < 2:
        return Skipped(name, "there is one processor")
    bare, put = RoundTrips(count), RoundTrips(count)
    one, other = sorted(processors)[:2]
    try:
        os.sched_setaffinity(0, {one})
        near.far.stay_on({other})
        found = harness.interleave({"bare": partial(_bare, near, bare), "put": partial(_put, near, put)}, rounds)
    finally:
        os.sched_setaffinity(0, processors)
    return _put_case(name, found, put, bare)


def _put_case(name: str, found: Mapping[str, harness.Samples], put: RoundTrips, bare: RoundTrips) -> harness.Case:
    return harness.compare(
        name,
        found["put"].median,
        "us",
        reference="bare 64 B notification",
        reference_value=found["bare"].median,
        ratio=harness.paired_ratio(found["put"], found["bare"], "lower"),
        better="lower",
        ratio_need=1 / 1.5,
        note=f"there and back, a put each way; p99 {put.p99:.0f}, reference {bare.p99:.0f}",
    )


def _bare(near: Near, trips: RoundTrips) -> float:
    near.far.ask("echo_notifs", nbytes=0)

    async def repeat() -> list[float]:
        notifs, times = near.agent.notifs(), []
        for _ in range(trips.count):
            started = time.perf_counter()
            await near.agent.send_notif(FAR, PAYLOAD)
            await anext(notifs)
            times.append(time.perf_counter() - started)
        return times

    return trips.median_of(near.run(repeat()))


def _put(near: Near, trips: RoundTrips) -> float:
    """The far side answers with a put of the same size."""
    near.far.ask("echo_notifs", nbytes=SMALL_PUT.nbytes)

    async def repeat() -> list[float]:
        notifs, times = near.agent.notifs(), []
        async with near.xfer(XferOp.WRITE, SMALL_PUT, PAYLOAD) as xfer:
            for _ in range(trips.count):
                started = time.perf_counter()
                near.agent.transfer(xfer)
                await anext(notifs)
                times.append(time.perf_counter() - started)
                await xfer.done()
        return times

    return trips.median_of(near.run(repeat()))


def _blocking_zmq(asker: "zmq.Socket[bytes]", trips: RoundTrips) -> float:
    times = []
    for _ in range(trips.count):
        started = time.perf_counter()
        asker.send(PAYLOAD)
        asker.recv()
        times.append(time.perf_counter() - started)
    return trips.median_of(times)


def idle_cases(effort: Effort) -> Iterator[Outcome]:
    """A process with both transports open and a peer connected, doing nothing."""
    with connected("auto") as near:
        near.share_buffers(places.MIB)
        near.introduce()
        near.rate(near.xfer(XferOp.WRITE, SMALL_PUT), 0.01)
        before = near.far.ask("cpu")
        time.sleep(0.5 if effort.quick else 5.0)
        after = near.far.ask("cpu")
        used = float(str(after["cpu_s"])) - float(str(before["cpu_s"]))
        passed = float(str(after["at_s"])) - float(str(before["at_s"]))
    yield harness.compare(
        "idle_process", 100 * used / passed, "%", better="lower", ours_need=3.0, note=f"of a core, over {passed:.1f} s"
    )
