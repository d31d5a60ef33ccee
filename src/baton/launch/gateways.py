"""What the metrics of a launch's gateways show: the model, the workers in use, their requests."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections import Counter
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from baton.errors import PeerUnreachableError
from baton.protocol.worker_http import METRICS_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REQUEST_TIMEOUT_S: Final = 2.0
ASK_AGAIN_S: Final = 0.1
UP_METRIC: Final = re.compile(r'baton_gateway_worker_up\{.*url="([^"]*)".*\} 1\.0')
MODEL_LABEL: Final = re.compile(r'^baton_gateway_\w+\{(?:[^}]*,)?model="([^"]+)"', re.MULTILINE)
REQUESTS_METRIC: Final = re.compile(r'baton_router_requests\{.*worker="([^"]*)".*\} (\d{1,9})\.0')


async def until_all_up(metrics_urls: Sequence[str], num_workers: int) -> str:
    """Until each gateway process has all workers: the name of the model that they serve.

    `metrics_urls` are where gateway processes answer /metrics.

    Raises:
        PeerUnreachableError: the gateway announced itself, but does not answer.
    """
    model = None
    for metrics_url in metrics_urls:
        while True:
            metrics = await asyncio.to_thread(get, metrics_url, METRICS_PATH)
            model = find_model(metrics)
            if model is not None and len(find_up(metrics)) >= num_workers:
                break
            await asyncio.sleep(ASK_AGAIN_S)
    return model or ""


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
            metrics = await asyncio.to_thread(get, metrics_url, METRICS_PATH)
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


def find_model(metrics: bytes) -> str | None:
    """The name of a model that is served, by a gateway's metrics."""
    found = MODEL_LABEL.search(metrics.decode(errors="replace"))
    return None if found is None else found[1]


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
        return is_reached(find_up(await asyncio.to_thread(get, metrics_url, METRICS_PATH)))
    except PeerUnreachableError:  # it restarts: what it knows then is asked again
        return False


def get(url: str, path: str) -> bytes:
    """What a gateway answers over HTTP, whatever the status. Blocks.

    Raises:
        PeerUnreachableError: it does not answer in time.
    """
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
