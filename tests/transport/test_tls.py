"""TLS under tcp: all goes through it, nothing goes without it, and only to the certificate that was announced."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_core.ids import RequestId
from kv_transport import TransportConfig
from kv_transport.config import TlsConfig
from kv_transport.errors import AuthenticationFailed, BackendUnavailable, ConnectionLost, NoTransport
from tests.transport.helpers_proxy import proxied
from tests.transport.helpers_tls import OPENSSL, authority, certificate, openssl
from tests.transport.helpers_transport import LARGE, Node, eventually, introduce, node

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates, and is not on this machine")
REQUEST = RequestId("request-1")
COUNT = 4


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsConfig, TlsConfig, TlsConfig]:
    """Two nodes of one authority, and one of another."""
    base = tmp_path_factory.mktemp("tls")
    ours, other = authority(base / "ours"), authority(base / "other")
    return certificate(ours, "one"), certificate(ours, "two"), certificate(other, "stranger")


def settings(tls: TlsConfig | None) -> TransportConfig:
    return TransportConfig(transport="tcp", tls=tls, connect_timeout_ms=3_000)


@contextlib.asynccontextmanager
async def pair(one: TlsConfig | None, two: TlsConfig | None) -> AsyncIterator[tuple[Node, Node]]:
    async with (
        node("prefill", settings(one), geometry=LARGE, slots=8) as sender,
        node("decode", settings(two), geometry=LARGE, slots=8) as receiver,
    ):
        introduce(sender, receiver)
        yield sender, receiver
    assert not any(thread.name.startswith("kv-") for thread in threading.enumerate())


async def hand_over(sender: Node, receiver: Node) -> bool:
    source, target = sender.filled(COUNT, seed=1), receiver.blocks(COUNT)
    grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=COUNT * LARGE.block_size)
    inbound = receiver.engine.expect(REQUEST, grant)
    try:
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(LARGE.num_layers):
            handover.submit(layer, source)
        await handover.finish(20_000)
        await inbound.done()
    finally:
        inbound.cancel()
        await inbound.released()
    return sender.content(source) == receiver.content(target)


async def test_every_byte_arrives_and_none_of_them_is_seen_on_the_wire(
    authorities: tuple[TlsConfig, TlsConfig, TlsConfig],
) -> None:
    one, two, _ = authorities
    seen = bytearray()
    async with pair(one, two) as (sender, receiver):
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        (address,) = metadata.addresses
        mark, _, where = address.address.rpartition(b"@")
        plain = msgspec.structs.replace(address, address=where)

        def watch(offset: int, piece: bytearray) -> None:
            seen.extend(piece)

        async with proxied(msgspec.structs.replace(metadata, addresses=[plain]), watch) as through:
            (proxy,) = through.addresses
            marked = msgspec.structs.replace(proxy, address=mark + b"@" + proxy.address)
            sender.agent.add_remote_agent(msgspec.structs.replace(through, addresses=[marked]))
            assert await hand_over(sender, receiver)
            held = sender.filled(2, seed=3)
            lease = sender.engine.lease_reads(REQUEST, held, seq_start=0, seq_end=2 * LARGE.block_size, lease_ms=60_000)
            into = receiver.blocks(2)
            await receiver.engine.fetch(lease, into).wait(20_000)
            assert receiver.content(into) == sender.content(held)
            await sender.agent.remove_remote_agent(receiver.agent.name.node)
        assert sender.agent.inventory().of("transport")[0].state == "ready, with TLS"
    payload = np.random.default_rng(1).bytes(LARGE.slot_layer_nbytes)  # the first cell that was sent
    assert len(seen) > COUNT * LARGE.block_nbytes
    assert payload[:64] not in seen and b"decode" not in seen


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_there_is_no_plaintext_to_fall_back_to(
    authorities: tuple[TlsConfig, TlsConfig, TlsConfig], who: str
) -> None:
    one, two, _ = authorities
    async with pair(one if who == "sender" else None, two if who == "receiver" else None) as (sender, receiver):
        with pytest.raises(NoTransport, match="TLS"):
            await hand_over(sender, receiver)
        # Nor by leaving out of the metadata what it says: the side with TLS speaks nothing else.
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        (address,) = metadata.addresses
        lie = address.address.rpartition(b"@")[2] if who == "receiver" else b"tls+" + b"0" * 64 + b"@" + address.address
        forged = msgspec.structs.replace(metadata, addresses=[msgspec.structs.replace(address, address=lie)])
        sender.agent.add_remote_agent(forged)
        with pytest.raises((AuthenticationFailed, ConnectionLost)):
            await hand_over(sender, receiver)
        assert receiver.agent.inventory().of("session") == ()


async def test_a_certificate_of_another_authority_is_refused_by_both_sides(
    authorities: tuple[TlsConfig, TlsConfig, TlsConfig],
) -> None:
    one, two, stranger = authorities
    for left, right in ((stranger, two), (one, stranger)):
        async with pair(left, right) as (sender, receiver):
            with pytest.raises((AuthenticationFailed, ConnectionLost)):
                await hand_over(sender, receiver)
            assert receiver.agent.inventory().of("session") == ()


async def test_another_node_of_the_same_authority_cannot_stand_in(
    authorities: tuple[TlsConfig, TlsConfig, TlsConfig],
) -> None:
    one, two, _ = authorities
    async with pair(one, two) as (sender, receiver), node("third", settings(one)) as third:
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        (expected,), (actual,) = (
            metadata.addresses,
            third.agent.get_agent_metadata(name.node, name.incarnation).addresses,
        )
        mixed = expected.address.rpartition(b"@")[0] + b"@" + actual.address.rpartition(b"@")[2]
        forged = msgspec.structs.replace(metadata, addresses=[msgspec.structs.replace(expected, address=mixed)])
        sender.agent.add_remote_agent(forged)
        with pytest.raises(AuthenticationFailed, match="not the one"):
            await hand_over(sender, receiver)


async def test_a_peer_that_goes_away_is_seen_through_tls(authorities: tuple[TlsConfig, TlsConfig, TlsConfig]) -> None:
    one, two, _ = authorities
    async with pair(one, two) as (sender, receiver):
        assert await hand_over(sender, receiver)
        await receiver.agent.close()
        await eventually(lambda: sender.agent.inventory().of("link") == ())


async def test_files_that_are_not_what_they_should_be_are_said_at_the_start(
    authorities: tuple[TlsConfig, TlsConfig, TlsConfig], tmp_path: Path
) -> None:
    one, two, _ = authorities
    (tmp_path / "empty.pem").write_text("")
    locked = tmp_path / "locked.key"
    openssl(tmp_path, "pkey", "-in", str(one.key), "-aes128", "-passout", "pass:secret", "-out", str(locked))
    for tls, named in (
        (TlsConfig(tmp_path / "none.pem", one.key, one.ca), "none.pem"),
        (TlsConfig(one.certificate, tmp_path / "none.key", one.ca), "none.key"),
        (TlsConfig(one.certificate, two.key, one.ca), two.key.name),
        (TlsConfig(one.certificate, one.key, tmp_path / "empty.pem"), "empty.pem"),
        # Nobody is asked for a password: a service has no terminal.
        (TlsConfig(one.certificate, locked, one.ca), "locked.key"),
    ):
        with pytest.raises(BackendUnavailable, match=f"TLS: .*{named}"):
            async with node("alone", settings(tls)):
                await asyncio.sleep(0)
