"""When an endpoint may be closed: libucx does not survive every moment."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kv_transport.backends.ucp_api import UcxStatusError
from kv_transport.backends.ucx_wire import UcxConnection

ENDPOINT, SENDING, CLOSING, FLUSHING = 1, 2, 3, 4


class Engine:
    """An engine whose operations end when the test says so; it notes what was asked of UCX."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.calls: list[Callable[[], None]] = []
        self.under_way: dict[int, Callable[[str | None], None]] = {}
        self.fail: Callable[[int], None] = lambda status: None
        self.ucp = SimpleNamespace(
            endpoint=self._endpoint,
            send=lambda *args: self._do("send", SENDING),
            flush=lambda *args: self._do("flush", FLUSHING),
            close_endpoint=lambda endpoint: self._do("close", CLOSING),
            forget_endpoint=lambda endpoint: self.did.append("forget"),
            text=lambda status: f"status {status}",
        )

    def _do(self, what: str, request: int) -> int:
        self.did.append(what)
        return request

    def _endpoint(self, address: bytes, on_error: Callable[[int], None]) -> int:
        self.fail = on_error
        return ENDPOINT

    def call(self, function: Callable[[], None]) -> None:
        self.calls.append(function)

    def watch(
        self, requests: list[int], done: Callable[[str | None], None], keep: object = None, error: str | None = None
    ) -> None:
        self.under_way[requests[-1]] = done

    def over(self, request: int, error: str | None = None) -> None:
        self.under_way.pop(request)(error)


@pytest.fixture
def connected() -> tuple[Engine, UcxConnection, list[str]]:
    """A connection whose first message is under way, and what it tells of its end."""
    engine, ends = Engine(), list[str]()
    connection = UcxConnection(engine, 7, ends.append)  # type: ignore[arg-type]
    connection.open_to(b"address", 8)
    connection.handshake(b"hello")
    return engine, connection, ends


@pytest.mark.parametrize("error", [None, "Connection reset by remote peer"])
def test_an_endpoint_is_not_closed_before_its_first_operation_is_over(
    error: str | None, connected: tuple[Engine, UcxConnection, list[str]]
) -> None:
    engine, connection, ends = connected
    closed: list[bool] = []
    connection.close(lambda: closed.append(True), polite=False)
    connection.hurry()
    assert engine.did == ["send"] and not closed
    engine.over(SENDING, error)
    assert engine.did == ["send", "close"] and not closed
    engine.over(CLOSING)
    assert engine.did == ["send", "close", "forget"] and closed == [True]
    assert ends == ([] if error is None else [error])


def test_one_that_fails_while_it_connects_is_closed_after_ucx_has_said_so(
    connected: tuple[Engine, UcxConnection, list[str]],
) -> None:
    engine, connection, ends = connected
    closed: list[bool] = []
    connection.close(lambda: closed.append(True), polite=False)
    engine.fail(-25)
    assert ends == ["status -25"] and engine.did == ["send"], "UCX is calling: not from within"
    for call in engine.calls:
        call()
    assert engine.did == ["send", "close"] and not closed
    for request in (CLOSING, SENDING):
        engine.over(request)
    assert closed == [True]


def test_a_polite_end_lets_what_was_sent_arrive_and_can_be_hurried(
    connected: tuple[Engine, UcxConnection, list[str]],
) -> None:
    engine, connection, _ = connected
    engine.over(SENDING)
    closed: list[bool] = []
    connection.close(lambda: closed.append(True), polite=True)
    assert engine.did == ["send", "flush"]
    connection.hurry()
    assert engine.did == ["send", "flush", "close"]
    for request in (CLOSING, FLUSHING):
        engine.over(request)
    assert closed == [True]


def test_one_that_cannot_be_made_is_over_at_once() -> None:
    engine, ends, closed = Engine(), list[str](), list[bool]()

    def refuse(address: bytes, on_error: Callable[[int], None]) -> int:
        raise UcxStatusError(-6, "Destination is unreachable")

    engine.ucp.endpoint = refuse
    connection = UcxConnection(engine, 7, ends.append)  # type: ignore[arg-type]
    connection.open_to(b"address", 8)
    connection.handshake(b"hello")
    connection.close(lambda: closed.append(True), polite=True)
    assert ends == ["Destination is unreachable"] and closed == [True]
    assert engine.did == ["forget"]
