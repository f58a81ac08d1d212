"""Connections prove whose they are: anything forged, changed, repeated or late gets no session."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_transport import TransferAgent, limits, stream_io
from kv_transport.auth import KEY_BYTES, NONCE_BYTES, ClientHandshake, FrameMac, ServerHandshake, session_key
from kv_transport.config import TransportName
from kv_transport.errors import AuthenticationFailed, ConnectionLost, FrameRefused, StaleIncarnation
from kv_transport.frames import decode_from_initiator, decode_from_owner
from kv_transport.types import PeerName
from tests.transport.helpers_transport import Node, eventually, introduce, node, pair
from tests.transport.helpers_transport import config as config_of

OWNER, PEER = PeerName(NodeId("decode"), Incarnation(7)), PeerName(NodeId("prefill"), Incarnation(3))
SECRET = bytes(range(KEY_BYTES))
LINK = b"l" * NONCE_BYTES


def client(key: bytes | None = None, target: PeerName = OWNER, me: PeerName = PEER) -> ClientHandshake:
    return ClientHandshake(me, target, key or session_key(SECRET, me), b"c" * NONCE_BYTES, LINK, 0, 1)


def server() -> ServerHandshake:
    return ServerHandshake(OWNER, SECRET, b"s" * NONCE_BYTES)


def test_both_sides_end_with_the_same_keys_one_per_direction() -> None:
    one, other = client(), server()
    proof = one.challenged(other.answer(one.hello()))
    theirs = other.verify(proof)
    mine = one.welcomed(other.welcome())
    assert mine == theirs and mine.to_owner != mine.to_initiator
    assert other.hello is not None and other.hello.name == PEER


@given(st.sampled_from(["hello", "challenge", "proof", "welcome"]), st.integers(0, 400), st.integers(1, 255))
def test_no_changed_byte_of_a_handshake_goes_unnoticed(which: str, at: int, flip: int) -> None:
    """Whoever changes one byte on the way: the two sides never both end with a session."""

    def changed(name: str, message: bytes) -> bytes:
        if name != which:
            return message
        data = bytearray(message)
        data[at % len(data)] ^= flip
        return bytes(data)

    one, other = client(), server()
    with pytest.raises((AuthenticationFailed, StaleIncarnation)):
        proof = one.challenged(changed("challenge", other.answer(changed("hello", one.hello()))))
        other.verify(changed("proof", proof))
        one.welcomed(changed("welcome", other.welcome()))


@given(st.binary(max_size=200))
def test_anything_that_is_no_handshake_is_refused_as_such(data: bytes) -> None:
    with pytest.raises((AuthenticationFailed, StaleIncarnation)):
        server().answer(data)
    with pytest.raises((AuthenticationFailed, StaleIncarnation)):
        client().challenged(data)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_or_a_typed_error(data: bytes) -> None:
    for decode in (decode_from_initiator, decode_from_owner):
        with contextlib.suppress(FrameRefused):
            assert isinstance(decode(data, "p"), msgspec.Struct)


def test_a_proof_is_worth_nothing_in_another_handshake() -> None:
    one, other = client(), server()
    proof = one.challenged(other.answer(one.hello()))
    later = ServerHandshake(OWNER, SECRET, b"t" * NONCE_BYTES)
    later.answer(one.hello())
    with pytest.raises(AuthenticationFailed, match="wrong key"):
        later.verify(proof)


def test_the_proof_of_one_side_is_not_the_proof_of_the_other() -> None:
    """Sending the owner's own proof back to it proves nothing."""
    one, other = client(), server()
    challenge = msgspec.msgpack.decode(other.answer(one.hello()))
    with pytest.raises(AuthenticationFailed, match="wrong key"):
        other.verify(msgspec.msgpack.encode([4, challenge[2]]))


@pytest.mark.parametrize(
    ("key", "me"),
    [
        (bytes(KEY_BYTES), PEER),
        (session_key(SECRET, PEER), PeerName(NodeId("prefill"), Incarnation(4))),
        (session_key(SECRET, PEER), PeerName(NodeId("another"), Incarnation(3))),
    ],
    ids=["a key of its own", "an earlier life's key", "another node's key"],
)
def test_a_wrong_key_is_found_by_either_side(key: bytes, me: PeerName) -> None:
    one, other = client(key, me=me), server()
    challenge = other.answer(one.hello())
    with pytest.raises(AuthenticationFailed, match="does not know the key"):
        one.challenged(challenge)
    with pytest.raises(AuthenticationFailed, match="wrong key"):
        other.verify(msgspec.msgpack.encode([4, session_key(key, me)]))


