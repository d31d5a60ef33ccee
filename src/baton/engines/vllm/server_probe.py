"""Asks a server that is starting, over HTTP as the gateway will: does it answer, who is it."""

from __future__ import annotations

import asyncio
import http.client
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from baton.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

RETRY_INTERVAL_S: Final = 0.1
REQUEST_TIMEOUT_S: Final = 60.0
"""The first request of a server may compile kernels."""


class ProbedIdentity(msgspec.Struct, frozen=True):
    """What a launcher must know of the server's `WorkerInfo`."""

    worker: str
    epoch: str
    handoff_address: str


class _Params(msgspec.Struct, frozen=True):
    baton_info: ProbedIdentity


class _Completion(msgspec.Struct, frozen=True):
    kv_transfer_params: _Params


async def wait_healthy(url: str) -> None:
    """Until the server answers that its engine is well. Never, if it never does."""
    # There is nothing to wait for but this: vLLM tells nobody.
    while await asyncio.to_thread(_status, url, "/health") != HTTPStatus.OK:  # noqa: ASYNC110
        await asyncio.sleep(RETRY_INTERVAL_S)


async def fetch_identity(url: str, model: str, headers: Mapping[str, str]) -> ProbedIdentity:
    """The discovery probe: a completion of one token, answered with who the server is.

    Raises:
        EngineError: the server answers, but Baton's connector in it does not.
    """
    return read_identity(await asyncio.to_thread(_complete, url, model, headers))


def read_identity(body: bytes) -> ProbedIdentity:
    """Read the answer to a discovery probe.

    Raises:
        EngineError: it does not hold what Baton's connector says.
    """
    try:
        return msgspec.json.decode(body, type=_Completion).kv_transfer_params.baton_info
    except msgspec.MsgspecError as exc:
        raise EngineError(
            f"vLLM answers, but not with what Baton's connector says: {body[:300]!r}"
        ) from exc


def _complete(url: str, model: str, headers: Mapping[str, str]) -> bytes:
    question = {
        "model": model,
        "prompt": [0],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"baton_info": True},
    }
    connection = _connect(url, REQUEST_TIMEOUT_S)
    try:
        body = msgspec.json.encode(question)
        connection.request(
            "POST", "/v1/completions", body, {"content-type": "application/json", **headers}
        )
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException) as exc:
        raise EngineError(f"vLLM is well, but does not answer a request: {exc}") from exc
    finally:
        connection.close()


def _status(url: str, path: str) -> int:
    """The HTTP status of a GET; 0 if nobody answers."""
    connection = _connect(url, REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound here
    return http.client.HTTPConnection(reached, parts.port, timeout=timeout_s)
