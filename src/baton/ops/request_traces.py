"""Fetches traces from a running gateway, for `baton explain` and `baton trace export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from baton.errors import ConfigError
from baton.ops.gateway_pages import NOT_FOUND, Gateway, PageError, decode_page
from baton.protocol.gateway_http import REQUESTS_PATH
from baton.protocol.request_traces import RequestList, RequestTrace

if TYPE_CHECKING:
    from collections.abc import Iterator

FORGOTTEN: Final = (
    ". A gateway remembers its latest requests (trace.ring_size), and slow and failed ones for "
    "longer (trace.kept_size); each of several gateway processes remembers its own: ask each "
    "management port"
)


def page_of(request_id: str) -> str:
    """The path of a request's page.

    Raises:
        ConfigError: no request has such an id.
    """
    if not request_id or not request_id.isascii() or not request_id.isprintable():
        raise ConfigError(f"{request_id!a} is no request's id: it is in the header x-request-id")
    return f"{REQUESTS_PATH}/{quote(request_id, safe='')}"


def fetch_trace(gateway: Gateway, request_id: str) -> RequestTrace:
    """One request's trace.

    Raises:
        ConfigError: no request has such an id.
        PageError: the gateway does not remember it, or shows nothing.
    """
    path = page_of(request_id)
    answer = gateway.get(path)
    try:
        return decode_page(gateway, path, answer, RequestTrace)
    except PageError as exc:
        if answer[0] == NOT_FOUND and b"is remembered" in answer[1]:
            raise PageError(f"{exc}{FORGOTTEN}") from None
        raise


def fetch_traces(
    gateway: Gateway, last_s: float, most: int, only: str | None
) -> Iterator[RequestTrace]:
    """Traces of requests that ended within `last_s` seconds; of those kept as `only`, if given.

    Raises:
        PageError: the gateway shows nothing.
    """
    kind = "" if only is None else f"&{only}"
    path = f"{REQUESTS_PATH}?last_s={last_s:g}&most={most}{kind}"
    listed = decode_page(gateway, path, gateway.get(path), RequestList)
    for each in listed.requests:
        page = page_of(each.id)
        status, body = gateway.get(page)
        if status != NOT_FOUND:  # else it was forgotten meanwhile
            yield decode_page(gateway, page, (status, body), RequestTrace)