def test_who_means_another_node_or_life_is_told_so() -> None:
    with pytest.raises(AuthenticationFailed, match="this is decode, not store"):
        server().answer(client(target=PeerName(NodeId("store"), Incarnation(7))).hello())
    with pytest.raises(StaleIncarnation) as caught:
        server().answer(client(target=PeerName(NodeId("decode"), Incarnation(6))).hello())
    denied = server().deny(caught.value)
    with pytest.raises(StaleIncarnation):
        client().challenged(denied)


def test_a_frame_mac_counts() -> None:
    """The same frame twice, or two frames in another order, have other MACs."""
    sender, receiver = FrameMac(b"k"), FrameMac(b"k")
    macs = [sender.next(b"prefix", b"head") for _ in range(3)]
    assert len(set(macs)) == 3
    assert [receiver.next(b"prefix", b"head") for _ in range(3)] == macs
    assert FrameMac(b"k").next(b"prefixh", b"ead") == FrameMac(b"k").next(b"prefix", b"head")  # lengths are fixed


# Over real sockets.


def listening(agent: TransferAgent) -> tuple[str, int]:
    metadata = agent.get_agent_metadata(NodeId("x"), Incarnation(1))
    host, _, port = next(item.address for item in metadata.addresses if item.scheme == "tcp").decode().rpartition(":")
    return host, int(port)


async def still_works(sender: Node, receiver: Node) -> None:
    await sender.agent.send_notif(receiver.agent.name.node, b"hello")
    async for notif in receiver.agent.notifs():
        assert notif.payload == b"hello"
        return


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x00", b"\x00\x00", b"\xff\xff" + b"x" * 2000, b"\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["nothing", "half a length", "no length", "too long", "no handshake", "http"],
)
async def test_a_stranger_on_the_port_gets_nothing_and_harms_nobody(tmp_path: Path, sent: bytes) -> None:
    async with pair("tcp", tmp_path, connect_timeout_ms=300) as (sender, receiver):
        reader, writer = await asyncio.open_connection(*listening(receiver.agent))
        writer.write(sent)
        await asyncio.wait_for(still_works(sender, receiver), 10)  # while the stranger is at it
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 10)
            assert len(answer) < 200  # a refusal at most, and then the end
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert [item.owner for item in receiver.agent.inventory().of("session")] == ["prefill#1"]


async def test_connections_that_prove_nothing_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PENDING_HANDSHAKES_MAX", 4)
    async with node("decode", config_of("tcp", tmp_path, connect_timeout_ms=60_000)) as me:
        loop = asyncio.get_running_loop()
        socks = [socket.create_connection(listening(me.agent)) for _ in range(4)]
        await asyncio.sleep(0.05)
        with socket.create_connection(listening(me.agent)) as fifth:
            fifth.setblocking(False)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(loop.sock_recv(fifth, 1), 10) == b""  # closed at once
        for sock in socks:
            sock.close()


async def test_a_peer_with_a_wrong_key_is_refused_and_told(transport: TransportName, tmp_path: Path) -> None:
    settings = config_of(transport, tmp_path / "sockets")
    async with node("prefill", settings) as sender, node("decode", settings) as receiver:
        introduce(receiver, sender)
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        sender.agent.add_remote_agent(msgspec.structs.replace(metadata, session_key=bytes(KEY_BYTES)))
        with pytest.raises(KVError) as caught:
            await sender.agent.send_notif(receiver.agent.name.node, b"x")
        assert "does not know the key" in str(caught.value)
        assert receiver.agent.inventory().of("session") == ()


async def test_frames_of_an_open_session_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever repeats a recorded frame on the connection ends it: the counter in the MAC has moved on."""
    async with pair("tcp", tmp_path, tcp_streams=1) as (sender, receiver):
        await still_works(sender, receiver)
        (link,) = sender.agent.peer(receiver.agent.name.node).links
        stream = next(iter(link._by_stream))  # type: ignore[attr-defined]
        sent: list[bytes] = []
        send = stream_io.send

        def record(fd: int, others: int, head: bytes, *rest: Any) -> bool:
            if fd == stream.fileno():
                sent.append(head)
            return send(fd, others, head, *rest)

        monkeypatch.setattr(stream_io, "send", record)
        await still_works(sender, receiver)
        os.write(stream.fileno(), sent[-1])
        await eventually(lambda: link.lost is not None)
        assert isinstance(link.lost, ConnectionLost)
        await still_works(sender, receiver)  # by a new connection
        assert not receiver.agent._notifs
