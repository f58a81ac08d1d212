"""Optional TLS under `tcp`: mutual, 1.3 and newer, never with plaintext to fall back to.

A pump between each network connection and a socket pair encrypts and decrypts in a thread of its own; streams keep
the plain end and know nothing of it. Both sides show certificates of one authority. That the certificate is the very
one of the peer is known by its fingerprint, which travels in the metadata over the bus; names in certificates are not
looked at.
"""

import asyncio
import contextlib
import hashlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kv_transport.config import TlsConfig
from kv_transport.errors import AuthenticationFailed, BackendUnavailable

_CHUNK: Final = 256 * 1024
_FAREWELL_MS: Final = 1_000
"""How long what was sent may take to get out after its end was closed."""


class TlsLayer:
    """The contexts of one agent, and the pumps of its connections."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises `BackendUnavailable` for files that are missing or are not what they should be."""
        try:
            for path in (config.certificate, config.key, config.ca):
                path.open("rb").close()  # OpenSSL's own errors name no file
            self._server = _context(ssl.PROTOCOL_TLS_SERVER, config)
            self._client = _context(ssl.PROTOCOL_TLS_CLIENT, config)
            self.fingerprint: Final = _fingerprint(_first_certificate(config.certificate))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise BackendUnavailable(scheme="tcp", reason=f"TLS: {error}") from error
        self._pumps: dict[_Pump, None] = {}

    async def connect(self, sock: socket.socket, fingerprint: str) -> socket.socket:
        """The plain end of a connection to the peer whose certificate has that fingerprint; takes `sock` over.

        Raises:
            AuthenticationFailed: it is somebody else, or does not accept us.
            OSError: the connection broke.
        """
        return await self._open(sock, self._client, fingerprint)

    async def accept(self, sock: socket.socket) -> socket.socket:
        """The same for a connection that a peer has opened."""
        return await self._open(sock, self._server, None)

    def close(self) -> None:
        """Wait for the pumps, whose plain ends are closed by now."""
        for pump in list(self._pumps):
            pump.join(2 * _FAREWELL_MS / 1000)
        self._pumps.clear()

    async def _open(self, sock: socket.socket, context: ssl.SSLContext, fingerprint: str | None) -> socket.socket:
        loop = asyncio.get_running_loop()
        pump = _Pump(sock, context)
        await pump.shake(loop)
        if fingerprint is not None and pump.peer_fingerprint() != fingerprint:
            raise AuthenticationFailed(reason="TLS: the certificate is not the one that the peer has announced")
        for over in [one for one in self._pumps if not one.is_alive()]:
            del self._pumps[over]
        plain = pump.begin()
        self._pumps[pump] = None
        return plain


def _context(protocol: int, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the fingerprint says more
    context.verify_mode = ssl.CERT_REQUIRED
    # Without a password given, OpenSSL would ask for that of an encrypted key where a service has no terminal.
    with _told_of(config.certificate, config.key):
        context.load_cert_chain(config.certificate, config.key, password="")
    with _told_of(config.ca):
        context.load_verify_locations(config.ca)
    return context


@contextlib.contextmanager
def _told_of(*paths: Path) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise ValueError(f"{', '.join(map(str, paths))}: {error.reason or error}") from error


def _first_certificate(path: Path) -> bytes:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = path.read_text(encoding="ascii")
    return ssl.PEM_cert_to_DER_cert(text[text.index(begin) : text.index(end) + len(end)])


def _fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(certificate).hexdigest()


class _Pump(threading.Thread):
    """One connection."""

    def __init__(self, net: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(name="kv-tls", daemon=True)
        self._net = net
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=context.protocol == ssl.PROTOCOL_TLS_SERVER
        )
        self._plain: socket.socket | None = None
        self._net_over = self._plain_over = False

    async def shake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises `AuthenticationFailed`, `OSError`."""
        while True:
            failure: ssl.SSLError | None = None
            done = False
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                failure = error
            if self._outgoing.pending:
                await loop.sock_sendall(self._net, self._outgoing.read())
            if failure is not None:
                raise AuthenticationFailed(reason=f"TLS: {failure.reason or failure}") from failure
            if done:
                return
            data = await loop.sock_recv(self._net, _CHUNK)
            if not data:
                raise AuthenticationFailed(reason="TLS: connection closed during the handshake")
            self._incoming.write(data)

    def peer_fingerprint(self) -> str:
        return _fingerprint(self._tls.getpeercert(binary_form=True) or b"")

    def begin(self) -> socket.socket:
        """Start; the end that speaks plain."""
        theirs, self._plain = socket.socketpair()
        for one in (theirs, self._plain):
            one.setblocking(False)
        self.start()
        return theirs

    def run(self) -> None:
        assert self._plain is not None
        try:
            self._pump(self._plain)
        except OSError:
            pass  # one end is gone: the other one learns it by being closed
        finally:
            self._plain.close()
            self._net.close()

    def _pump(self, plain: socket.socket) -> None:
        """What has been taken from one side must have gone to the other before more is taken: that bounds memory."""
        to_net, to_plain = memoryview(b""), memoryview(b"")
        while True:
            if not to_net:
                to_net = memoryview(self._outgoing.read(_CHUNK))
            if not to_plain:
                to_plain = memoryview(self._decrypted())
            if (self._net_over and not to_plain) or (self._plain_over and not to_net):
                return
            poll = select.poll()
            _watch(poll, self._net, read=not to_plain and not self._net_over, write=bool(to_net))
            _watch(poll, plain, read=not to_net and not self._plain_over, write=bool(to_plain))
            ready = dict(poll.poll(_FAREWELL_MS if self._plain_over else None))
            if not ready and self._plain_over:
                return
            net, local = ready.get(self._net.fileno(), 0), ready.get(plain.fileno(), 0)
            if to_net and net & ~select.POLLIN:
                to_net = to_net[self._net.send(to_net) :]
            if not to_plain and net & ~select.POLLOUT and not self._net_over:
                self._take_from_net()
            if to_plain and local & ~select.POLLIN:
                to_plain = to_plain[plain.send(to_plain) :]
            elif local & ~select.POLLOUT and not self._plain_over and not self._outgoing.pending:
                self._take_from_plain(plain)

    def _decrypted(self) -> bytes:
        try:
            return self._tls.read(_CHUNK)
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError:
            # The end of it, said by the peer or not; or bytes that are not the peer's.
            self._net_over = True
            return b""

    def _take_from_net(self) -> None:
        data = self._net.recv(_CHUNK)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def _take_from_plain(self, plain: socket.socket) -> None:
        data = plain.recv(_CHUNK)
        if data:
            self._tls.write(data)
            return
        self._plain_over = True
        try:
            self._tls.unwrap()  # says goodbye; the answer is not waited for
        except ssl.SSLError:
            pass


def _watch(poll: "select.poll", sock: socket.socket, *, read: bool, write: bool) -> None:
    """Not at all where nothing is wanted: a hang-up would be told for ever."""
    events = (select.POLLIN if read else 0) | (select.POLLOUT if write else 0)
    if events:
        poll.register(sock.fileno(), events)
