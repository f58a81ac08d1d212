"""The simulator catches what it is there for: each checker sees the product broken once."""

import pytest

from kv_bus.interface import Reply, Request
from kv_consistency.effects import ClaimsAdded, ClaimsRemoved, HolderDropped
from kv_consistency.hlc import HybridLogicalClock, Timestamp
from kv_consistency.replica import Replica
from kv_consistency.update import OwnerEpoch
from kv_core.ids import RequestId
from kv_prefix.block_pool import BlockPool
from kv_prefix.pins import Receipt
from kv_prefix.prefix_index import PrefixIndex
from kv_services.gateway.actor import ClusterCompleter
from kv_services.gateway.request_actor import RequestActor
from kv_services.messages import Ack, TokenBatch
from kv_services.replica.index_feed import feed
from kv_services.sim.chaos import KINDS
from kv_services.sim.world import SimulationFailedError, simulate
from kv_transport.backends.memory import MemoryLink


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def _caught(seed: int, seconds: float, kinds: tuple[str, ...] = KINDS) -> str:
    only = "" if kinds == KINDS else "".join(f" --only '{kind}'" for kind in kinds)
    command = f"kvctl sim --seed {seed} --seconds {seconds:g} --nodes 5{only}"
    with pytest.raises(SimulationFailedError, match=f"repeat it with: {command}$") as caught:
        simulate(seed, seconds=seconds, kinds=kinds)
    return str(caught.value)


@pytest.mark.timeout(300)
def test_a_clock_that_does_not_rise_above_what_it_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(self: HybridLogicalClock, remote: Timestamp, wall_ns: int, now_ns: int | None = None) -> Timestamp:
        return self.tick(wall_ns)

    monkeypatch.setattr(HybridLogicalClock, "merge", merge)
    assert "CausalityError" in _caught(1, 10.0)


@pytest.mark.timeout(300)
def test_a_replica_that_lets_ended_requests_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    readable = Replica.readable

    def careless(self: Replica, request_id: RequestId, length: int, epoch: OwnerEpoch | None = None) -> Timestamp:
        row = self.state.entries.get(request_id)
        return row.stamp if row is not None else readable(self, request_id, length, epoch)

    monkeypatch.setattr(Replica, "readable", careless)
    assert "which has ended" in _caught(1, 10.0)


@pytest.mark.timeout(300)
def test_a_reader_that_takes_torn_bytes_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLink, "_compare", lambda self, unit, checks, expected: None)
    assert "offers wrong bytes" in _caught(10, 5.0, ("torn units",))


@pytest.mark.timeout(300)
def test_an_index_that_misses_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(index: PrefixIndex, change: ClaimsAdded | ClaimsRemoved | HolderDropped) -> None:
        if not isinstance(change, ClaimsRemoved):
            feed(index, change)

    monkeypatch.setattr("kv_services.replica.service.feed", forgetful)
    assert "CheckError" in _caught(1, 20.0)


@pytest.mark.timeout(300)
def test_a_pool_that_sometimes_forgets_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = BlockPool.release, [0]

    def leaky(self: BlockPool, receipt: Receipt) -> None:
        calls[0] += 1
        if calls[0] % 10:
            release(self, receipt)

    monkeypatch.setattr(BlockPool, "release", leaky)
    assert "still has" in _caught(1, 4.0)


@pytest.mark.timeout(300)
def test_a_gateway_without_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    hear = ClusterCompleter._on_tokens

    def deaf(self: ClusterCompleter, request: Request[TokenBatch]) -> Reply:
        # Whoever never hears the last of an answer has only its deadline.
        return Ack() if request.message.finish is not None else hear(self, request)

    monkeypatch.setattr(ClusterCompleter, "_on_tokens", deaf)
    monkeypatch.setattr(RequestActor, "_deadline", lambda self: None)
    assert "never ends" in _caught(2, 5.0)
