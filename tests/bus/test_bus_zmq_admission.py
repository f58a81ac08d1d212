"""Who a ZeroMQ bus lets in: keys, mechanisms, lists of keys, clusters."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import zmq

from kv_bus.errors import AuthRefused, KeyFileError, WrongCluster
from kv_bus.interface import PeerRefused
from kv_bus.keys import (
    AllowList,
    AllowListFile,
    FixedAllowList,
    create_key_pair,
    generate_key_pair,
    load_key_pair,
    write_allow_list,
)
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_bus.zmq_bus.sockets import new_context, parse_address, server_socket
from kv_bus.zmq_bus.zap import ZapHandler
from kv_core.ids import Incarnation, NodeId
from tests.bus.helpers_bus import (
    REGISTRY,
    A,
    B,
    C,
    Echo,
    Echoed,
    Listener,
    Noted,
    S,
    ZmqWorld,
    frame,
    is_alive,
    packet,
    run_zmq,
)


def test_a_key_outside_the_list_gets_nothing_through() -> None:
    async def scenario(world: ZmqWorld) -> None:
        await world.node(A)
        b = await world.node(B)
        stranger = world.dealer(generate_key_pair(A), world.keys[B].public_key)
        stranger.connect(world.address(B).requests)
        stranger.send(packet(frame(Echo(b""), A)))
        await world.until(lambda: b.stats().auth_refused == 1)
        await asyncio.sleep(0.1)
        assert b.stats().requests_received == 0
        await world.until(lambda: b.stats().refused.get("handshake", 0) >= 1)
        await is_alive(world)

    run_zmq(scenario)


def test_a_refused_key_that_keeps_trying_is_counted_each_time_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: ZmqWorld) -> None:
        b, keys = await world.node(B), generate_key_pair(A)
        for attempt in range(1, 4):
            stranger = world.dealer(keys, world.keys[B].public_key)
            stranger.connect(world.address(B).requests)
            await world.until(lambda wanted=attempt: b.stats().auth_refused == wanted)  # type: ignore[misc]
        assert len([record for record in caplog.records if "unknown key refused" in record.message]) == 1

    run_zmq(scenario)


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_a_client_without_curve_gets_nothing_through(mechanism: str) -> None:
    async def scenario(world: ZmqWorld) -> None:
        await world.node(A)
        b = await world.node(B)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        plain = context.socket(zmq.DEALER)
        try:
            if mechanism == "plain":
                plain.plain_username, plain.plain_password = b"admin", b"admin"
            plain.connect(world.address(B).requests)
            with contextlib.suppress(zmq.Again):  # refused so soon that nothing takes the message any more
                plain.send(packet(frame(Echo(b""), A)), zmq.NOBLOCK)
            await world.until(lambda: b.stats().refused.get("handshake", 0) >= 1)
            assert b.stats().requests_received == 0
            await is_alive(world)
        finally:
            plain.close(0)
            context.term()

    run_zmq(scenario)


def test_a_subscriber_without_an_admitted_key_hears_nothing() -> None:
    async def scenario(world: ZmqWorld) -> None:
        a, b = await world.node(A), await world.node(B)
        listener = Listener()
        a.subscribe(B, listener.on_event, listener.on_gap)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        spies = []
        try:
            for keys in (None, generate_key_pair(C)):
                spy = context.socket(zmq.SUB)
                spies.append(spy)
                spy.subscribe(b"")
                if keys is not None:
                    spy.curve_publickey, spy.curve_secretkey = keys.public_key.encode(), keys.secret_key.encode()
                    spy.curve_serverkey = world.keys[B].public_key.encode()
                spy.connect(world.address(B).events)
            await world.until(lambda: b.stats().auth_refused >= 1 and b.stats().refused.get("handshake", 0) >= 2)
            for number in range(50):
                b.publish(Noted(number))
                await asyncio.sleep(0.005)
            await world.until(lambda: len(listener.events) >= 10)
            assert not any(spy.poll(50) for spy in spies)
        finally:
            for spy in spies:
                spy.close(0)
            context.term()

    run_zmq(scenario)


def test_a_peer_with_another_key_than_the_list_says_is_refused_and_named() -> None:
    async def scenario(world: ZmqWorld) -> None:
        a = await world.node(A)
        world.keys[B] = generate_key_pair(B)
        world.public[B] = world.keys[B].public_key
        await world.node(B)
        listener = Listener()
        a.watch_peers(listener.peers.append)
        with pytest.raises(AuthRefused, match="another key than the allow-list says"):
            await a.request(B, Echo(b"for the real node-b only"), timeout_ns=20 * S)
        assert [type(event) for event in listener.peers] == [PeerRefused]

    run_zmq(scenario)


def test_a_peer_without_a_key_is_refused_without_a_connection() -> None:
    async def scenario(world: ZmqWorld) -> None:
        del world.public[B]
        a = await world.node(A)
        with pytest.raises(AuthRefused, match="its key is not in the allow-list"):
            await a.request(B, Echo(b""), timeout_ns=20 * S)

    run_zmq(scenario)


def test_a_key_and_its_owner_must_be_the_listed_ones() -> None:
    world = ZmqWorld()
    address, allow_list = world.address(A), AllowList("test", dict(world.public))
    for node_id, keys in ((A, generate_key_pair(A)), (A, world.keys[B]), (B, world.keys[A])):
        config = ZmqBusConfig(
            node_id, Incarnation(1), address.requests, address.events, keys, FixedAllowList(allow_list)
        )
        with pytest.raises(KeyFileError, match="is not the one the allow-list has"):
            ZmqBus(config, REGISTRY, stamper=LamportStamper(node_id))


def test_two_clusters_on_one_host_do_not_meet() -> None:
    async def scenario(world: ZmqWorld) -> None:
        a = await world.node(A)
        other = ZmqWorld()
        other.ports[B] = world.ports[B]  # somebody mixed up the addresses
        try:
            theirs = await other.node(B)
            with pytest.raises(AuthRefused):
                await a.request(B, Echo(b""), timeout_ns=20 * S)
            assert theirs.stats().requests_received == 0
            # Even with the same keys, the clusters' names keep them apart.
            await theirs.close()
            other.keys, other.public = world.keys, world.public
            theirs = other.make(B, Incarnation(1), REGISTRY, LamportStamper(B))
            renamed = AllowList("another", dict(world.public))
            address = world.address(B)
            config = ZmqBusConfig(
                B, Incarnation(1), address.requests, address.events, world.keys[B], FixedAllowList(renamed)
            )
            theirs = other.nodes[B] = ZmqBus(config, REGISTRY, stamper=LamportStamper(B))
            await theirs.start()
            await asyncio.sleep(0.3)
            with pytest.raises(WrongCluster, match="belongs to cluster another, this node to test"):
                await a.request(B, Echo(b""), timeout_ns=20 * S)
            # A connect that was given up half-way, on a slow machine, counts as a handshake that failed.
            refused = theirs.stats().refused
            assert refused["other_cluster"] == 1 and set(refused) <= {"other_cluster", "handshake"}
        finally:
            await other.close()

    run_zmq(scenario)


def test_a_server_socket_without_a_zap_handler_admits_nobody() -> None:
    keys, client_keys = generate_key_pair(A), generate_key_pair(B)
    context = new_context()
    address = ZmqWorld().address(A).requests
    server = server_socket(context, zmq.ROUTER, keys, "test", parse_address(address))
    client_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = client_context.socket(zmq.DEALER)
    try:
        server.bind(address)
        client.curve_serverkey = keys.public_key.encode()
        client.curve_publickey, client.curve_secretkey = (
            client_keys.public_key.encode(),
            client_keys.secret_key.encode(),
        )
        client.connect(address)
        client.send(b"anybody there?")
        assert not server.poll(400), "without a ZAP handler everybody was let in"
    finally:
        client.close(0)
        server.close(0)
        client_context.term()
        context.term()


def test_an_error_inside_the_zap_handler_denies_and_ends_the_bus_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ZapHandler, request: list[bytes]) -> tuple[str, str]:
        raise ZeroDivisionError("in the handler")

    async def scenario(world: ZmqWorld) -> None:
        a, b = await world.node(A), await world.node(B)
        running = asyncio.ensure_future(b.run())
        await asyncio.sleep(0)
        monkeypatch.setattr(ZapHandler, "_judge", broken)
        with pytest.raises(AuthRefused):
            await a.request(B, Echo(b""), timeout_ns=20 * S)
        with pytest.raises(ZeroDivisionError):
            await running
        assert b.stats().requests_received == 0 and b.stats().auth_admitted == 0

    run_zmq(scenario)


def test_a_list_in_a_file_is_followed_through_a_change_of_keys(tmp_path: Path) -> None:
    async def scenario(world: ZmqWorld) -> None:
        folders = {name: tmp_path / name for name in (A, B)}
        path = tmp_path / "cluster.keys"

        def write() -> None:
            keys = {name: load_key_pair(folder, name).public_key for name, folder in folders.items()}
            write_allow_list(path, AllowList("test", keys))

        async def begin(node: NodeId, incarnation: int) -> ZmqBus:
            address = world.address(node)
            config = ZmqBusConfig(
                node,
                Incarnation(incarnation),
                address.requests,
                address.events,
                load_key_pair(folders[node], node),
                AllowListFile(path),
            )
            bus = ZmqBus(config, REGISTRY, stamper=LamportStamper(node))
            bus.add_peer(world.address(B if node == A else A))
            bus.handle(Echo, lambda request: Echoed(request.message.body))
            await bus.start()
            world.nodes[node] = bus
            return bus

        for name, folder in folders.items():
            create_key_pair(folder, name)
        write()
        a, b = await begin(A, 1), await begin(B, 1)
        listener = Listener()
        a.subscribe(B, listener.on_event, listener.on_gap)
        await is_alive(world)
        await b.close()
        (folders[B] / f"{B}.key").unlink()
        create_key_pair(folders[B], B)
        write()
        b = await begin(B, 2)
        await asyncio.sleep(1.2)  # a looks at the file once a second
        await is_alive(world)
        await world.until(lambda: b.publish(Noted(1)) > 0 and any(e.incarnation == 2 for e in listener.events))

    run_zmq(scenario)
