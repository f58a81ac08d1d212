"""A put is announced at most once, whatever its writer tries again and by whatever connection."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_transport import Access, SharedBuffer, limits
from kv_transport.errors import ForgottenPut, FrameRefused, ReplayedNonce
from kv_transport.frames import UnitHead, pack_checks
from kv_transport.ledger import Ledger
from kv_transport.poster import LoopPoster
from kv_transport.regions import RegionTable
from kv_transport.replay import PutWindow
from kv_transport.types import PeerName
from kv_transport.unit_header import plain_header
from tests.transport.helpers_transport import NO_RESERVE

WRITER = NodeId("writer")

steps_ahead = st.one_of(
    st.integers(-40, 40),
    st.integers(-limits.PUT_WINDOW - 3, -limits.PUT_WINDOW + 3),
    st.integers(limits.PUT_WINDOW - 3, limits.PUT_WINDOW + 3),
    st.integers(1, 3 * limits.PUT_WINDOW),
)


@given(st.lists(steps_ahead, max_size=60))
def test_each_put_is_announced_once_as_long_as_it_is_remembered(ahead: list[int]) -> None:
    window, announced, newest = PutWindow("p"), set[int](), 0
    for step in ahead:
        put = newest + step
        if put < 1:
            with pytest.raises(FrameRefused):
                window.announce(put)
        elif put <= newest - limits.PUT_WINDOW:
            with pytest.raises(ForgottenPut):
                window.announce(put)
        else:
            assert window.announce(put) is (put not in announced)
            announced.add(put)
            newest = max(newest, put)


@dataclass
class OneSided:
    """A connection of a life of the writer."""

    peer: PeerName
    scheme: str = "shm"
    one_sided: bool = True
    may_lag: bool = False

    def supersede(self) -> None: ...
    def send_fence(self, ticket: int) -> None: ...


@dataclass
class Owner:
    """A ledger with one open region, and what was announced by it."""

    ledger: Ledger
    region: int
    announced: list[tuple[NodeId, bytes]] = field(default_factory=list)
    nonce: int = 0

    def head(self, put: int, notif: bytes, nonce: int | None = None) -> UnitHead:
        """An attempt; with a nonce of its own unless told otherwise."""
        if nonce is None:
            self.nonce = nonce = self.nonce + 1
        header = plain_header(1).attempt(nonce, 7)
        runs, checks = [0, 64], pack_checks([7])
        return UnitHead(0, self.region, runs=runs, checks=checks, header=header, notif=notif, put=put)


@contextmanager
def owner() -> Iterator[Owner]:
    with SharedBuffer.create(64, budget=NO_RESERVE) as buffer:
        loop = asyncio.new_event_loop()
        regions = RegionTable(NodeId("owner"))
        region = regions.add(buffer, Access.WRITE).region
        ledger = Ledger(regions, LoopPoster(loop), lambda node, payload: found.announced.append((node, payload)))
        found = Owner(ledger, region)
        try:
            yield found
        finally:
            loop.close()


@dataclass
class Attempt:
    """One of a put's, by a connection that may be new; again if its frame is repeated."""

    put: int
    session: int
    repeated: bool


attempts = st.builds(Attempt, st.integers(1, 12), st.integers(0, 2), st.booleans())


@given(st.lists(attempts, max_size=60), st.booleans())
def test_retries_repeats_and_reconnects_never_announce_a_put_again(plan: list[Attempt], one_sided: bool) -> None:
    with owner() as it:
        sessions = [OneSided(PeerName(WRITER, Incarnation(1)), one_sided=one_sided) for _ in range(3)]
        for attempt in plan:
            head = it.head(attempt.put, b"%d" % attempt.put)
            for again in range(1 + attempt.repeated):
                try:
                    if one_sided:
                        it.ledger.place(sessions[attempt.session], head)
                    else:
                        it.ledger.land(it.ledger.admit(sessions[attempt.session], head), [7])
                except ReplayedNonce:
                    assert again
                else:
                    assert not again
        # In order of their first attempts, each once.
        assert it.announced == [(WRITER, b"%d" % put) for put in dict.fromkeys(one.put for one in plan)]


def test_a_put_that_is_forgotten_is_refused_by_name_and_not_announced() -> None:
    with owner() as it:
        session = OneSided(PeerName(WRITER, Incarnation(1)))
        it.ledger.place(session, it.head(1, b"first"))
        it.ledger.place(session, it.head(1 + limits.PUT_WINDOW, b"last"))
        for call in (it.ledger.place, it.ledger.admit):
            with pytest.raises(ForgottenPut) as caught:
                call(session, it.head(1, b"first"))
            assert (caught.value.fields["put"], caught.value.fields["newest"]) == (1, 1 + limits.PUT_WINDOW)
        assert [payload for _, payload in it.announced] == [b"first", b"last"]
        assert it.ledger.refusals == 2


def test_lives_of_a_writer_count_their_puts_by_themselves() -> None:
    with owner() as it:
        for life in (1, 2):
            it.ledger.place(OneSided(PeerName(WRITER, Incarnation(life))), it.head(1, b"%d" % life))
        assert [payload for _, payload in it.announced] == [b"1", b"2"]


def test_a_notification_without_a_number_is_refused() -> None:
    with owner() as it:
        session = OneSided(PeerName(WRITER, Incarnation(1)))
        with pytest.raises(KVError, match="put 0"):
            it.ledger.place(session, it.head(0, b"whose?"))
        it.ledger.place(session, it.head(0, b""))
        assert it.announced == []
