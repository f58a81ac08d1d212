"""Ports are below the ephemeral range and stay ours until given back."""

import asyncio
import socket

import pytest
import zmq

from kv_services.launch import NoFreePortError, PortReservation, ports


def test_ports_lie_below_the_ephemeral_range_and_differ() -> None:
    with PortReservation() as reservation:
        taken = [reservation.take() for _ in range(50)]
    assert len(set(taken)) == 50
    assert all(ports.LOWEST_PORT <= port < ports.ephemeral_low() for port in taken)


def test_two_reservations_never_hold_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda span: 5000)
    with PortReservation() as one, PortReservation() as other:
        assert {one.take() for _ in range(5)}.isdisjoint({other.take() for _ in range(5)})


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbelow", lambda span: 6000)
    with PortReservation() as probe:
        port = probe.take()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with PortReservation() as reservation:
            assert reservation.take() != port


async def test_zeromq_and_asyncio_can_listen_on_a_held_port_again_and_again() -> None:
    with PortReservation() as reservation:
        port = reservation.take()
        for _ in range(2):
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.bind(f"tcp://127.0.0.1:{port}")
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
        server.close()
        await server.wait_closed()


def test_a_held_port_that_nobody_listens_on_refuses_connections() -> None:
    with PortReservation() as reservation, socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", reservation.take()))


def test_running_out_of_ports_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "ephemeral_low", lambda: ports.LOWEST_PORT + 3)
    with (
        PortReservation() as reservation,
        pytest.raises(NoFreePortError, match="between 10000 and 10002"),
    ):
        for _ in range(4):
            reservation.take()
