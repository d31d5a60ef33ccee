"""The prefill worker's part of a request, beside the decode worker's.

The leg's answer is of no interest to the client: its KV reaches the decode worker without us. What
matters is its failure, which the decode worker must learn at once, so that it recomputes instead of
waiting for KV that will not come.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from baton.gateway.errors import (
    StaleTicketError,
    UpstreamError,
    WorkerLostError,
    WorkerUnreachableError,
)
from baton.gateway.metrics import FallbackCause, Phase
from baton.gateway.upstream import MAX_SMALL_ANSWER_BYTES, read_answer
from baton.gateway.workers import Worker

if TYPE_CHECKING:
    from multidict import CIMultiDict

    from baton.gateway.call import Call
    from baton.gateway.interrupt import Interruptible
    from baton.gateway.services import Services
    from baton.ids import TicketId

ABORT_AGAIN_AFTER_S: Final = (0.05, 0.2, 1.0)
"""The first abort can overtake the request that it is about, which then would not know of it."""

STALE_TICKET: Final = "stale_ticket"

log = logging.getLogger(__name__)


class _ErrorCode(msgspec.Struct):
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorCode


_error_decoder = msgspec.json.Decoder(_ErrorAnswer)


def is_stale_ticket(status: int, body: bytes) -> bool:
    """Whether a worker's answer says that the ticket was made for its previous life."""
    if status != HTTPStatus.CONFLICT:
        return False
    try:
        return _error_decoder.decode(body).error.code == STALE_TICKET
    except msgspec.MsgspecError:
        return False
