"""Asks for completions, one at a time, and reads what servers report of them."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

TIMEOUT_S = 300


class ServerError(Exception):
    """A server did not start, or answered with an error."""


@dataclass(frozen=True)
class Reply:
    """A streamed answer; seconds since the request, of each event and of the end."""

    arrivals_s: list[float]
    total_s: float
    choices: list[dict]
    """The first choice of each event."""
    request_id: str

    @property
    def ttft_s(self) -> float:
        """Until the first event."""
        return self.arrivals_s[0]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(choice["text"] for choice in self.choices)


def stream(url: str, body: dict[str, object], started_s: float | None = None) -> Reply:
    """Post a streaming completion. `started_s` (of `perf_counter`): when it began, if not now.

    Raises:
        ServerError: it was not answered, or broke off.
    """
    if started_s is None:
        started_s = time.perf_counter()
    arrivals_s, events, is_done = [], [], False
    headers = {"content-type": "application/json"}
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        response = connection.getresponse()
        try:
            while line := response.readline():
                if response.status != HTTPStatus.OK or line.startswith(b'data: {"error"'):
                    raise ServerError(f"{url}: HTTP {response.status}: {line[:500]!r}")
                if line.startswith(b"data: {"):
                    arrivals_s.append(time.perf_counter() - started_s)
                    events.append(line[6:])
                is_done = is_done or line.startswith(b"data: [DONE]")
        except http.client.HTTPException as exc:
            raise ServerError(f"{url}: the stream broke off: {exc!r}") from exc
        total_s = time.perf_counter() - started_s
    if not (events and is_done):
        raise ServerError(f"{url}: the stream broke off after {len(events)} events")
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return Reply(arrivals_s, total_s, choices, response.headers.get("x-request-id", ""))


def post(url: str, path: str, body: dict[str, object]) -> dict:
    """Post JSON, get JSON.

    Raises:
        ServerError: the answer is not a 200.
    """
    headers = {"content-type": "application/json"}
    return json.loads(_request(url, "POST", path, json.dumps(body), headers))


def get(url: str, path: str) -> str:
    """What is at a path.

    Raises:
        ServerError: the answer is not a 200.
    """
    return _request(url, "GET", path, None, {}).decode()


def read_trace(gateway_url: str, request_id: str) -> dict:
    """The summary that a gateway keeps of a request."""
    return json.loads(get(gateway_url, f"/debug/requests/{request_id}"))["summary"]


def find_metric(text: str, name: str) -> float:
    """The first sample whose line begins so; 0 if there is none."""
    lines = (line for line in text.splitlines() if line.startswith(name))
    return next((float(line.rpartition(" ")[2]) for line in lines), 0.0)


def _request(url: str, method: str, path: str, body: str | None, headers: dict[str, str]) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        raw = response.read()
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        raise ServerError(f"{url}{path}: HTTP {response.status}: {raw[:300]!r}")
    return raw
