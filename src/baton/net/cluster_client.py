"""Small HTTP requests to one process of the cluster: announcements, and exchanges of gateways.

One connection, which is kept; one request at a time. A TLS handshake that is under way is never
cancelled, but ends by its own time limit: uvloop 0.23 keeps the TLS state (120 KB) of each that is
cancelled until exit, and a peer that hangs is asked again and again.
"""

from __future__ import annotations

import asyncio
import re
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from baton.errors import BatonError
from baton.net.host_names import merge_errors, name_of

if TYPE_CHECKING:
    import ssl

    from baton.auth.certificates import IdentityRole
    from baton.net.tls import ClusterTls

_HEAD_END: Final = b"\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d{1,9})\r\n", re.IGNORECASE)
_PORTS: Final = {"http": 80, "https": 443}


class NoAnswerError(BatonError):
    """The other process did not answer. `is_refused`: nothing listens at its address."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class ClusterClient:
    """Of the process at `url` (https://host:port), which must have `role`.

    Owner: the event loop's thread. A URL with http has no TLS, and nothing is proved.
    """

    def __init__(
        self, url: str, role: IdentityRole, tls: ClusterTls, *, max_answer_bytes: int
    ) -> None:
        self.url, self._role, self._tls = url, role, tls
        self._max_answer_bytes = max_answer_bytes
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._host_name = name_of(self._host)
        self._port = parts.port or _PORTS.get(parts.scheme, 0)
        self._is_tls = parts.scheme == "https"
        self._authority = parts.netloc
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._made_with: ssl.SSLContext | None = None
        self._address = "not resolved yet"
        """The one that was connected to last, or is being."""

    async def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """Post msgpack; the answer's body.

        Raises:
            NoAnswerError: no connection, no answer in time, or one with another status than 200.
        """
        status, answer = await self.request("POST", path, body, timeout_s)
        if status != HTTPStatus.OK:
            text = answer[:300].decode("utf-8", "replace")
            raise NoAnswerError(f"{self.url} answered {status} to {path}: {text}")
        return answer

    async def request(
        self, method: str, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        """Send a request; status and body of its answer.

        Raises:
            NoAnswerError: no connection, no answer in time, or too long a one.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(method, path, body, timeout_s)
        except TimeoutError as exc:
            self.close()
            raise NoAnswerError(
                f"{self.url} ({self._address}) did not answer within {timeout_s:g} s"
            ) from exc
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            self.close()
            raise NoAnswerError(
                f"{self.url} cannot be reached: {exc}",
                is_refused=isinstance(exc, ConnectionRefusedError),
            ) from exc
        except BaseException:
            self.close()  # an answer that was not read would be taken for the next one
            raise

    @property
    def peer(self) -> tuple[str, int] | None:
        """Address and port of the other end; None while there is no connection."""
        name = None if self._open is None else self._open[1].get_extra_info("peername")
        return None if name is None else (name[0], name[1])

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection for the next request, made with the present credentials."""
        if self._open is None or self._context is not self._made_with:
            return False
        return not (self._open[0].at_eof() or self._open[1].is_closing())

    @property
    def _context(self) -> ssl.SSLContext | None:
        return self._tls.requesting if self._is_tls else None

    def close(self) -> None:
        """Close the connection; the next request makes another one."""
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].transport.abort()

    async def _ask(
        self, method: str, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        reader, writer = await self._connection(timeout_s)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._authority}\r\n"
            f"content-type: application/msgpack\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode("ascii") + body)
        answer = await reader.readuntil(_HEAD_END)
        status, length = _STATUS.match(answer), _LENGTH.search(answer)
        if status is None or length is None or int(length[1]) > self._max_answer_bytes:
            raise NoAnswerError(f"{self.url} answered what cannot be read: {answer[:100]!r}")
        content = await reader.readexactly(int(length[1]))
        if b"\r\nconnection: close\r\n" in answer.lower():
            self.close()
        return int(status[1]), content

    async def _connection(
        self, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._open is not None and self.is_connected:
            return self._open
        self.close()
        context = self._context
        sock = await self._connect(timeout_s)
        if context is None:
            self._open = await asyncio.open_connection(sock=sock)
        else:
            making = asyncio.ensure_future(
                asyncio.open_connection(
                    sock=sock,
                    ssl=context,
                    server_hostname=self._role.dns_name,
                    ssl_handshake_timeout=timeout_s,
                )
            )
            try:
                self._open = await asyncio.shield(making)
            except asyncio.CancelledError:
                making.add_done_callback(_close_unused)
                raise
        self._made_with = context
        return self._open

    async def _connect(self, timeout_s: float) -> socket.socket:
        """A TCP connection to one of the addresses of the host. Each has its share of the time.

        Raises:
            OSError: to none of them; `ConnectionRefusedError` where nothing listens at any.
        """
        loop = asyncio.get_running_loop()
        addresses: tuple[str, ...] = (self._host,)
        errors: list[OSError] = []
        if self._host_name is not None:
            # TLS proves who is there, also at an address that the name had before.
            addresses, errors = await self._host_name.find(timeout_s, may_be_old=self._is_tls)
        share_s = timeout_s / len(addresses)
        for address in addresses:
            self._address = address
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            # With the protocol's number, by which asyncio knows where to set TCP_NODELAY.
            sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            sock.settimeout(0)
            try:
                async with asyncio.timeout(share_s):
                    await loop.sock_connect(sock, (address, self._port))
            except TimeoutError:
                sock.close()
                errors.append(OSError(f"{self._address} did not answer within {share_s:g} s"))
            except OSError as exc:
                sock.close()
                errors.append(exc)
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise merge_errors(errors)


def _close_unused(
    making: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result()[1].transport.abort()
