"""TLS of both sides' certificates: beneath HTTP between gateway and workers, and beneath frames.

Within frames' TLS the peers prove who they are as without it: there TLS encrypts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from baton.auth.certificates import Identity, IdentityRole
from baton.auth.credentials import RELOAD_INTERVAL_S, Credentials, file_version
from baton.errors import AuthenticationError, ConfigError
from baton.protocol.worker_http import HEALTH_PATH, METRICS_PATH

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from baton.clock import Clock

log = logging.getLogger(__name__)

MAX_BUFFER_BYTES: Final = 64 << 10
"""Of one OpenSSL call, which makes records of 16 KiB."""
MONITOR_PATHS: Final = frozenset({HEALTH_PATH, METRICS_PATH})


class WaitsForPeerError(BlockingIOError):
    """Nothing can be sent before something was read."""


class TlsSocket(ssl.SSLSocket):
    """A non-blocking TLS socket, used like a plain one; reading and sending do the TLS handshake.

    It raises BlockingIOError where nothing can be done now (`WaitsForPeerError` where being ready
    to send changes nothing), AuthenticationError where the peer cannot be trusted, and OSError
    where the connection broke.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """See `socket.recv`; at most one record."""
        del flags
        try:
            return super().recv(buflen)
        except ssl.SSLError as exc:
            raise _translate(exc) from exc

    def send(self, data: memoryview, flags: int = 0) -> int:  # type: ignore[override]
        """See `socket.send`: as much as can be sent now; no flags."""
        del flags
        return self.sendmsg([data])

    def sendmsg(  # type: ignore[override]  # no ancillary data
        self, buffers: Sequence[memoryview]
    ) -> int:
        """See `socket.sendmsg`: as much as can be sent now, which may end anywhere."""
        num_sent = 0
        for buffer in buffers:
            for first in range(0, len(buffer), MAX_BUFFER_BYTES):
                piece = buffer[first : first + MAX_BUFFER_BYTES]
                while piece:
                    num_taken = self._try_send(piece, num_sent)
                    if num_taken == 0:
                        return num_sent
                    num_sent += num_taken
                    piece = piece[num_taken:]
        return num_sent

    def recvmsg_into(  # type: ignore[override]  # no ancillary data
        self, buffers: Sequence[memoryview]
    ) -> tuple[int, list[object], int, None]:
        """See `socket.recvmsg_into`: into the first buffers, as many as there are bytes for."""
        num_received = 0
        for buffer in buffers:
            rest = buffer
            while rest:
                try:
                    num_bytes = super().recv_into(rest)
                except ssl.SSLError as exc:
                    if num_received:
                        return num_received, [], 0, None
                    raise _translate(exc) from exc
                if num_bytes == 0:
                    return num_received, [], 0, None
                num_received += num_bytes
                rest = rest[num_bytes:]
        return num_received, [], 0, None

    def _try_send(self, piece: memoryview, num_sent: int) -> int:
        """Bytes that were taken; 0 where some were sent before and no more can be."""
        try:
            return super().send(piece)
        except ssl.SSLError as exc:
            if num_sent:
                return 0
            raise _translate(exc) from exc


