"""TLS beneath the frames: both ends present a certificate of the cluster's own authority.

The cluster key is proved inside, as without TLS: TLS encrypts, the key authenticates a worker.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import AuthenticationError, ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

MAX_BUFFER_BYTES: Final = 64 << 10
"""Of one OpenSSL call, which makes records of 16 KiB."""


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


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """What a dialer and a listener wrap their sockets with."""

    dialing: ssl.SSLContext
    listening: ssl.SSLContext

    def wrap_dialer(self, sock: socket.socket) -> ssl.SSLSocket:
        """A socket that is not connected yet; takes over its descriptor."""
        return self.dialing.wrap_socket(sock, do_handshake_on_connect=False)

    def wrap_listener(self, sock: socket.socket) -> ssl.SSLSocket:
        """A bound socket: what it accepts speaks TLS; takes over its descriptor."""
        return self.listening.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def make_contexts(certificate: str, key: str, authority: str) -> TlsContexts:
    """Read files in PEM format.

    Raises:
        ConfigError: a file cannot be read, or the key is not the certificate's.
    """
    try:
        dialing, listening = (
            _make_context(protocol, certificate, key, authority)
            for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(
            f"tls: cannot use certificate {certificate}, key {key}, ca {authority}: {exc}"
        ) from exc
    listening.num_tickets = 0
    return TlsContexts(dialing, listening)


def _make_context(protocol: int, certificate: str, key: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # workers have addresses; the authority is the cluster's own
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority)
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
