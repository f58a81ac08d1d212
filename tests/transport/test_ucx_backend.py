"""What only `ucx` has: bindings, devices, the extra that brings it, and a quiet life when it is idle."""

import asyncio
import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError, LocalProtocolError, MissingExtraError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_transport import Access, TransferAgent, TransportConfig, XferDesc, XferOp, XferState
from kv_transport.arena_layout import IntArray
from kv_transport.auth import SessionKeys
from kv_transport.backends.ucx_binding import UcxDevices, network_devices, parse_devices
from kv_transport.backends.ucx_wire import UcxConnection, split, unpack_hello, unpack_reply
from kv_transport.descriptors import Run
from kv_transport.errors import AuthenticationFailed, BackendUnavailable, FrameRefused
from kv_transport.regions import SharedBuffer
from kv_transport.units import Unit
from tests.transport.helpers_transport import NO_RESERVE, SMALL, config, eventually, introduce, node, pair
from tests.transport.helpers_ucp import nothing_installed, only_ucp, replace_opener

INFO = """#
#            md 1  :  component 1  tcp
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
"""
WITH_RDMA = INFO + "#      resource 2  :  md 2  dev 2  flags -- rc_mlx5/mlx5_0:1\n"


async def test_the_older_binding_serves_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_opener(monkeypatch, only_ucp)
    async with pair("ucx", tmp_path) as (sender, receiver):
        (mine,) = sender.agent.inventory().of("transport")
        assert mine.state.startswith("ucp ")
        request, source, target = RequestId("old"), sender.filled(4, seed=1), receiver.blocks(4)
        grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=4 * SMALL.block_size)
        inbound = receiver.engine.expect(request, grant)
        handover = sender.engine.open_handover(request, grant)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(20_000)
        await inbound.done()
        assert receiver.content(target) == sender.content(source)


async def test_without_a_binding_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_opener(monkeypatch, nothing_installed)
    with pytest.raises(MissingExtraError, match=r"kv-transport\[ucx\]"):
        async with node("alone", config("ucx", tmp_path)):
            pass


async def test_auto_leaves_ucx_out_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the extra, and with it but without an RDMA device: the node runs, by other transports."""
    for opener, reason in [(nothing_installed, "kv-transport[ucx]"), (None, "no RDMA device here")]:
        with monkeypatch.context() as patched:
            if opener is not None:
                replace_opener(patched, opener)
            settings = TransportConfig(transport="auto", socket_folder=tmp_path / "sockets", allow_ucx=True)
            async with TransferAgent(NodeId("alone"), Incarnation(1), settings) as agent:
                found = {item.ident: item for item in agent.inventory().of("transport")}
                assert list(found) == ["shm", "ucx", "tcp"]
                assert reason in found["ucx"].state and found["ucx"].detail == "not reachable by peers"
                schemes = [item.scheme for item in agent.get_agent_metadata(NodeId("b"), Incarnation(1)).addresses]
                assert schemes == ["shm", "tcp"]


async def test_asked_for_rdma_without_a_device_it_warns(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        async with node("alone", config("ucx", tmp_path)):
            assert any("has no RDMA device" in record.getMessage() for record in caplog.records)


async def test_auto_takes_ucx_between_hosts_where_both_ends_have_rdma(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The devices are made up, the rest is real: shm is out of reach as between hosts."""
    monkeypatch.setattr(UcxDevices, "has_rdma", property(lambda self: True))
    hosts = itertools.count()
    monkeypatch.setattr("kv_transport.agent._host_id", lambda: str(next(hosts)).encode())
    settings = TransportConfig(transport="auto", socket_folder=tmp_path / "sockets", allow_ucx=True)
    plain = TransportConfig(transport="auto", socket_folder=tmp_path / "sockets")
    async with node("one", settings) as one, node("two", settings) as two, node("three", plain) as three:
        introduce(one, two, three)
        found = {peer.peer: peer.preferred for peer in one.agent.stats().peers}
        assert found == {"two#1": "ucx", "three#1": "tcp"}
        for receiver in (two, three):
            request, source, target = RequestId("far"), one.filled(2, seed=1), receiver.blocks(2)
            grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=2 * SMALL.block_size)
            inbound = receiver.engine.expect(request, grant)
            handover = one.engine.open_handover(request, grant)
            for layer in range(SMALL.num_layers):
                handover.submit(layer, source)
            stats = await handover.finish(20_000)
            await inbound.done()
            assert stats.transport == found[f"{receiver.agent.name.node}#1"]


