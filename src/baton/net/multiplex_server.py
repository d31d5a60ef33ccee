"""What a worker's server answers about multiplexes (`baton.net.multiplex`)."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.net.multiplex import Multiplex
from baton.protocol.worker_http import (
    LEAVE_MULTIPLEX_PATH,
    MAX_STREAM_REF_BYTES,
    MULTIPLEX_HEADER,
    MULTIPLEX_PATH,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from baton.net.http_exchange import HttpExchange


async def open_multiplex(exchange: HttpExchange) -> None:
    """Answer with the frames of streams, until the gateway leaves or the server ends."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    multiplex = Multiplex(loop, exchange.write, exchange.drain, ended.set)
    kind = (b"content-type", b"application/octet-stream")
    headers = [kind, (MULTIPLEX_HEADER.encode(), multiplex.id)]
    await exchange.send({
        "type": "http.response.start",
        "status": HTTPStatus.OK,
        "headers": headers,
    })
    exchange.on_shutdown, exchange.on_disconnect = multiplex.close_when_unused, ended.set
    exchange.multiplexes.add(multiplex)
    try:
        await ended.wait()
    finally:
        exchange.multiplexes.remove(multiplex)
    await exchange.send({"type": "http.response.body"})


async def leave_multiplex(exchange: HttpExchange) -> None:
    """Have a stream, which the body names, go on on its own connection, if there is such a one."""
    stream_ref, is_whole = b"", False
    while not is_whole and len(stream_ref) <= MAX_STREAM_REF_BYTES:
        message = await exchange.receive()
        stream_ref += message.get("body", b"")
        is_whole = not message.get("more_body")
    exchange.multiplexes.leave(stream_ref)
    await exchange.send({
        "type": "http.response.start",
        "status": HTTPStatus.OK,
        "headers": [(b"content-length", b"0")],
    })
    await exchange.send({"type": "http.response.body"})


MULTIPLEX_HANDLERS: Final[dict[str, Callable[[HttpExchange], Awaitable[None]]]] = {
    MULTIPLEX_PATH: open_multiplex,
    LEAVE_MULTIPLEX_PATH: leave_multiplex,
}
"""By path; the method is POST. Who may ask is the application's matter."""
