"""Whether a vLLM server failed a request because its KV did not come.

With the `kv_load_failure_policy` "fail", vLLM's default, such a request ends as an internal error
like any other. What befell its handoff is in the traces of the server's ranks.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from baton.errors import BatonError
from baton.gateway.errors import KVLostError
from baton.telemetry.trace import RequestSpan

if TYPE_CHECKING:
    from yarl import URL

    from baton.auth.ticket import Ticket
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker

TIMEOUT_S: Final = 2.0

_decoder = msgspec.json.Decoder(RequestSpan)


async def find_kv_load_failure(
    upstream: Upstream, decode: Worker, ticket: Ticket
) -> KVLostError | None:
    """Why the KV of a ticket did not arrive; None if it did, or nobody can say."""
    for url in decode.control_urls:
        reasons = await _read_failures(upstream, url, ticket)
        if reasons:
            return KVLostError(f"{decode.name} ended the request without its KV: {reasons[0]}")
    return None


async def _read_failures(upstream: Upstream, url: URL, ticket: Ticket) -> list[str]:
    path = f"/baton/v1/traces/{quote(ticket.request_id, safe='')}"
    try:
        status, body = await upstream.get(url.with_path(path, encoded=True), TIMEOUT_S)
        if status != HTTPStatus.OK:
            return []
        trace = _decoder.decode(body)
    except (BatonError, msgspec.MsgspecError):
        return []
    return trace.fallbacks if trace.ticket == ticket.id.hex() else []
