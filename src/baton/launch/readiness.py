"""Does the gateway see all workers: asked of the gateway itself, over HTTP."""

from __future__ import annotations

import asyncio
import http.client
from typing import Final
from urllib.parse import urlsplit

import msgspec

from baton.errors import PeerUnreachableError, ProtocolError

REQUEST_TIMEOUT_S: Final = 2.0
ASK_AGAIN_S: Final = 0.1
UP_METRIC: Final = "baton_gateway_worker_up{"


class ModelEntry(msgspec.Struct, frozen=True):
    """One entry of OpenAI's model list, as far as it matters here."""

    id: str


class ModelList(msgspec.Struct, frozen=True):
    """OpenAI's model list."""

    data: tuple[ModelEntry, ...]


async def until_all_up(url: str, num_workers: int) -> str:
    """Until the gateway has all its workers: the name of the model that they serve.

    Raises:
        PeerUnreachableError: the gateway announced itself, but does not answer.
        ProtocolError: it serves no model although all workers are up.
    """
    while True:
        if count_up(await asyncio.to_thread(_get, url, "/metrics")) >= num_workers:
            return first_model(await asyncio.to_thread(_get, url, "/v1/models"))
        await asyncio.sleep(ASK_AGAIN_S)


def count_up(metrics: bytes) -> int:
    """How many workers are up by the gateway's metrics."""
    lines = metrics.decode(errors="replace").splitlines()
    return sum(line.startswith(UP_METRIC) and line.endswith(" 1.0") for line in lines)


def first_model(models: bytes) -> str:
    """The first name of a model list.

    Raises:
        ProtocolError: malformed or empty.
    """
    try:
        return msgspec.json.decode(models, type=ModelList).data[0].id
    except (msgspec.MsgspecError, IndexError) as exc:
        raise ProtocolError(f"the gateway's model list makes no sense: {models[:200]!r}") from exc


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
