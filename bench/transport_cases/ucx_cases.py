"""ucx: a put through the agent against the same put straight through the binding, both over tcp.

Ours verifies every byte at the receiver, and tells it; the straight one is put and flush.
"""

import base64
from collections.abc import Iterator
from functools import partial

import numpy as np

from bench import harness
from bench.transport_cases import places
from bench.transport_cases.near import Near, connected
from bench.transport_cases.plan import Effort, Outcome, Skipped
from bench.transport_cases.ucx_straight import StraightInitiator
from kv_core.errors import MissingExtraError
from kv_transport import XferOp
from kv_transport.backends.ucx_binding import open_binding
from kv_transport.errors import BackendUnavailable

NAME = "ucx_put_over_tcp_64MiB"
RATIO_NEED = 0.9


def ucx_cases(effort: Effort) -> Iterator[Outcome]:
    try:
        open_binding(places.UCX_OPTIONS).close()
    except (MissingExtraError, BackendUnavailable) as error:
        yield Skipped(NAME, str(error))
        return
    with connected("ucx") as near:
        yield _measure(near, effort)


def _measure(near: Near, effort: Effort) -> Outcome:
    mine = np.frombuffer(near.share_buffers(places.BUFFER_NBYTES), np.uint8)
    near.introduce()
    target = near.far.ask("ucx_target")
    straight = StraightInitiator(
        mine,
        places.UCX_OPTIONS,
        base64.b64decode(str(target["address"])),
        base64.b64decode(str(target["key"])),
        int(str(target["at"])),
    )
    pattern = places.LARGE
    xfer = near.xfer(XferOp.WRITE, pattern)

    def straight_rate() -> float:
        near.far.ask("ucx_active", on=True)
        try:
            return straight.rate(pattern.offsets(), pattern.piece, effort.seconds)
        finally:
            near.far.ask("ucx_active", on=False)

    found = harness.interleave(
        {"ours": partial(near.rate, xfer, effort.seconds), "straight": straight_rate}, effort.rounds
    )
    straight.close()
    ours, reference = found["ours"], found["straight"]
    return harness.compare(
        NAME,
        ours.median,
        "GB/s",
        reference="ucp_put_nbx and flush through the binding",
        reference_value=reference.median,
        ratio=harness.paired_ratio(ours, reference),
        ratio_need=RATIO_NEED,
        note=f"spread {ours.spread:.0%}, {reference.spread:.0%}",
    )
