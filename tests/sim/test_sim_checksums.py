"""The checksum over a whole hand-over is compared by whoever got it, and one that differs is not taken."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kv_services.errors import HandoverChecksumError
from kv_services.node.context import NodeContext
from kv_services.node.decode import DecodeActor
from kv_services.sim.world import simulate


@pytest.mark.timeout(300)
def test_a_hand_over_whose_checksum_differs_is_refused_and_the_request_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every fifth sender is wrong about what it sent: as if blocks were exchanged, each of them whole and sealed."""
    caplog.set_level("CRITICAL")
    of, compare = NodeContext.entry_checksum, DecodeActor._compare
    told, lies, refused = [0], [0], [0]

    def lying(self: NodeContext, slots: Sequence[int], changed: Mapping[tuple[int, int], int] | None = None) -> int:
        checksum = of(self, slots, changed)
        if changed is not None:  # what a sender says of its hand-over
            told[0] += 1
            if told[0] % 5 == 0:
                lies[0] += 1
                return checksum ^ 1
        return checksum

    def counted(*what: Any) -> None:
        try:
            compare(*what)
        except HandoverChecksumError:
            refused[0] += 1
            raise

    monkeypatch.setattr(NodeContext, "entry_checksum", lying)
    monkeypatch.setattr(DecodeActor, "_compare", counted)
    result = simulate(1, seconds=10.0, kinds=("slow node",))
    assert lies[0] > 2 and refused[0] == lies[0]
    assert result.requests > 10 and result.failures == {}, "each was tried again, with right tokens"
