"""The thread that calls UCX: what it does between the calls that move bytes, and when it sleeps."""

import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from ctypes import c_int
from types import SimpleNamespace

import pytest

from kv_transport.backends import ucx_engine
from kv_transport.backends.ucx_binding import UcxDevices
from kv_transport.backends.ucx_engine import UcxEngine


class Ucp:
    """A UCX in which every request is over at once and nothing else happens; it notes what it is asked."""

    asked: list[str]
    arms: int
    patient = False
    """Poll until it is wanted."""
    waits: bool

    def __init__(self, context: int, worker: int) -> None:
        type(self).asked, type(self).arms, type(self).waits = [], 0, False
        self._efd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def address(self) -> bytes:
        return b"here"

    def event_fd(self) -> int:
        return self._efd

    def poll(self, tag: int, requests: Sequence[int], wanted: c_int, turns: int) -> bool:
        self.asked += ["progress"] * turns
        while self.patient and not wanted.value:
            type(self).waits = True
        return bool(wanted.value or requests)

    def arm(self) -> bool:
        self.asked.append("arm")
        type(self).arms += 1
        return True

    def probe(self, tag: int) -> None:
        return None

    def check(self, request: int) -> bool:
        return True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[UcxEngine]:
    monkeypatch.setattr(ucx_engine, "Ucp", Ucp)
    binding = SimpleNamespace(
        context_handle=1, worker_handle=2, devices=UcxDevices(()), name="made up", version="1", close=lambda: None
    )
    made, opened = UcxEngine("kv-ucx-test", lambda: binding), threading.Event()  # type: ignore[arg-type,return-value]
    made.start(lambda error: opened.set(), lambda message: None)
    assert opened.wait(60)
    yield made
    made.stop()


def test_what_has_ended_and_what_is_small_is_heard_between_two_moves(engine: UcxEngine) -> None:
    said, over = list[str](), threading.Event()

    def move(name: str) -> None:
        said.append(name)
        engine.call(lambda: said.append(f"called by {name}"))
        engine.watch([7], lambda error: said.append(f"{name} is over"))

    def both() -> None:
        for name in ("one", "two"):
            engine.move(lambda name=name: move(name))  # type: ignore[misc]
        engine.move(over.set)

    engine.call(both)
    assert over.wait(60)
    assert sorted(said[1:3]) == ["called by one", "one is over"] and said[0] == "one" and said[3] == "two"


def test_moves_that_wait_are_done_before_it_ends(engine: UcxEngine) -> None:
    done = list[int]()

    def many() -> None:
        for number in range(10):
            engine.move(lambda number=number: done.append(number))  # type: ignore[misc]

    engine.call(many)
    engine.stop()
    assert done == list(range(10))


def test_it_looks_a_while_for_what_comes_next_before_it_sleeps(engine: UcxEngine) -> None:
    called = threading.Event()

    def call() -> None:
        Ucp.asked.clear()
        called.set()

    engine.call(call)
    assert called.wait(60)
    for _ in range(6_000):
        if "arm" in Ucp.asked:
            break
        threading.Event().wait(0.01)
    assert Ucp.asked.index("arm") > ucx_engine._POLLS


def test_a_wake_that_comes_behind_its_work_wakes_the_thread_once(
    engine: UcxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that polls sees that it is wanted, and has done the work, before the caller has written to wake it."""
    done, written, write = list[bool](), list[bool](), os.eventfd_write
    with monkeypatch.context() as patched:
        patched.setattr(Ucp, "patient", True)
        engine.call(lambda: None)
        while not Ucp.waits or engine._wanted.value:
            pass  # until it polls, and has heard of that call
        before = Ucp.arms

        def write_late(fd: int, value: int) -> None:
            Ucp.patient = False
            while Ucp.arms == before:
                pass  # until it goes to sleep, with nothing left to do
            written.append(bool(done))
            write(fd, value)

        patched.setattr(os, "eventfd_write", write_late)
        engine.call(lambda: done.append(True))
    assert written == [True]
    before, readable = Ucp.arms, select.poll()
    readable.register(engine._wake, select.POLLIN)
    while readable.poll(0):
        assert Ucp.arms - before < 100, "awake for ever"


def test_no_call_of_any_thread_is_slept_through(engine: UcxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_engine, "_SLEEP_S", 60.0)
    monkeypatch.setattr(ucx_engine, "_POLLS", 1)  # asleep as often as can be
    missed, interval = list[int](), sys.getswitchinterval()

    def caller() -> None:
        for number in range(1_000):
            done = threading.Event()
            engine.call(done.set)
            if not done.wait(20):
                missed.append(number)
                return

    callers = [threading.Thread(target=caller) for _ in range(4)]
    sys.setswitchinterval(1e-6)  # threads take turns between any two steps
    try:
        for one in callers:
            one.start()
        for one in callers:
            one.join()
    finally:
        sys.setswitchinterval(interval)
    assert not missed
