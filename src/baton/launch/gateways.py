"""What the gateways of a launch report: the model, the workers that they use, and their load."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections import Counter
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from baton.errors import UNDECODABLE, PeerUnreachableError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REQUEST_TIMEOUT_S: Final = 2.0
ASK_AGAIN_S: Final = 0.1
UP_METRIC: Final = re.compile(r'baton_gateway_worker_up\{.*url="([^"]*)".*\} 1\.0')
REQUESTS_METRIC: Final = re.compile(r'baton_router_requests\{.*worker="([^"]*)".*\} (\d{1,9})\.0')


class ModelEntry(msgspec.Struct, frozen=True):
    """One entry of OpenAI's model list, as far as it matters here."""

    id: str


class ModelList(msgspec.Struct, frozen=True):
    """OpenAI's model list."""

    data: tuple[ModelEntry, ...]


async def until_all_up(url: str, metrics_urls: Sequence[str], num_workers: int) -> str:
    """Until each gateway process has all workers: the name of the model that they serve.

    `metrics_urls` are where gateway processes answer /metrics.

    Raises:
        PeerUnreachableError: the gateway announced itself, but does not answer.
        ProtocolError: it serves no model although all workers are up.
    """
    for metrics_url in metrics_urls:
        while await _count_up(metrics_url) < num_workers:  # noqa: ASYNC110 - another process
            await asyncio.sleep(ASK_AGAIN_S)
    return first_model(await asyncio.to_thread(_get, url, "/v1/models"))


async def _count_up(metrics_url: str) -> int:
    return len(find_up(await asyncio.to_thread(_get, metrics_url, "/metrics")))


async def until_used(metrics_urls: Sequence[str], worker_url: str, timeout_s: float) -> bool:
    """Until each gateway process gives a worker requests; False: that took too long."""
    return await _until(metrics_urls, lambda up: worker_url in up, timeout_s)


async def until_unused(metrics_urls: Sequence[str], worker_url: str, timeout_s: float) -> bool:
    """Until no gateway process gives a worker requests; False: that took too long."""
    return await _until(metrics_urls, lambda up: worker_url not in up, timeout_s)


async def count_requests(metrics_urls: Sequence[str]) -> Counter[str]:
    """Requests under way, by worker; of gateways that do not answer none are known."""
    found: Counter[str] = Counter()
    for metrics_url in metrics_urls:
        try:
            metrics = await asyncio.to_thread(_get, metrics_url, "/metrics")
        except PeerUnreachableError:
            continue
        found.update(find_requests(metrics))
    return found


def find_up(metrics: bytes) -> frozenset[str]:
    """URLs of the workers that are up, by a gateway's metrics."""
    lines = metrics.decode(errors="replace").splitlines()
    return frozenset(found[1] for line in lines if (found := UP_METRIC.fullmatch(line)))


def find_requests(metrics: bytes) -> Counter[str]:
    """Requests under way at each worker, by a gateway's metrics."""
    found: Counter[str] = Counter()
    for line in metrics.decode(errors="replace").splitlines():
        if match := REQUESTS_METRIC.fullmatch(line):
            found[match[1]] += int(match[2])
    return found


def first_model(models: bytes) -> str:
    """The first name of a model list.

    Raises:
        ProtocolError: malformed or empty.
    """
    try:
        return msgspec.json.decode(models, type=ModelList).data[0].id
    except (IndexError, *UNDECODABLE) as exc:
        raise ProtocolError(f"the gateway's model list makes no sense: {models[:200]!r}") from exc


async def _until(
    metrics_urls: Sequence[str], is_reached: Callable[[frozenset[str]], bool], timeout_s: float
) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            for metrics_url in metrics_urls:
                while not await _is_reached(metrics_url, is_reached):  # noqa: ASYNC110
                    await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError:
        return False
    return True


async def _is_reached(metrics_url: str, is_reached: Callable[[frozenset[str]], bool]) -> bool:
    try:
        return is_reached(find_up(await asyncio.to_thread(_get, metrics_url, "/metrics")))
    except PeerUnreachableError:  # it restarts: what it knows then is asked again
        return False


def _get(url: str, path: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException) as exc:
        raise PeerUnreachableError(f"the gateway at {url} does not answer {path}: {exc}") from exc
    finally:
        connection.close()
