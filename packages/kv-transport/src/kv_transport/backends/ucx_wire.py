"""One connection over UCX: an endpoint to the other side's worker, the frames on it, and what is under way.

UCX authenticates nobody and orders messages within an endpoint. So every frame carries a MAC with a counter, as over
tcp, under keys from the same handshake; and an endpoint is made only to an address that came with a MAC under the key
which the peer got in our metadata, because UCX parses addresses without mistrust.

    message = connection of the receiver (u64) | kind (u8) | body
    hello   = connection 0; body: connection of the sender (u64), MAC 32, address length (u16), address, auth's Hello
    reply   = body: connection of the sender (u64), auth's frame
    frame   = body: MAC 16, frame

UCX has no write with immediate: a unit is puts, a flush, then the frame with its header on the same endpoint.
"""

import ctypes
import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Final

from kv_transport import limits
from kv_transport.arena_layout import IntArray
from kv_transport.auth import MAC_BYTES, NONCE_BYTES, FrameMac, SessionKeys
from kv_transport.backends.ucp_api import UcxStatusError
from kv_transport.backends.ucx_engine import TAG, UcxEngine
from kv_transport.descriptors import Run
from kv_transport.errors import AuthenticationFailed, FrameRefused

_HEAD: Final = struct.Struct("<QB")
_ID: Final = struct.Struct("<Q")
_HELLO: Final = struct.Struct("<Q32sH")
HELLO_BYTES_MAX: Final = 4096 + limits.HANDSHAKE_BYTES_MAX


class Kind(IntEnum):
    """What a message is."""

    HANDSHAKE = 1
    FRAME = 2


def split(message: bytes) -> tuple[int, int, memoryview]:
    """Connection, kind, body. Raises `FrameRefused`."""
    if len(message) < _HEAD.size:
        raise FrameRefused(peer="unknown", reason=f"message of {len(message)} bytes over ucx")
    connection, kind = _HEAD.unpack_from(message)
    return connection, kind, memoryview(message)[_HEAD.size :]


def pack_reply(connection: int, data: bytes) -> bytes:
    """A step of the handshake, and which connection of ours it belongs to."""
    return _ID.pack(connection) + data


def unpack_reply(body: memoryview) -> tuple[int, bytes]:
    """Raises `AuthenticationFailed`."""
    if not _ID.size < len(body) <= _ID.size + limits.HANDSHAKE_BYTES_MAX:
        raise AuthenticationFailed(reason=f"handshake of {len(body)} bytes")
    return _ID.unpack_from(body)[0], bytes(body[_ID.size :])


def link_of(address: bytes, connection: int) -> bytes:
    """What ties a handshake to the address that its answers go to: the link id in `auth.Hello`."""
    return hashlib.blake2b(_ID.pack(connection) + address, digest_size=NONCE_BYTES).digest()


def pack_hello(key: bytes, connection: int, address: bytes, hello: bytes) -> bytes:
    mac = hmac.digest(key, b"ucx address" + _ID.pack(connection) + address, "sha256")
    return _HELLO.pack(connection, mac, len(address)) + address + hello


def unpack_hello(body: memoryview) -> tuple[int, bytes, bytes, bytes]:
    """Connection, MAC, address, hello. Raises `AuthenticationFailed`."""
    if not _HELLO.size < len(body) <= HELLO_BYTES_MAX:
        raise AuthenticationFailed(reason=f"hello of {len(body)} bytes")
    connection, mac, size = _HELLO.unpack_from(body)
    rest = bytes(body[_HELLO.size :])
    if not 0 < size < len(rest) or not connection:
        raise AuthenticationFailed(reason="malformed hello")
    return connection, mac, rest[:size], rest[size:]


def check_address(key: bytes, connection: int, mac: bytes, address: bytes) -> None:
    """Raises `AuthenticationFailed` unless the peer with that key sent this address."""
    if not hmac.compare_digest(mac, hmac.digest(key, b"ucx address" + _ID.pack(connection) + address, "sha256")):
        raise AuthenticationFailed(reason="wrong key")


