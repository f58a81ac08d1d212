"""ucx: a put through the agent against the same put straight through the binding, both over tcp.

Ours verifies every byte at the receiver, and tells it; the straight one is one put of all bytes, and a flush. It is
measured as the binding comes, which is what its callers have and what the bar is for, and once more with the segments
that our backend sets, for information.
"""

import base64
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench import harness
from bench.transport_cases import places
from bench.transport_cases.near import Near, connected
from bench.transport_cases.places import Pattern
from bench.transport_cases.plan import Effort, Outcome, Skipped
from bench.transport_cases.ucx_straight import StraightInitiator
from kv_core.errors import MissingExtraError
from kv_transport import XferOp
from kv_transport.backends.ucx import TCP_SEGMENTS
from kv_transport.backends.ucx_binding import open_binding
from kv_transport.errors import BackendUnavailable

NAME = "ucx_put_over_tcp_64MiB"
RATIO_NEED = 0.9
REFERENCES = {"as_it_comes": places.UCX_OPTIONS, "same_segments": {**places.UCX_OPTIONS, **TCP_SEGMENTS}}
NEEDS = {"as_it_comes": RATIO_NEED, "same_segments": None}


def ucx_cases(effort: Effort) -> Iterator[Outcome]:
    try:
        open_binding(places.UCX_OPTIONS).close()
    except (MissingExtraError, BackendUnavailable) as error:
        yield Skipped(NAME, str(error))
        return
    with connected("ucx") as near:
        yield from _measure(near, effort)


def _measure(near: Near, effort: Effort) -> Iterator[Outcome]:
    mine = np.frombuffer(near.share_buffers(places.BUFFER_NBYTES), np.uint8)
    near.introduce()
    pattern = places.LARGE
    straight = {name: Straight(near, mine, name, options) for name, options in REFERENCES.items()}
    found = harness.interleave(
        {
            "ours": partial(near.rate, near.xfer(XferOp.WRITE, pattern), effort.seconds),
            **{name: partial(one.rate, pattern, effort.seconds) for name, one in straight.items()},
        },
        effort.rounds,
    )
    for name, one in straight.items():
        one.close()
        said = "one ucp_put_nbx and a flush through the binding"
        yield harness.compare_samples(f"{NAME}_{name}", found["ours"], found[name], "GB/s", said, NEEDS[name])


class Straight:
    """A pair of straight ends over the same buffers; the far one works only while it is measured."""

    def __init__(self, near: Near, mine: NDArray[np.uint8], name: str, options: dict[str, str]) -> None:
        target = near.far.ask("ucx_target", name=name, options=options)
        address, key = (base64.b64decode(str(target[field])) for field in ("address", "key"))
        self._far = near.far
        self._name = name
        self._initiator = StraightInitiator(mine, options, address, key, int(str(target["at"])))

    def rate(self, pattern: Pattern, seconds: float) -> float:
        self._far.ask("ucx_active", name=self._name, on=True)
        try:
            return self._initiator.rate(pattern.offsets(), pattern.piece, seconds)
        finally:
            self._far.ask("ucx_active", name=self._name, on=False)

    def close(self) -> None:
        self._initiator.close()
