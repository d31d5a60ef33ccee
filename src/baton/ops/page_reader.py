"""Pages of gateways and workers, several at once, each within a time and a size."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import aiohttp

from baton.auth.certificates import IdentityRole
from baton.ops.gateway_pages import OK, PageError, management_headers, read_refusal

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Mapping

MAX_PAGE_BYTES: Final = 4 << 20
READ_BYTES: Final = 64 << 10
GIVE_CREDENTIALS: Final = (
    "of a fleet of `baton up` on this machine, name it with --fleet; of others, give the cluster's "
    "key (BATON_CLUSTER_KEY, cluster.key_file) or an identity (security.identity)"
)


class PageReader:
    """Owner: the event loop's thread. Redirects are not followed; proxies and cookies not used.

    Gateways are shown the management key, workers never. `worker_tls` is what workers with https
    are asked with: both sides prove their roles. None: they are not asked. No bearer is ever sent.
    """

    def __init__(self, session: aiohttp.ClientSession, worker_tls: ssl.SSLContext | None) -> None:
        self._session, self._worker_tls = session, worker_tls

    async def get(self, url: str, timeout_s: float) -> bytes:
        """Body of a gateway's page, at most `MAX_PAGE_BYTES`.

        Raises:
            PageError: no whole answer in time, a longer one, or another status than 200.
        """
        return await self._fetch(url, timeout_s, headers=management_headers())

    async def get_of_worker(self, url: str, timeout_s: float) -> bytes:
        """Body of a worker's page.

        Raises:
            PageError: as `get`; or it has TLS, and there are no credentials for it.
        """
        if not url.startswith("https:"):
            return await self._fetch(url, timeout_s)
        if self._worker_tls is None:
            raise PageError(
                f"{url}: workers of this cluster want a certificate, and there is none here; "
                f"{GIVE_CREDENTIALS}"
            )
        return await self._fetch(url, timeout_s, tls=self._worker_tls)

    async def _fetch(
        self,
        url: str,
        timeout_s: float,
        *,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """`tls` None: as for servers of the web, whose names and authorities the system knows."""
        name = None if tls is None else IdentityRole.WORKER.dns_name
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(
                    url,
                    headers=headers,
                    allow_redirects=False,
                    ssl=tls or True,
                    server_hostname=name,
                ) as response,
            ):
                body = await _read_bounded(response)
        except TimeoutError as exc:
            raise PageError(f"{url}: no whole answer within {timeout_s:g} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            reason = f"{url}: {type(exc).__name__}: {exc}"
            if tls is not None and isinstance(exc, aiohttp.ClientSSLError):
                reason += f"; the worker may be of another cluster: {GIVE_CREDENTIALS}"
            raise PageError(reason) from exc
        if body is None:
            raise PageError(f"{url} has more than {MAX_PAGE_BYTES} bytes")
        if response.status != OK:
            raise PageError(f"{url}: HTTP {response.status}: {read_refusal(body)}")
        return body


@asynccontextmanager
async def open_pages(worker_tls: ssl.SSLContext | None = None) -> AsyncGenerator[PageReader]:
    """A reader with its connections, for as long as the block runs."""
    unlimited = aiohttp.ClientTimeout(total=None, sock_connect=None)
    async with aiohttp.ClientSession(
        cookie_jar=aiohttp.DummyCookieJar(), timeout=unlimited, trust_env=False
    ) as session:
        yield PageReader(session, worker_tls)


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes | None:
    """The body; None: it is longer than a page may be."""
    parts: list[bytes] = []
    num_bytes = 0
    async for part in response.content.iter_chunked(READ_BYTES):
        num_bytes += len(part)
        if num_bytes > MAX_PAGE_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)