class UcxConnection:
    """See the module. `on_end(cause)` is called in the engine's thread, once, when the endpoint breaks."""

    def __init__(self, engine: UcxEngine, ident: int, on_end: Callable[[str], None]) -> None:
        self.ident: Final = ident
        self.engine: Final = engine
        self._on_end = on_end
        self._endpoint = 0
        self._theirs = 0
        self._mac_out: FrameMac | None = None
        self._mac_in: FrameMac | None = None
        self._under_way = 0
        self._keys: list[int] = []
        self._closing: Callable[[], None] | None = None
        self._endpoint_open = False
        self._used = self._settled = False
        self._hurried = False
        self._ended = False

    # On the loop.

    def secure(self, keys: SessionKeys, *, initiator: bool) -> None:
        """From now on frames may be sent and opened."""
        send, receive = (keys.to_owner, keys.to_initiator) if initiator else (keys.to_initiator, keys.to_owner)
        self._mac_out, self._mac_in = FrameMac(send), FrameMac(receive)

    def open_frame(self, body: memoryview, peer: str) -> memoryview:
        """The frame of a message, in order. Raises `FrameRefused`."""
        if self._mac_in is None or len(body) <= MAC_BYTES:
            raise FrameRefused(peer=peer, reason="a frame before the handshake, or too short")
        frame = body[MAC_BYTES:]
        if not hmac.compare_digest(self._mac_in.next(b"", frame), body[:MAC_BYTES]):
            raise FrameRefused(peer=peer, reason="a frame's MAC is wrong")
        return frame

    # In the engine's thread.

    def open_to(self, address: bytes, theirs: int) -> None:
        """Make the endpoint. A failure ends in `on_end`."""
        self._theirs = theirs
        try:
            self._endpoint = self.engine.ucp.endpoint(address, self._failed)
        except UcxStatusError as error:
            self._end(str(error))
            return
        self._endpoint_open = True

    def answer_to(self, theirs: int) -> None:
        """The connection of the other side that messages go to."""
        self._theirs = theirs

    def handshake(self, body: bytes) -> None:
        self._message(_HEAD.pack(self._theirs, Kind.HANDSHAKE) + body)

    def send(self, frame: bytes) -> None:
        """Send a frame; one that cannot be sent ends the connection."""
        if self._mac_out is not None and self._usable:
            self._message(_HEAD.pack(self._theirs, Kind.FRAME) + self._mac_out.next(b"", frame) + frame)

    def put(self, runs: Sequence[Run], local: int, remote: int, key: int, done: Callable[[str | None], None]) -> None:
        """Write runs and flush; `done` when they are at the other side and ours is no longer read."""
        self._move(runs, self.engine.ucp.put, local, remote, key, done, flush=True)

    def put_summed(
        self, memory: memoryview, cells: IntArray, remote: int, key: int, done: Callable[[str | None], None]
    ) -> list[int]:
        """The same of cells (`ucx_io.put_summed`), whose CRC-64s it gives: right unless `done` tells of a failure."""
        if not self._usable:
            done("the connection is over")
            return []
        ucp = self.engine.ucp
        checks, put, failure = ucp.put_summed(self._endpoint, memory, cells, remote, key)
        requests: list[int | None] = list(put)
        if failure is None:
            try:
                requests.append(ucp.flush(self._endpoint))
            except UcxStatusError as error:
                failure = str(error)
        if failure is not None:
            self._end(failure)
        self._watch(requests, done, error=failure)
        return checks

    def get(self, runs: Sequence[Run], local: int, remote: int, key: int, done: Callable[[str | None], None]) -> None:
        """Read runs; `done` when they are here."""
        self._move(runs, self.engine.ucp.get, local, remote, key, done, flush=False)

    def unpack_key(self, key: bytes) -> int:
        """A peer's key, for `put` and `get`. Raises `FrameRefused`."""
        if not self._usable:
            raise FrameRefused(peer="", reason="the connection is over")
        try:
            remote = self.engine.ucp.unpack_key(self._endpoint, key)
        except UcxStatusError as error:
            raise FrameRefused(peer="", reason=f"a remote key that is none: {error}") from error
        self._keys.append(remote)
        return remote

    def close(self, done: Callable[[], None], *, polite: bool) -> None:
        """Close the endpoint; `done` when nothing of this connection is under way in either direction.

        Args:
            polite: let what was sent arrive first; `hurry` ends that.
        """
        self._closing = done
        if polite and self._usable:
            try:
                self._watch([self.engine.ucp.flush(self._endpoint)], lambda error: self.hurry())
                return
            except UcxStatusError:
                pass
        self.hurry()

    def hurry(self) -> None:
        """Close whatever is under way. Idempotent.

        Not before the first operation on the endpoint is over, well or badly: an endpoint that is closed by force while
        it still connects leaves libucx 1.21 with a cancellation on a connection that may fail next. One that is still
        connecting when the worker ends is left to the worker, which takes its endpoints down in an order of its own.
        """
        if self._closing is None:
            return
        self._hurried = True
        connecting = self._used and not self._settled and not self._ended
        if self._endpoint_open and not connecting:
            self._endpoint_open = False
            try:
                self._watch([self.engine.ucp.close_endpoint(self._endpoint)], lambda error: None)
            except UcxStatusError:
                pass  # it was broken beyond closing
        self._finish_if_idle()

    @property
    def _usable(self) -> bool:
        return self._endpoint_open and not self._ended

    def _message(self, data: bytes) -> None:
        if not self._usable:
            return
        buffer = ctypes.create_string_buffer(data, len(data))
        try:
            self._watch([self.engine.ucp.send(self._endpoint, buffer, TAG)], self._sent, buffer)
        except UcxStatusError as error:
            self._end(str(error))

    def _sent(self, error: str | None) -> None:
        if error is not None:
            self._end(error)

    def _move(
        self,
        runs: Sequence[Run],
        operation: Callable[[int, int, int, int, int], int | None],
        local: int,
        remote: int,
        key: int,
        done: Callable[[str | None], None],
        *,
        flush: bool,
    ) -> None:
        if not self._usable:
            done("the connection is over")
            return
        requests: list[int | None] = []
        failure: str | None = None
        try:
            for run in runs:
                where = self._endpoint, local + run.local, run.nbytes, remote + run.remote, key
                requests.append(operation(*where))
            if flush:
                requests.append(self.engine.ucp.flush(self._endpoint))
        except UcxStatusError as error:
            failure = str(error)
            self._end(failure)
        self._watch(requests, done, error=failure)

    def _watch(
        self,
        requests: list[int | None],
        done: Callable[[str | None], None],
        keep: object = None,
        error: str | None = None,
    ) -> None:
        self._under_way += 1
        self._used = True
        self.engine.watch(requests, partial(self._over, done), keep, error)

    def _over(self, done: Callable[[str | None], None], error: str | None) -> None:
        self._under_way -= 1
        self._settled = True
        done(error)
        if self._hurried:
            self.hurry()
        else:
            self._finish_if_idle()

    def _failed(self, status: int) -> None:
        self._end(self.engine.ucp.text(status))
        if self._hurried:
            self.engine.call(self.hurry)  # UCX is calling us: later

    def _end(self, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._on_end(cause)

    def _finish_if_idle(self) -> None:
        if self._closing is None or self._endpoint_open or self._under_way:
            return
        for key in self._keys:
            self.engine.ucp.destroy_key(key)
        self._keys.clear()
        self.engine.ucp.forget_endpoint(self._endpoint)
        done, self._closing = self._closing, None
        done()
