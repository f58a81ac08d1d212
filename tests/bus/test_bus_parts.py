"""The small parts: packets, ports, stamps, loop lag."""

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bus.errors import BadAddress, BindFailed, LibzmqTooOld
from kv_bus.interface import Stamp
from kv_bus.lag import LoopLagProbe
from kv_bus.limits import PACKET_BYTES_MAX, PACKET_MESSAGES_MAX
from kv_bus.ports import ephemeral_range, pick_ports
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import parse_address, require_libzmq
from kv_bus.zmq_bus.packets import Packet, PacketError, split
from kv_core.clock import SystemClock
from kv_core.ids import NodeId
from kv_core.testing import LoopClock, run_virtual

MS = 1_000_000


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=PACKET_MESSAGES_MAX), st.booleans())
@settings(deadline=None)
def test_a_packet_gives_back_what_went_in(messages: list[bytes], as_view: bool) -> None:
    packet = Packet()
    assert all(packet.add(message) for message in messages)
    data = packet.join()
    assert [bytes(message) for message in split(memoryview(data) if as_view else data)] == messages
    packet.clear()
    assert len(packet) == 0 and packet.add(b"again")


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_a_packet_that_fills_them_or_an_error(data: bytes) -> None:
    try:
        messages = split(data)
    except PacketError:
        return
    assert messages and all(messages)
    packet = Packet()
    for message in messages:
        packet.add(bytes(message))
    assert packet.join() == data


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_a_packet_with_a_wrong_number_is_refused(messages: list[bytes], data: st.DataObject) -> None:
    packet = Packet()
    for message in messages:
        packet.add(message)
    whole = bytearray(packet.join())
    at = data.draw(st.integers(0, 4 * len(messages) + 3))
    whole[at] = data.draw(st.integers(0, 255).filter(lambda value: value != whole[at]))
    with pytest.raises(PacketError):
        split(bytes(whole))


def test_a_packet_is_bounded_and_a_large_message_travels_alone() -> None:
    packet = Packet()
    assert packet.add(b"x" * (PACKET_BYTES_MAX + 1))
    assert not packet.add(b"y")
    packet.clear()
    assert [packet.add(b"y") for _ in range(PACKET_MESSAGES_MAX + 1)].count(False) == 1
    for count in (0, PACKET_MESSAGES_MAX + 1, 2**32 - 1):
        with pytest.raises(PacketError, match=f"{count} messages"):
            split(count.to_bytes(4) + b"x" * 400)


def test_ports_are_below_the_ephemeral_range_free_and_different() -> None:
    ports = pick_ports(20)
    first, _ = ephemeral_range()
    assert len(set(ports)) == 20 and all(1024 < port < first for port in ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        taken.listen()
        assert all(ports[0] not in pick_ports(50) for _ in range(5))
    with socket.socket() as kept, pytest.MonkeyPatch.context() as patch:
        kept.bind(("127.0.0.1", ports[1]))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        patch.setattr("kv_bus.ports._FIRST", ports[1])
        patch.setattr("kv_bus.ports.ephemeral_range", lambda: (ports[1] + 1, 65_535))
        with pytest.raises(BindFailed, match="no 1 free ports"):
            pick_ports(1)
    with pytest.raises(BindFailed, match="no 100000 free ports"):
        pick_ports(100_000)


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(0, 2**32 - 1))), max_size=30))
@settings(deadline=None)
def test_a_stamp_exceeds_every_stamp_seen_before(run: list[tuple[int, int] | None]) -> None:
    stamper, highest = LamportStamper(NodeId("a")), Stamp(0, 0, NodeId(""))
    for remote in run:
        if remote is None:
            stamp = stamper.tick()
            assert (stamp.wall_ns, stamp.logical) > (highest.wall_ns, highest.logical)
            assert stamp.logical < 2**32
            highest = stamp
        else:
            heard = Stamp(*remote, NodeId("b"))
            stamper.merge(heard)
            highest = max(highest, heard)


def test_lag_is_what_a_blocked_loop_shows() -> None:
    async def main(clock: LoopClock) -> None:
        lags: list[int] = []

        class Stalling:
            """A clock whose machine stands still between two looks."""

            extra = 0

            def wall_ns(self) -> int:
                return 0

            def monotonic_ns(self) -> int:
                return clock.monotonic_ns() + self.extra

        stalling = Stalling()
        probe = LoopLagProbe(stalling, interval_ns=10 * MS, late_ns=5 * MS, window_ns=100 * MS, on_sample=lags.append)
        running = asyncio.ensure_future(probe.run())
        await asyncio.sleep(0.025)
        assert lags == [0, 0]
        stalling.extra += 7 * MS
        await asyncio.sleep(0.01)
        assert lags == [0, 0, 7 * MS]
        found = probe.snapshot()
        assert (found.last_ns, found.recent_max_ns, found.samples, found.late_samples) == (7 * MS, 7 * MS, 3, 1)
        await asyncio.sleep(0.2)
        found = probe.snapshot()
        assert found.recent_max_ns == 0 and found.total_ns == 7 * MS, "an old lag must leave the window"
        await probe.close()
        await probe.close()
        await running
        count = len(lags)
        await asyncio.sleep(0.1)
        assert len(lags) == count

    run_virtual(main)


async def test_lag_is_measured_on_a_real_loop() -> None:
    probe = LoopLagProbe(SystemClock(), interval_ns=MS)
    await probe.start()
    await asyncio.sleep(0.02)
    until = SystemClock().monotonic_ns() + 30 * MS
    while SystemClock().monotonic_ns() < until:
        pass
    await asyncio.sleep(0.01)
    assert probe.snapshot().recent_max_ns >= 25 * MS
    await probe.close()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("tcp://0.0.0.0:7000", "every interface"),
        ("tcp://[::]:7000", "every interface"),
        ("tcp://*:7000", "is not an IP address"),
        ("tcp://eth0:7000", "is not an IP address"),
        ("tcp://localhost:7000", "is not an IP address"),
        ("tcp://224.0.0.1:7000", "multicast"),
        ("tcp://127.0.0.1:0", "between 1 and 65535"),
        ("tcp://127.0.0.1:70000", "between 1 and 65535"),
        ("tcp://127.0.0.1:*", "expected tcp"),
        ("tcp://127.0.0.1", "expected tcp"),
        ("ipc:///tmp/x", "expected tcp"),
        ("tcp://127.0.0.1:7000;tcp://1.2.3.4:1", "expected tcp"),
        ("", "expected tcp"),
    ],
)
def test_an_address_is_one_ip_and_one_port(text: str, cause: str) -> None:
    with pytest.raises(BadAddress, match=cause):
        parse_address(text)


def test_good_addresses_are_accepted() -> None:
    assert str(parse_address("tcp://127.0.0.1:7000").host) == "127.0.0.1"
    assert str(parse_address("tcp://[::1]:7000").host) == "::1"
    assert parse_address("tcp://10.1.2.3:65535").port == 65535


def test_an_old_libzmq_or_one_without_curve_is_refused() -> None:
    for version in ((4, 3, 0), (4, 2, 5), (3, 9, 9)):
        with pytest.raises(LibzmqTooOld, match=r"4\.3\.1 or newer is needed"):
            require_libzmq(version, True)
    with pytest.raises(LibzmqTooOld, match="without CURVE"):
        require_libzmq((4, 3, 5), False)
    assert require_libzmq((4, 3, 1), True) == "4.3.1"
    assert require_libzmq()