async def test_a_broken_ucx_falls_back_to_tcp_under_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(UcxDevices, "has_rdma", property(lambda self: True))
    hosts = itertools.count()
    monkeypatch.setattr("kv_transport.agent._host_id", lambda: str(next(hosts)).encode())
    settings = TransportConfig(transport="auto", socket_folder=tmp_path / "sockets", allow_ucx=True)
    async with node("one", settings) as one, node("two", settings) as two:
        introduce(one, two)
        request, source, target = RequestId("far"), one.filled(2, seed=1), two.blocks(2)
        grant = two.engine.grant_writes(request, target, seq_start=0, seq_end=2 * SMALL.block_size)
        inbound = two.engine.expect(request, grant)
        handover = one.engine.open_handover(request, grant)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)  # acknowledged, not only arrived
        # Whatever goes over ucx from now on breaks.
        from kv_transport.backends.ucx_link import UcxLink

        monkeypatch.setattr(UcxLink, "_start", lambda self, seq, unit, remote: self.lose("pulled out"))
        for layer in range(1, SMALL.num_layers):
            handover.submit(layer, source)
        stats = await handover.finish(20_000)
        await inbound.done()
        assert stats.transport == "ucx+tcp" and two.content(target) == one.content(source)
        assert not one.agent.inventory().work and not two.agent.inventory().work


async def test_bytes_travel_while_they_are_summed_and_are_told_of_after_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_sum, summed, placed = threading.Event(), threading.Event(), queue.Queue[Callable[[], None]]()
    take_checks, put = Unit.take_checks, UcxConnection.put

    def sum_later(unit: Unit) -> list[int]:
        may_sum.wait(20)
        summed.set()
        return take_checks(unit)

    def tell_later(
        self: UcxConnection, runs: Sequence[Run], local: int, remote: int, key: int, done: Callable[[str | None], None]
    ) -> None:
        put(
            self,
            runs,
            local,
            remote,
            key,
            lambda failure: placed.put(partial(self.engine.call, partial(done, failure))),
        )

    monkeypatch.setattr(Unit, "take_checks", sum_later)
    # Where the processor moves the bytes they are summed on their way, as the next test shows.
    monkeypatch.setattr(UcxDevices, "has_rdma", property(lambda self: True))
    with SharedBuffer.create(1 << 18, budget=NO_RESERVE) as one, SharedBuffer.create(1 << 18, budget=NO_RESERVE) as two:
        async with pair("ucx", tmp_path) as (left, right):
            ours, theirs = (
                XferDesc(end.agent.register_memory(memory, Access.WRITE).region, 0, 1 << 18)
                for end, memory in ((left, one), (right, two))
            )
            introduce(left, right)
            xfer = left.agent.initialize_xfer(XferOp.WRITE, [ours], [theirs], right.agent.name.node)
            one.data[:] = 7
            left.agent.transfer(xfer)
            await eventually(lambda: bool((two.data == 7).all()))
            assert xfer.state is XferState.POSTED, "nobody knows the sums of what is there"
            may_sum.set()
            await xfer.done(20_000)

            summed.clear()
            monkeypatch.setattr(UcxConnection, "put", tell_later)
            left.agent.transfer(xfer)
            told = await asyncio.to_thread(placed.get, timeout=20)
            await asyncio.to_thread(summed.wait, 20)
            await asyncio.sleep(0.1)
            assert xfer.state is XferState.POSTED, "nobody knows that the bytes are there"
            told()
            await xfer.done(20_000)


async def test_what_the_processor_moves_is_summed_on_its_way_and_told_of_when_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    placed, put = queue.Queue[Callable[[], None]](), UcxConnection.put_summed

    def tell_later(
        self: UcxConnection,
        memory: memoryview,
        cells: IntArray,
        remote: int,
        key: int,
        done: Callable[[str | None], None],
    ) -> list[int]:
        later = lambda failure: placed.put(partial(self.engine.call, partial(done, failure)))  # noqa: E731
        return put(self, memory, cells, remote, key, later)

    def broken(self: UcxConnection, *arguments: object) -> list[int]:
        raise IndexError("made up")

    monkeypatch.setattr(Unit, "take_checks", lambda self: pytest.fail("summed apart from its bytes"))
    with SharedBuffer.create(1 << 23, budget=NO_RESERVE) as one, SharedBuffer.create(1 << 23, budget=NO_RESERVE) as two:
        async with pair("ucx", tmp_path) as (left, right):
            ours, theirs = (
                XferDesc(end.agent.register_memory(memory, Access.WRITE).region, 64, (1 << 23) - 100)
                for end, memory in ((left, one), (right, two))
            )
            introduce(left, right)
            xfer = left.agent.initialize_xfer(XferOp.WRITE, [ours], [theirs], right.agent.name.node)
            one.data[:] = np.random.default_rng(1).integers(0, 256, 1 << 23, np.uint8)
            left.agent.transfer(xfer)
            await xfer.done(20_000)
            assert (two.data[64:-36] == one.data[64:-36]).all()
            assert not two.data[:64].any() and not two.data[-36:].any()

            with monkeypatch.context() as patched:
                patched.setattr(UcxConnection, "put_summed", tell_later)
                left.agent.transfer(xfer)
                told = [await asyncio.to_thread(placed.get, timeout=20) for _ in range(2)]
                await asyncio.sleep(0.1)
                assert xfer.state is XferState.POSTED, "nobody knows that the bytes are there"
                for tell in told:
                    tell()
                await xfer.done(20_000)

            monkeypatch.setattr(UcxConnection, "put_summed", broken)
            left.agent.transfer(xfer)
            with pytest.raises(LocalProtocolError, match="made up"):
                await xfer.done(20_000)


