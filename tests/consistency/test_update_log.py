"""The logs against plain lists."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_consistency.update import HolderCleared, ScopesRaised, Update, estimated_nbytes
from kv_consistency.update_log import UpdateLog
from kv_consistency.version_vector import Origin, VersionVector
from tests.consistency.helpers_consistency import life

ORIGINS = [life("a"), life("b")]
steps = st.tuples(
    st.sampled_from(("extend", "stable", "restart", "forget")), st.sampled_from(ORIGINS), st.integers(1, 9)
)


def update(n: int, size: int = 1) -> Update:
    return Update(n, n, 0, (ScopesRaised((b"8 bytes!",) * size),))


@settings(deadline=None)
@given(st.lists(steps, max_size=40))
def test_what_is_handed_out_is_what_was_appended_without_holes(run: list[tuple[str, Origin, int]]) -> None:
    bound = 1_000
    log = UpdateLog(bytes_max=bound)
    everything: dict[Origin, dict[int, Update]] = {origin: {} for origin in ORIGINS}
    applied = dict.fromkeys(ORIGINS, 0)
    for kind, origin, x in run:
        match kind:
            case "extend":
                new = [update(applied[origin] + i, x) for i in range(1, x + 1)]
                log.extend(origin, new)
                everything[origin] |= {u.n: u for u in new}
                applied[origin] += x
            case "stable":
                log.cut_stable(VersionVector({origin: applied[origin] - x}))
            case "restart":
                applied[origin] += x
                log.restart_at(origin, applied[origin])
            case _:
                log.forget(origin)
                assert log.low(origin) is None
                log.restart_at(origin, applied[origin])
        log.check()
        for origin in ORIGINS:
            low = log.low(origin)
            if low is None:
                continue
            for first in range(1, applied[origin] + 2):
                got = log.slice(origin, first, applied[origin], 10**9)
                expected = [everything[origin][n] for n in range(first, applied[origin] + 1)] if first >= low else []
                assert list(got) == expected
            assert log.nbytes_from(origin, low) == sum(
                estimated_nbytes(everything[origin][n]) for n in range(low, applied[origin] + 1)
            )


def test_a_slice_is_bounded_in_bytes_but_never_empty() -> None:
    log = UpdateLog()
    log.extend(life("a"), [update(n, 10) for n in range(1, 20)])
    size = estimated_nbytes(update(1, 10))
    assert len(log.slice(life("a"), 1, 19, 5 * size)) == 5
    assert len(log.slice(life("a"), 1, 19, 1)) == 1
    assert len(log.slice(life("a"), 3, 4, 10**9)) == 2
    assert log.slice(life("a"), 20, 30, 10**9) == ()
    assert log.slice(life("b"), 1, 1, 10**9) == ()


def test_the_bound_cuts_the_largest_log_first_and_is_counted() -> None:
    size = estimated_nbytes(update(1))
    log = UpdateLog(bytes_max=20 * size)
    log.extend(life("a"), [update(1)])
    log.extend(life("b"), [update(n) for n in range(1, 30)])
    assert log.low(life("a")) == 1
    assert log.low(life("b")) is not None and log.truncated > 0
    log.check()


def test_what_everybody_has_is_cut_without_being_counted() -> None:
    log = UpdateLog()
    log.extend(life("a"), [update(n) for n in range(1, 11)])
    log.cut_stable(VersionVector({life("a"): 4}))
    assert log.low(life("a")) == 5
    log.cut_stable(VersionVector({life("a"): 4}))
    log.cut_stable(VersionVector({life("a"): 99}))
    assert log.low(life("a")) == 11 and log.nbytes == 0 and log.truncated == 0


def test_the_estimate_is_an_upper_bound_of_what_is_sent() -> None:
    for each in (update(1), update(1 << 40, 200), Update(1, 1 << 62, 9, (HolderCleared(None),))):
        assert estimated_nbytes(each) >= len(msgspec.msgpack.encode(each))
