"""Version vectors, tokens and incarnations against sets of dots."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_consistency.errors import InvalidUpdateError, MalformedUpdateError, TokenTooLargeError
from kv_consistency.limits import MAX_TOKEN_DOTS
from kv_consistency.version_vector import (
    CausalToken,
    Comparison,
    Dot,
    Origin,
    Reach,
    VersionVector,
    next_incarnation,
)
from tests.consistency.helpers_consistency import life

ORIGINS = [life("a"), life("a", 2), life("b"), life("c")]
reaches = st.dictionaries(st.sampled_from(ORIGINS), st.integers(0, 4))
dots = st.builds(Dot, st.sampled_from(ORIGINS), st.integers(1, 5))


def dots_of(seen: dict[Origin, int]) -> set[Dot]:
    """The oracle: a vector is the set of dots it covers."""
    return {Dot(origin, n) for origin, upto in seen.items() for n in range(1, upto + 1)}


def covered(vector: VersionVector) -> set[Dot]:
    return dots_of({origin: vector[origin] for origin in vector})


@given(reaches, reaches)
def test_comparison_is_inclusion_of_the_dots_covered(x: dict[Origin, int], y: dict[Origin, int]) -> None:
    a, b = dots_of(x), dots_of(y)
    expected = {
        (True, True): Comparison.EQUAL,
        (True, False): Comparison.BEFORE,
        (False, True): Comparison.AFTER,
        (False, False): Comparison.CONCURRENT,
    }[a <= b, b <= a]
    assert VersionVector(x).compare(VersionVector(y)) is expected
    assert (VersionVector(x) == VersionVector(y)) == (expected is Comparison.EQUAL)
    if expected is Comparison.EQUAL:
        assert hash(VersionVector(x)) == hash(VersionVector(y))


@given(reaches, reaches)
def test_merge_is_union_and_meet_is_intersection(x: dict[Origin, int], y: dict[Origin, int]) -> None:
    a, b = VersionVector(x), VersionVector(y)
    assert covered(a.merge(b)) == dots_of(x) | dots_of(y)
    assert covered(a.meet(b)) == dots_of(x) & dots_of(y)
    assert a.dominates(b) == (dots_of(y) <= dots_of(x))


@given(reaches, dots)
def test_advancing_covers_a_dot_and_its_predecessors(x: dict[Origin, int], dot: Dot) -> None:
    vector = VersionVector(x)
    assert covered(vector.advanced(dot)) == dots_of(x) | dots_of({dot.origin: dot.n})
    assert vector.covers(dot) == (dot in dots_of(x))


@given(reaches, reaches)
def test_a_delta_against_any_base_gives_the_vector_back(x: dict[Origin, int], y: dict[Origin, int]) -> None:
    vector, base = VersionVector(x), VersionVector(y)
    delta = vector.delta(base)
    assert base.updated(delta) == vector
    assert {reach.origin for reach in delta} == {o for o in ORIGINS if vector[o] != base[o]}
    assert VersionVector.of(vector.to_wire()) == vector


def test_a_delta_is_small_when_little_changed() -> None:
    many = VersionVector({life(f"node-{i}"): 1000 + i for i in range(64)})
    next_one = many.advanced(Dot(life("node-3"), 2000))
    assert next_one.delta(many) == (Reach(life("node-3"), 2000),)
    whole = len(msgspec.msgpack.encode(next_one.to_wire()))
    assert len(msgspec.msgpack.encode(next_one.delta(many))) < whole / 30


@given(st.lists(dots, max_size=8), st.lists(dots, max_size=8))
def test_a_token_follows_what_its_dots_follow_and_survives_the_wire(x: list[Dot], y: list[Dot]) -> None:
    joined = CausalToken.of(x).join(CausalToken.of(y))
    assert covered(VersionVector.of(joined.dots)) == covered(VersionVector.of([*x, *y]))
    assert list(joined.dots) == sorted(joined.dots)
    assert CausalToken.from_bytes(joined.to_bytes()) == joined
    assert bool(joined) == bool(x or y)


def test_a_token_is_bounded() -> None:
    full = CausalToken.of(Dot(life(f"node-{i}"), 1) for i in range(MAX_TOKEN_DOTS))
    assert CausalToken.from_bytes(full.to_bytes()) == full
    with pytest.raises(TokenTooLargeError) as caught:
        full.join(CausalToken.of([Dot(life("one more"), 1)]))
    assert caught.value.fields == {"have": MAX_TOKEN_DOTS + 1, "limit": MAX_TOKEN_DOTS}


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x80",
        b"x" * 40_000,
        msgspec.msgpack.encode([[[["a", 1], 0]]]),
        msgspec.msgpack.encode([[[["b", 1], 1], [["a", 1], 1]]]),
        msgspec.msgpack.encode([[[["a", 1], 1], [["a", 1], 2]]]),
        msgspec.msgpack.encode([[[["a", -1], 1]]]),
        msgspec.msgpack.encode([[[["", 1], 1]]]),
        msgspec.msgpack.encode([[[["a", 1], 1 << 50]]]),
    ],
)
def test_bytes_that_are_no_token_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedUpdateError):
        CausalToken.from_bytes(data, peer="p")


@given(st.integers(0, 100), st.lists(st.integers(0, 100)))
def test_a_new_life_is_above_what_was_persisted_and_what_any_peer_has_seen(persisted: int, seen: list[int]) -> None:
    assert next_incarnation(persisted, seen) > max([persisted, *seen])


def test_a_negative_incarnation_is_refused() -> None:
    with pytest.raises(InvalidUpdateError):
        next_incarnation(-1)
