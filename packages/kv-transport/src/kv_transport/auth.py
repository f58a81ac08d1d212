"""How a connection proves whose it is. Pure but for the nonces that its caller draws.

Each agent draws a secret when it starts. The key of the sessions that peer P opens to agent A is
`HMAC-SHA256(secret of A, P and P's incarnation)`; it travels to P inside A's metadata, over the authenticated bus, so
only A and this life of P know it. A connection then runs

    P -> A  Hello     who I am, whom I mean, a nonce, which link and stream this is
    A -> P  Challenge a nonce, and a proof that A knows the key     (or Denied, with the reason)
    P -> A  Proof     the same from P
    A -> P  Welcome

Both proofs cover both nonces and every field of Hello, in both directions of one key with distinct labels. Frames that
follow on a network carry a MAC with a counter under keys derived from the same transcript.
"""

import hashlib
import hmac
from typing import Final, TypeVar

import msgspec

from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.limits import MAX_NAME_BYTES
from kv_transport import limits
from kv_transport.errors import AuthenticationFailed, StaleIncarnation
from kv_transport.tickets import WIRE_VERSION
from kv_transport.types import PeerName

NONCE_BYTES: Final = 16
KEY_BYTES: Final = 32
MAC_BYTES: Final = 16


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First frame of the side that connects."""

    wire_version: int
    node: str
    incarnation: int
    target_node: str
    target_incarnation: int
    nonce: bytes
    link: bytes
    stream: int
    streams: int

    @property
    def name(self) -> PeerName:
        return PeerName(NodeId(self.node), Incarnation(self.incarnation))


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=2):
    nonce: bytes
    proof: bytes


class Denied(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Why not. A peer that only lacks the right incarnation is told so; the rest is kept short."""

    code: int
    fields: dict[str, str | int]


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=4):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The session stands."""


class SessionKeys(msgspec.Struct, frozen=True):
    """MAC keys of one connection, per direction."""

    to_owner: bytes
    to_initiator: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_hello: Final = msgspec.msgpack.Decoder(Hello)
_reply: Final = msgspec.msgpack.Decoder(Challenge | Denied)
_proof: Final = msgspec.msgpack.Decoder(Proof)
_welcome: Final = msgspec.msgpack.Decoder(Welcome | Denied)


def session_key(secret: bytes, peer: PeerName) -> bytes:
    """The key of the sessions that `peer` opens to the agent with this secret."""
    name = peer.node.encode()
    return hmac.digest(secret, len(name).to_bytes(2, "big") + name + peer.incarnation.to_bytes(8, "big"), "sha256")


def _mac(key: bytes, label: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, label + len(hello).to_bytes(4, "big") + hello + nonce, "sha256")


def _derive(key: bytes, hello: bytes, nonce: bytes) -> SessionKeys:
    return SessionKeys(
        to_owner=_mac(key, b"frames to owner", hello, nonce),
        to_initiator=_mac(key, b"frames to initiator", hello, nonce),
    )


class ClientHandshake:
    """The side that connects: `hello()`, then `challenged(reply)`, then `welcomed(reply)`."""

    def __init__(
        self, me: PeerName, target: PeerName, key: bytes, nonce: bytes, link: bytes, stream: int, streams: int
    ) -> None:
        self._target = target
        self._key = key
        self._hello = _encode(
            Hello(
                wire_version=WIRE_VERSION,
                node=me.node,
                incarnation=me.incarnation,
                target_node=target.node,
                target_incarnation=target.incarnation,
                nonce=nonce,
                link=link,
                stream=stream,
                streams=streams,
            )
        )
        self.keys: SessionKeys | None = None

    def hello(self) -> bytes:
        return self._hello

    def challenged(self, data: bytes) -> bytes:
        """The answer to the owner's reply.

        Raises:
            AuthenticationFailed, StaleIncarnation: the owner denied us, or is not the one we mean.
        """
        reply = _decoded(_reply, data)
        if isinstance(reply, Denied):
            raise _denial(reply)
        if not hmac.compare_digest(reply.proof, _mac(self._key, b"owner", self._hello, reply.nonce)):
            raise AuthenticationFailed(reason=f"{self._target} does not know the key it gave us")
        self.keys = _derive(self._key, self._hello, reply.nonce)
        return _encode(Proof(_mac(self._key, b"initiator", self._hello, reply.nonce)))

    def welcomed(self, data: bytes) -> SessionKeys:
        reply = _decoded(_welcome, data)
        if isinstance(reply, Denied):
            raise _denial(reply)
        assert self.keys is not None
        return self.keys


class ServerHandshake:
    """The side that owns the memory: `answer(hello)`, then `verify(proof)`."""

    def __init__(self, me: PeerName, secret: bytes, nonce: bytes) -> None:
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self._key = b""
        self._raw = b""
        self.hello: Hello | None = None

    def answer(self, data: bytes) -> bytes:
        """The challenge.

        Raises:
            AuthenticationFailed, StaleIncarnation: to be told to the peer by `deny`.
        """
        hello = _decoded(_hello, data)
        if hello.wire_version != WIRE_VERSION:
            raise AuthenticationFailed(reason=f"wire version {hello.wire_version}, ours is {WIRE_VERSION}")
        names_fit = max(len(hello.node.encode()), len(hello.target_node.encode())) <= MAX_NAME_BYTES
        numbers_fit = 0 <= hello.incarnation < 1 << 64 and 0 <= hello.stream < hello.streams <= 64
        if not names_fit or not numbers_fit or len(hello.nonce) != NONCE_BYTES or len(hello.link) != NONCE_BYTES:
            raise AuthenticationFailed(reason="malformed hello")
        if hello.target_node != self._me.node:
            raise AuthenticationFailed(reason=f"this is {self._me.node}, not {hello.target_node}")
        if hello.target_incarnation != self._me.incarnation:
            raise StaleIncarnation(
                peer=str(self._me.node), found=self._me.incarnation, expected=hello.target_incarnation
            )
        self.hello, self._raw = hello, data
        self._key = session_key(self._secret, hello.name)
        return _encode(Challenge(self._nonce, _mac(self._key, b"owner", data, self._nonce)))

    def verify(self, data: bytes) -> SessionKeys:
        """Check the peer's proof; send `welcome()` next.

        Raises:
            AuthenticationFailed: it does not know the key.
        """
        proof = _decoded(_proof, data)
        if not hmac.compare_digest(proof.proof, _mac(self._key, b"initiator", self._raw, self._nonce)):
            raise AuthenticationFailed(reason="wrong key")
        return _derive(self._key, self._raw, self._nonce)

    @staticmethod
    def welcome() -> bytes:
        return _encode(Welcome())

    @staticmethod
    def deny(error: KVError) -> bytes:
        fields = {name: value for name, value in error.fields.items() if isinstance(value, str | int)}
        return _encode(Denied(error.code, fields))


class FrameMac:
    """MACs of the frames of one direction: BLAKE2b over a counter and the frame's head, in order."""

    __slots__ = ("_count", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next(self, prefix: bytes, head: bytes | memoryview) -> bytes:
        """The MAC of the next frame."""
        mac = hashlib.blake2b(self._count.to_bytes(8, "big"), digest_size=MAC_BYTES, key=self._key)
        mac.update(prefix)
        mac.update(head)
        self._count += 1
        return mac.digest()


def _denial(denied: Denied) -> KVError:
    if denied.code == StaleIncarnation.code:
        return StaleIncarnation(**denied.fields)
    return AuthenticationFailed(reason=str(denied.fields.get("reason", "denied")))


_T = TypeVar("_T")


def _decoded(decoder: "msgspec.msgpack.Decoder[_T]", data: bytes) -> _T:
    if len(data) > limits.HANDSHAKE_BYTES_MAX:
        raise AuthenticationFailed(reason="handshake frame too long")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise AuthenticationFailed(reason="malformed handshake") from error
