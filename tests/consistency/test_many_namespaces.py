"""A client may name a namespace for each request: bounds hold, and what is held goes on being purged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_consistency import limits
from kv_consistency.scopes import ScopeTable
from kv_consistency.update import NamespaceRef, scope_id
from kv_consistency.version_vector import Origin
from kv_core.ids import Incarnation, NodeId, RequestId
from tests.consistency.helpers_consistency import Cluster, block

TENANT = scope_id("tenant", "t")
A = NodeId("a")


def namespace(number: int) -> NamespaceRef:
    return NamespaceRef(number.to_bytes(16, "big"), 16, (TENANT, scope_id("weights", "m@1")))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(limits, "MAX_NAMESPACES", 32)
    return 32


def test_more_namespaces_than_the_bound_come_and_go_and_each_is_held_while_it_lasts(few: int) -> None:
    cluster = Cluster("a", "b")
    for number in range(4 * few):
        cluster.store("a", [number], namespace=namespace(number))
        cluster.settle()
        assert cluster.manager("b").find_prefix_match([block(number)]) is not None, number
        cluster.remove("a", [number], namespace=namespace(number))
        cluster.settle()
        assert cluster.manager("b").find_prefix_match([block(number)]) is None
    for name in ("a", "b"):
        cluster.manager(name).check()
        assert not cluster.manager(name).stats().refused


def test_what_is_held_is_purged_however_many_namespaces_came_since(few: int) -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", [0], namespace=namespace(0))
    for number in range(1, 3 * few):
        cluster.store("a", [number], namespace=namespace(number))
        cluster.remove("a", [number], namespace=namespace(number))
    cluster.settle()
    assert cluster.manager("b").find_prefix_match([block(0)]) is not None
    cluster.manager("b").raise_scopes([TENANT])
    cluster.settle()
    for name in ("a", "b"):
        assert cluster.manager(name).find_prefix_match([block(0)]) is None
        cluster.manager(name).check()


def test_beyond_the_bound_a_claim_is_counted_and_not_kept_and_nothing_else_is_refused(few: int) -> None:
    cluster = Cluster("a", "b")
    for number in range(2 * few):
        cluster.store("a", [number], namespace=namespace(number))
    cluster.settle()
    for name in ("a", "b"):
        manager = cluster.manager(name)
        found = [number for number in range(2 * few) if manager.find_prefix_match([block(number)]) is not None]
        assert len(found) == few and manager.stats().refused == few
    # Requests in namespaces of which nothing is kept are read as ever, and their KV is purged with the others'.
    for number in range(2 * few):
        request = RequestId(f"r{number}")
        cluster.manager("a").register_update(request, 16, [A], namespace=namespace(number))
        cluster.manager("a").verify_readable(request, 16)
    for number in range(few):
        cluster.remove("a", [number], namespace=namespace(number))
    for number in range(2 * few, 3 * few):
        cluster.store("a", [number], namespace=namespace(number))
    assert cluster.manager("a").find_prefix_match([block(3 * few - 1)]) is not None, "room is found again"
    cluster.manager("a").check()


@given(st.lists(st.tuples(st.sampled_from(["count", "claim", "free", "purge"]), st.integers(0, 15)), max_size=120))
def test_forgetting_changes_no_count(steps: list[tuple[str, int]]) -> None:
    """Against a table without a bound."""
    mine, twin = ScopeTable(), ScopeTable()
    origin, used = Origin(A, Incarnation(1)), set[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        for n, (what, number) in enumerate(steps, start=1):
            one = namespace(number)
            patch.setattr(limits, "MAX_NAMESPACES", 1 << 16)
            twin_count = twin.purges(one)
            twin_told = twin.raise_(origin, n, [TENANT, one.digest]) if what == "purge" else {}
            patch.setattr(limits, "MAX_NAMESPACES", 8)
            if what == "claim" and len(used | {one.digest}) <= 4:
                assert mine.follow(one, lambda: used) == twin_count
                used.add(one.digest)
            elif what == "free":
                used.discard(one.digest)
            elif what == "purge":
                told = mine.raise_(origin, n, [TENANT, one.digest])
                assert {ns: count for ns, count in told.items() if ns.digest in used} == {
                    ns: count for ns, count in twin_told.items() if ns.digest in used
                }
            else:
                assert mine.purges(one) == twin_count
            mine.check()