class TlsTransport(asyncio.Transport):
    """The listener's end of TLS between an asyncio protocol and its transport.

    The event loops' own TLS hands a protocol its connection after the handshake only, so that
    those who never finish one would be counted nowhere. The protocol passes `decrypt` what it
    receives; it may write once `is_established`.
    """

    def __init__(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self._transport = transport
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_established = False
        self.peer_certificate: bytes | None = None
        """In DER; None where the peer has shown none."""

    def decrypt(self, data: bytes) -> list[bytes]:
        """What the peer wrote; empty while the handshake goes on.

        Raises:
            ssl.SSLError: the peer cannot be trusted, or broke the protocol.
        """
        self._incoming.write(data)
        parts: list[bytes] = []
        try:
            if not self.is_established:
                self._tls.do_handshake()
                self.is_established = True
                self.peer_certificate = self._tls.getpeercert(binary_form=True)
            # To read where nothing is left costs an exception, with OpenSSL's reasons in it.
            while self._incoming.pending or self._tls.pending():
                part = self._tls.read(MAX_BUFFER_BYTES)
                if not part:  # the peer is at its end
                    self._transport.close()
                    break
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        finally:
            self._send()  # an alert too
        return parts

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.WriteTransport`."""
        if data:
            self._tls.write(data)
            self._send()

    def send_plain(self, answer: bytes) -> None:
        """Send bytes as they are, to a peer that speaks no TLS."""
        self._transport.write(answer)

    def close(self) -> None:
        """See `asyncio.BaseTransport`; the peer sees that nothing was cut off."""
        if not self._transport.is_closing() and self.is_established:
            with suppress(ssl.SSLError):  # the peer's answer is not waited for
                self._tls.unwrap()
            self._send()
        self._transport.close()

    def abort(self) -> None:
        """See `asyncio.WriteTransport`."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """See `asyncio.WriteTransport`."""
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        """See `asyncio.BaseTransport`."""
        if name == "sslcontext":
            return self._tls.context
        return self._transport.get_extra_info(name, default)

    def _send(self) -> None:
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())


class HttpTls(Protocol):
    """How an HTTP server's connections are wrapped: `ClusterTls` or `ServerTls`."""

    @property
    def listening(self) -> ssl.SSLContext:
        """For the next connection that is accepted."""
        ...

    def check_request(self, certificate: bytes | None, method: str, path: str) -> bool:
        """Check that the holder of a certificate (DER) may make an HTTP request.

        Whether it is a gateway, whose tickets need no signature.

        Raises:
            AuthenticationError: it may not.
        """
        ...


class Tls(HttpTls, Protocol):
    """How sockets are wrapped: `TlsContexts` or `ClusterTls`."""

    @property
    def dialing(self) -> ssl.SSLContext:
        """For the next connection that is made."""
        ...


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """What a dialer and a listener wrap their sockets with: always the same.

    `requesting` is `dialing`, but the server must have the DNS name that is asked for.
    """

    dialing: ssl.SSLContext
    listening: ssl.SSLContext
    requesting: ssl.SSLContext

    def check_request(self, certificate: bytes | None, method: str, path: str) -> bool:
        """Everything is allowed: see `Tls`."""
        del certificate, method, path
        return False


class ClusterTls:
    """Of a cluster's process: follows its credentials, and checks roles. Thread-safe."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._made: tuple[Identity, TlsContexts] | None = None

    @property
    def listening(self) -> ssl.SSLContext:
        """See `Tls`."""
        return self._contexts.listening

    @property
    def dialing(self) -> ssl.SSLContext:
        """See `Tls`; names of servers are not checked."""
        return self._contexts.dialing

    @property
    def requesting(self) -> ssl.SSLContext:
        """For the next connection that is made; the server's name is checked."""
        return self._contexts.requesting

    def check_request(self, certificate: bytes | None, method: str, path: str) -> bool:
        """Gateways may make every request, monitors read `MONITOR_PATHS`; so may this process."""
        peer = self._credentials.find_peer(certificate or b"")
        if IdentityRole.GATEWAY in peer.roles:
            return True
        may_read = IdentityRole.MONITOR in peer.roles and method == "GET" and path in MONITOR_PATHS
        is_own = peer.serial_number == self._credentials.own.serial_number
        if not may_read and not is_own:
            raise AuthenticationError(f"{peer} may not {method} {path[:200]} here")
        return False

    @property
    def _contexts(self) -> TlsContexts:
        identity = self._credentials.identity
        if self._made is None or self._made[0] is not identity:
            self._made = identity, contexts_of(identity)
        return self._made[1]


class ServerTls:
    """Of a server whose clients need no certificate; follows its files. Owner: one thread.

    `certificate` is a PEM file, with those of intermediate authorities after it. Files that cannot
    be used change nothing, and are logged.

    Raises:
        ConfigError: a file cannot be read, or the key is not the certificate's.
    """

    def __init__(self, certificate: Path, key: Path, clock: Clock) -> None:
        self._files, self._clock = (certificate, key), clock
        self._looked_at, self._version = clock.now(), self._versions()
        self._failure = ""
        self._context = _make_server_context(certificate, key)

    @property
    def listening(self) -> ssl.SSLContext:
        """For the next connection that is accepted."""
        now = self._clock.now()
        if now - self._looked_at >= RELOAD_INTERVAL_S:
            self._looked_at = now
            version = self._versions()
            if version != self._version:
                self._reload(version)
        return self._context

    def check_request(self, certificate: bytes | None, method: str, path: str) -> bool:
        """Every client may ask: what it may do is its API key's matter."""
        del certificate, method, path
        return False

    def _versions(self) -> list[tuple[int, int, int] | None]:
        return [file_version(path) for path in self._files]

    def _reload(self, version: list[tuple[int, int, int] | None]) -> None:
        try:
            self._context = _make_server_context(*self._files)
        except ConfigError as exc:
            # They are read again: a change of their owner or mode, for one, leaves the version.
            if (failure := str(exc)) != self._failure:
                log.error("%s; the certificate before it stays in use", exc)  # noqa: TRY400
            self._failure = failure
            return
        self._version, self._failure = version, ""
        log.info("tls: took a new certificate from %s", self._files[0])


class TlsListener(socket.socket):
    """A bound socket: what it accepts speaks TLS. Takes over the descriptor of `sock`."""

    def __init__(self, sock: socket.socket, tls: Tls) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._tls = tls

    def accept(self) -> tuple[socket.socket, Any]:
        """See `socket.accept`."""
        sock, address = super().accept()
        wrapped = self._tls.listening.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )
        return wrapped, address


def wrap_dialer(sock: socket.socket, tls: Tls) -> ssl.SSLSocket:
    """A socket that is not connected yet; takes over its descriptor."""
    return tls.dialing.wrap_socket(sock, do_handshake_on_connect=False)


def contexts_of(identity: Identity) -> TlsContexts:
    """For a process that shows this identity and trusts those of the same authorities.

    Raises:
        OSError: OpenSSL cannot use it.
        UnicodeDecodeError: the authorities are not in ASCII.
    """
    trusted = identity.authorities.decode("ascii")
    # With a line break between them: a certificate's file may end without one.
    with shown_as_file(identity.certificate + b"\n" + identity.private_key) as own:
        contexts = [_make_context(kind, own, own, trusted) for kind in _KINDS]
    if identity.revoked:
        with shown_as_file(identity.revoked) as revoked:
            for context in contexts:
                context.load_verify_locations(revoked)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return _gather(contexts)


@contextmanager
def shown_as_file(content: bytes) -> Generator[str]:
    """The path of a file in memory: OpenSSL's key loading takes paths only."""
    fd = os.memfd_create("baton-identity", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def make_contexts(certificate: str, key: str, authority: str) -> TlsContexts:
    """Read files in PEM format.

    Raises:
        ConfigError: a file cannot be read, or the key is not the certificate's.
    """
    try:
        trusted = Path(authority).read_text(encoding="ascii")
        contexts = [_make_context(kind, certificate, key, trusted) for kind in _KINDS]
    except (OSError, UnicodeDecodeError) as exc:  # ssl.SSLError is one
        raise ConfigError(
            f"tls: cannot use certificate {certificate}, key {key}, ca {authority}: {exc}"
        ) from exc
    return _gather(contexts)


def _make_server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # The password of a key that needs one would be asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(f"tls: cannot use certificate {certificate}, key {key}: {exc}") from exc
    return context


_KINDS: Final = ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT


def _gather(contexts: Sequence[ssl.SSLContext]) -> TlsContexts:
    dialing, listening, requesting = contexts
    listening.num_tickets = 0
    requesting.check_hostname = True
    return TlsContexts(dialing, listening, requesting)


def _make_context(protocol: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # workers have addresses; the authority is the cluster's own
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    context.load_cert_chain(certificate, key)
    return context


def _translate(error: ssl.SSLError) -> Exception:
    match error:
        case ssl.SSLWantReadError():
            return WaitsForPeerError("the peer has not answered")
        case ssl.SSLWantWriteError():
            return BlockingIOError("the socket takes no more")
        case ssl.SSLCertVerificationError():
            return AuthenticationError(f"the peer's certificate: {error.verify_message}")
        case _:
            return _explain(error)


def _explain(error: ssl.SSLError) -> Exception:
    reason = error.reason or ""
    if "ALERT" in reason:
        alert = reason.rpartition("ALERT_")[2].lower().replace("_", " ")
        return AuthenticationError(f"the peer refused this side's TLS: {alert}")
    if reason in _NOT_TLS:
        return AuthenticationError(f"the peer does not speak TLS ({reason})")
    return ConnectionError(str(error))


_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
