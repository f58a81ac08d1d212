"""Reads that wait for a causal token and a length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_consistency.effects import WaiterFailed, WaiterReady
from kv_consistency.errors import (
    HolderLostError,
    IncompleteError,
    InvalidUpdateError,
    LimitReachedError,
    NotFoundError,
    StaleReplicaError,
)
from kv_consistency.events import NOTHING, CancelWait, PeerDied, WaitFor
from kv_consistency.limits import MAX_WAITERS
from kv_consistency.version_vector import CausalToken, Dot
from kv_consistency.waiters import Waiters
from kv_core.ids import NodeId, RequestId
from tests.consistency.helpers_consistency import MS, NAMESPACE, Cluster, life, node

R = RequestId("r")


def told(cluster: Cluster, name: str) -> list[WaiterReady | WaiterFailed]:
    return [e for e in cluster.members[node(name)].given if isinstance(e, WaiterReady | WaiterFailed)]


def wait(cluster: Cluster, name: str, waiter: int, token: CausalToken = NOTHING, **kind: object) -> None:
    deadline = cluster.now_ns + 500 * MS
    cluster.step(name, WaitFor(cluster.at(node(name)), waiter, token, deadline, **kind))  # type: ignore[arg-type]


def registered(cluster: Cluster, name: str, length: int, request: RequestId = R) -> CausalToken:
    cluster.manager(name).register_update(request, length, [node(name)])
    cluster.drain(name)
    return cluster.manager(name).token(request)


def test_a_waiter_is_ready_when_its_token_is_applied() -> None:
    cluster = Cluster("a", "b")
    token = registered(cluster, "a", 10)
    wait(cluster, "b", 1, token)
    wait(cluster, "b", 2, token, request_id=R, required_seq_len=10)
    assert told(cluster, "b") == []
    cluster.deliver_all()
    assert told(cluster, "b") == [WaiterReady(1, None), WaiterReady(2, cluster.manager("b").verify_readable(R, 10))]
    cluster.check()


def test_what_is_already_true_is_told_at_once() -> None:
    cluster = Cluster("a", "b")
    token = registered(cluster, "a", 10)
    cluster.deliver_all()
    wait(cluster, "b", 1, token, request_id=R, required_seq_len=10)
    assert told(cluster, "b") == [WaiterReady(1, cluster.manager("b").verify_readable(R, 10))]


def test_a_waiter_waits_for_the_length_after_its_token() -> None:
    cluster = Cluster("a", "b")
    wait(cluster, "b", 1, request_id=R, required_seq_len=20)
    registered(cluster, "a", 10)
    cluster.deliver_all()
    assert told(cluster, "b") == []
    registered(cluster, "a", 20)
    cluster.deliver_all()
    assert [type(effect) for effect in told(cluster, "b")] == [WaiterReady]


@pytest.mark.parametrize(
    ("have", "need", "error"),
    [(None, 0, StaleReplicaError), (10, 20, IncompleteError), (None, 20, NotFoundError)],
)
def test_at_the_deadline_a_waiter_is_told_what_is_there_and_what_is_needed(
    have: int | None, need: int, error: type[Exception]
) -> None:
    cluster = Cluster("a", "b")
    if error is StaleReplicaError:
        wait(cluster, "b", 1, CausalToken((Dot(life("a"), 9),)))
    else:
        if have:
            registered(cluster, "a", have)
            cluster.deliver_all()
        wait(cluster, "b", 1, request_id=R, required_seq_len=need)
    cluster.advance(499 * MS)
    assert told(cluster, "b") == []
    cluster.advance(1 * MS)
    (failed,) = told(cluster, "b")
    assert isinstance(failed, WaiterFailed) and type(failed.error) is error
    cluster.advance(1000 * MS)
    assert len(told(cluster, "b")) == 1
    assert cluster.manager("b").stats().waiters == 0


def test_a_waiter_whose_origin_dies_before_it_replicated_is_told_at_once() -> None:
    cluster = Cluster("a", "b")
    token = registered(cluster, "a", 10)
    cluster.flights.clear()
    wait(cluster, "b", 1, token)
    cluster.step("b", PeerDied(cluster.at(node("b")), NodeId("a"), life("a").incarnation))
    (failed,) = told(cluster, "b")
    assert isinstance(failed, WaiterFailed) and isinstance(failed.error, HolderLostError)


def test_a_waiter_whose_storage_nodes_die_or_whose_request_ends_is_told_at_once() -> None:
    cluster = Cluster("a", "b", "c")
    registered(cluster, "a", 10)
    cluster.manager("c").register_update(RequestId("s"), 10, [node("c")])
    cluster.drain("c")
    cluster.deliver_all()
    wait(cluster, "b", 1, request_id=R, required_seq_len=20)
    wait(cluster, "b", 2, request_id=RequestId("s"), required_seq_len=20)
    cluster.manager("c").end_request(RequestId("s"))
    cluster.drain("c")
    cluster.deliver_all()
    assert [type(e.error) for e in told(cluster, "b") if isinstance(e, WaiterFailed)] == [NotFoundError]
    cluster.kill("a")
    registered(cluster, "b", 30)
    assert [e.waiter for e in told(cluster, "b") if isinstance(e, WaiterReady)] == [1]


def test_a_purge_is_told_to_those_who_wait_for_more_of_what_it_voids() -> None:
    cluster = Cluster("a", "b")
    cluster.manager("a").register_update(R, 10, [node("a")], namespace=NAMESPACE)
    cluster.drain("a")
    cluster.deliver_all()
    wait(cluster, "b", 1, request_id=R, required_seq_len=20)
    cluster.manager("a").raise_scopes([NAMESPACE.digest])
    cluster.drain("a")
    cluster.deliver_all()
    (failed,) = told(cluster, "b")
    assert isinstance(failed, WaiterFailed) and isinstance(failed.error, NotFoundError)


def test_a_cancelled_waiter_is_told_nothing() -> None:
    cluster = Cluster("a", "b")
    token = registered(cluster, "a", 10)
    wait(cluster, "b", 1, token, request_id=R)
    cluster.step("b", CancelWait(1))
    cluster.step("b", CancelWait(1))
    cluster.step("b", CancelWait(77))
    cluster.settle(rounds=20)
    assert told(cluster, "b") == []
    assert cluster.manager("b").stats().waiters == 0


def test_a_number_in_use_and_too_many_waiters_are_refused() -> None:
    cluster = Cluster("a", "b")
    wait(cluster, "b", 1, CausalToken((Dot(life("a"), 9),)))
    with pytest.raises(InvalidUpdateError):
        wait(cluster, "b", 1)
    waiters = Waiters()
    event = WaitFor(cluster.at(node("b")), 0, NOTHING, 10)
    for i in range(MAX_WAITERS):
        waiters.add(WaitFor(event.at, i, NOTHING, 10), {})
    with pytest.raises(LimitReachedError):
        waiters.refuse(MAX_WAITERS)


steps = st.tuples(
    st.sampled_from(("wait", "register", "deliver", "lose", "time", "cancel")), st.integers(0, 7), st.integers(1, 40)
)


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, max_size=40))
def test_every_waiter_is_told_once_and_what_it_is_told_is_true(run: list[tuple[str, int, int]]) -> None:
    """Against looking at the replica: a waiter is ready in the very step in which a read would succeed."""
    cluster = Cluster("a", "b")
    waiting: dict[int, WaitFor] = {}
    tokens = [NOTHING]
    number = seen = 0
    for kind, x, y in [*run, *[("time", 0, 40)] * 30]:
        name = ("a", "b")[x % 2]
        match kind:
            case "wait":
                number += 1
                event = WaitFor(
                    cluster.at(node("b")), number, tokens[y % len(tokens)], cluster.now_ns + y * 30 * MS, R, x * 10
                )
                waiting[number] = event
                cluster.step("b", event)
            case "register":
                known = cluster.manager(name)._replica.state.entries.get(R)
                tokens.append(registered(cluster, name, (known.seq_len if known else 0) + y))
            case "deliver" if cluster.flights:
                cluster.deliver(y % len(cluster.flights))
            case "lose" if cluster.flights:
                cluster.flights.pop(y % len(cluster.flights))
            case "time":
                cluster.advance(y * MS)
            case "cancel" if waiting:
                gone = sorted(waiting)[x % len(waiting)]
                del waiting[gone]
                cluster.step("b", CancelWait(gone))
        for effect in told(cluster, "b")[seen:]:
            event = waiting.pop(effect.waiter)
            readable = succeeds(cluster, event)
            assert readable == isinstance(effect, WaiterReady)
            assert readable or cluster.now_ns >= event.deadline_ns
            seen += 1
        assert not any(succeeds(cluster, event) for event in waiting.values()), "whoever can read was told"
        cluster.check()
    assert not waiting


def succeeds(cluster: Cluster, event: WaitFor) -> bool:
    try:
        cluster.manager("b").verify_readable(R, event.required_seq_len, after=event.after)
    except (StaleReplicaError, IncompleteError, NotFoundError):
        return False
    return True
