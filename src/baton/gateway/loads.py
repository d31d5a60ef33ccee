"""How full a worker is: Baton's say so with their health, of a vLLM server the first rank knows.

A vLLM server whose control server does not answer is as well as it was; it is asked again a while
later, lest each probe wait for it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from baton.errors import BatonError
from baton.gateway.worker_info import read_load

if TYPE_CHECKING:
    from baton.gateway.upstream import Upstream
    from baton.gateway.workers import Worker
    from baton.router.fleet import WorkerLoad

PROBES_WITHOUT: Final = 10
"""So many probes do not ask a control server that did not answer."""


class LoadReader:
    """Asks one worker. Owner: the event loop's thread."""

    def __init__(self, worker: Worker, upstream: Upstream, timeout_s: float) -> None:
        self._worker, self._upstream, self._timeout_s = worker, upstream, timeout_s
        self._num_to_skip = 0

    async def read(self, health: bytes) -> WorkerLoad | None:
        """What a well worker says of its load, `health` being its answer; None: nothing."""
        info = self._worker.info
        if info is None or info.protocol == "baton":
            return read_load(health)
        if self._num_to_skip:
            self._num_to_skip -= 1
            return None
        # Whose address it is was checked before the worker came up.
        url = self._worker.control_urls[0] / "health"
        try:
            status, body = await self._upstream.get(url, self._timeout_s)
        except BatonError:
            self._num_to_skip = PROBES_WITHOUT
            return None
        return read_load(body) if status == HTTPStatus.OK else None