async def test_an_idle_connection_costs_next_to_nothing(tmp_path: Path) -> None:
    async with pair("ucx", tmp_path, heartbeat_ms=500) as (sender, receiver):
        await sender.agent.send_notif(NodeId("decode"), b"up")
        await anext(receiver.agent.notifs())
        await asyncio.sleep(0.1)
        before = time.process_time()
        await asyncio.sleep(1.0)
        # Two agents; one that polled would take the whole second.
        assert time.process_time() - before < 0.3


def test_devices_are_read_from_what_ucx_says_of_itself() -> None:
    assert parse_devices(INFO).pairs == (("self", "memory"), ("tcp", "eth0"))
    assert not parse_devices(INFO).has_rdma and parse_devices(WITH_RDMA).has_rdma
    assert str(parse_devices("")) == "none"


def test_ucx_keeps_to_the_interface_of_the_bind_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert network_devices("127.0.0.1") == "lo"
    assert network_devices("0.0.0.0") == "all"
    with pytest.raises(BackendUnavailable, match="no network interface"):
        network_devices("192.0.2.77")
    with pytest.raises(BackendUnavailable, match="IPv4"):
        network_devices("::1")
    entry = tmp_path / "mlx5_0" / "ports" / "1" / "gid_attrs" / "ndevs"
    entry.mkdir(parents=True)
    (entry / "0").write_text("lo\n")
    (entry / "1").write_text("eth7\n")
    monkeypatch.setattr("kv_transport.backends.ucx_binding._SYS_INFINIBAND", tmp_path)
    assert network_devices("127.0.0.1") == "mlx5_0:1,lo"


def test_the_binding_is_not_loaded_before_it_is_asked_for() -> None:
    import subprocess

    code = "import kv_transport, sys; assert 'ucxx' not in sys.modules and 'ucp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def two_ends() -> tuple[UcxConnection, UcxConnection, list[bytes]]:
    """A connection's two ends without a network: what the first one sends is in the list, head included."""
    sent: list[bytes] = []
    keys = SessionKeys(to_owner=b"o" * 32, to_initiator=b"i" * 32)
    ends = [UcxConnection(None, 1, lambda cause: None) for _ in range(2)]  # type: ignore[arg-type]
    for end, initiator in zip(ends, (True, False), strict=True):
        end.secure(keys, initiator=initiator)
        end._endpoint_open = True
        end._message = sent.append  # type: ignore[method-assign, assignment]
    return ends[0], ends[1], sent


def test_a_frame_that_was_changed_repeated_or_left_out_ends_the_connection() -> None:
    def opened(order: list[int], damage: int | None = None) -> list[bytes]:
        here, there, sent = two_ends()
        for number in range(4):
            here.send(f"frame {number}".encode())
        bodies = [bytearray(split(sent[number])[2]) for number in order]
        if damage is not None:
            bodies[-1][damage] ^= 1
        return [bytes(there.open_frame(memoryview(body), "peer")) for body in bodies]

    assert opened([0, 1, 2, 3]) == [b"frame 0", b"frame 1", b"frame 2", b"frame 3"]
    for order, damage in [([0, 0], None), ([1], None), ([0, 2], None), ([0, 1], 0), ([0, 1], 15), ([0, 1], 20)]:
        with pytest.raises(FrameRefused, match="MAC"):
            opened(order, damage)
    here, _, sent = two_ends()
    here.send(b"to the owner")
    with pytest.raises(FrameRefused, match="MAC"):
        here.open_frame(split(sent[0])[2], "peer")  # reflected to who sent it


@given(st.binary(max_size=300))
def test_whatever_arrives_is_taken_apart_or_refused(data: bytes) -> None:
    for take_apart in (
        lambda: split(data),
        lambda: unpack_hello(memoryview(data)),
        lambda: unpack_reply(memoryview(data)),
    ):
        try:
            take_apart()
        except KVError as error:
            assert isinstance(error, FrameRefused | AuthenticationFailed)
