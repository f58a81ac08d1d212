"""Decides which connections libzmq may accept: ZAP (ZeroMQ RFC 27), answered on the loop.

A1: anything but a well-formed CURVE request for our domain with a key of the allow-list is denied, errors included.
A2: the user id of an admitted connection names the node and the key, so that a key that left the list is known by it.
A3: bound before any server socket exists. A ROUTER, since a REP that misses one answer never takes another request.
"""

import logging
from collections.abc import Callable
from typing import Final

import zmq
import zmq.utils.z85

from kv_bus.keys import AllowListSource, fingerprint
from kv_bus.zmq_bus.pump import Pump

_log = logging.getLogger(__name__)

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_KEY_BYTES: Final = 32
_TOLD_MAX: Final = 1024
"""Refused keys remembered as reported; then they are reported again."""


def user_id(node_id: str, public_key: str) -> str:
    """The ZAP user id of an admitted connection. Node names hold no blank."""
    return f"{node_id} {public_key}"


class ZapHandler:
    """Answers every handshake of one context.

    Args:
        context: whose handshakes.
        allow_list: the keys to admit.
        keys_changed: told when looking a key up showed that the list is another one now.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allow_list: AllowListSource,
        keys_changed: Callable[[], None],
        monotonic_ns: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._allow_list = allow_list
        self._keys_changed = keys_changed
        self.admitted = 0
        self.denied = 0
        self._told: dict[str, None] = {}
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        self._pump = Pump(self._socket, self._read_some, monotonic_ns, failed)

    def close(self) -> None:
        self._pump.stop()
        self._socket.close(0)

    def _read_some(self, limit: int) -> int:
        for done in range(limit):
            if not self._read_one():
                return done
        return limit

    def _read_one(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        # [route, "", version, request id, domain, address, identity, mechanism, credentials...]
        if len(frames) < 4:
            self.denied += 1
            return True
        user, reason = "", "malformed request"
        try:
            user, reason = self._judge(frames[2:])
        finally:
            # Whatever happened above, libzmq gets an answer, and it is no unless we said yes (A1).
            self.admitted += bool(user)
            self.denied += not user
            status = b"200" if user else b"400"
            answer = [frames[0], b"", _VERSION, frames[3], status, reason.encode(), user.encode(), b""]
            self._socket.send_multipart(answer, zmq.NOBLOCK)
            self._pump.poke()
        return True

    def _judge(self, request: list[bytes]) -> tuple[str, str]:
        """The user id to admit the request under, or nothing and the reason."""
        if len(request) != 7 or request[0] != _VERSION:
            return "", "malformed request"
        _, _, domain, address, _, mechanism, credentials = request
        if mechanism != b"CURVE" or len(credentials) != _KEY_BYTES:
            return "", "only CURVE is accepted"
        if domain.decode("utf-8", "replace") != self._allow_list.current.cluster:
            return "", "another cluster"
        public_key = zmq.utils.z85.encode(credentials).decode()
        owner = self._allow_list.current.owners.get(public_key)
        if owner is None and self._allow_list.refresh():
            self._keys_changed()
            owner = self._allow_list.current.owners.get(public_key)
        if owner is None:
            self._tell(public_key, address)
            return "", "unknown key"
        return user_id(owner, public_key), "admitted"

    def _tell(self, public_key: str, address: bytes) -> None:
        """Say once that a key is refused: whoever has it may try as often as he likes, and is only counted."""
        if public_key in self._told:
            return
        if len(self._told) >= _TOLD_MAX:
            self._told.clear()
        self._told[public_key] = None
        where = address.decode("ascii", "replace")
        _log.warning("unknown key refused key=%s address=%s", fingerprint(public_key), where)
