"""The new worker's request for a stream that the old one generates still: ready before the cut.

    A  generates ────────────────────────────────────────┐ cut behind a whole event
       whole blocks that it has cached: a handoff         │
    B  └──► computes the rest ──► computes what the ──────┴──► one step, and its stream begins
            of the tokens         client gets meanwhile

`docs/wire/worker-http.md` has the messages.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from baton.gateway.errors import ErrorAnswer, UpstreamError, WorkerFailedError
from baton.gateway.upstream import MAX_SMALL_ANSWER_BYTES
from baton.protocol.request_fields import Resume
from baton.protocol.worker_http import NextTokens, standby_path

if TYPE_CHECKING:
    from baton.gateway.http_client import Answer
    from baton.gateway.request_context import Services
    from baton.gateway.running_streams import RunningStream
    from baton.gateway.workers import Worker
    from baton.router.fleet import WorkerView

CLOSE_TOKENS: Final = 2
"""May be left for the step after the cut: so many come while the worker computes the ones before,
where a step of two tokens takes as long as two of one (a CPU with one stream), else one."""
MAX_ROUNDS: Final = 8
"""Of tokens that are sent after: a worker that gets no closer by then goes on from where it is."""
FEED_TIMEOUT_S: Final = 10.0
GENERATE_TIMEOUT_S: Final = 5.0


def find_standby_worker(services: Services, target: WorkerView) -> Worker | None:
    """The worker, if it takes standby requests."""
    worker = services.workers.with_id(target.id)
    if worker is None or worker.info is None or not worker.info.has_standby:
        return None
    return worker


class Standby:
    """One stream's at one worker. Owner: the event loop's thread; whoever holds it releases it.

    `ids` are the answer's tokens that the worker gets with the request; `num_prefix_tokens` of
    prompt and answer are handed over to it: whole blocks, which the old worker has cached, so that
    it computes nothing for the handoff.
    """

    def __init__(self, services: Services, stream: RunningStream, worker: Worker) -> None:
        self._services, self._stream, self._worker = services, stream, worker
        self._id = secrets.token_hex(16)
        self._answer: Answer | None = None
        self.ids = stream.resumption.record.read_token_ids() or []
        self._num_sent = len(self.ids)
        self.num_prefix_tokens = stream.count_cached(len(self.ids)) or 0

    async def open(self, ticket: str) -> None:
        """Ask the worker; returns when it has the KV of all of `ids`.

        Raises:
            UpstreamError: it does not.
        """
        stream = self._stream
        body = replace(stream.body, resume=Resume(self.ids, standby=self._id))
        headers = stream.write_headers(stream.context)
        url = self._worker.completion_urls[stream.context.path]
        with self._worker.cancel_scope():
            answer = await self._services.upstream.post(
                url,
                body.encode_with_ticket(ticket),
                headers,
                multiplexes=self._worker.multiplexes_streams,
            )
            if answer.status == HTTPStatus.OK:
                self._answer = answer
                return
            try:
                detail = await answer.read_whole(MAX_SMALL_ANSWER_BYTES)
            finally:
                answer.release()
        raise WorkerFailedError(
            f"{self._worker.name} did not take the stream: it answered {answer.status}",
            answer=ErrorAnswer(answer.status, detail),
        )

    async def follow(self) -> None:
        """Have the worker compute what the client got meanwhile, until it is close behind.

        Then the worker is idle: a step that it had begun would be waited for after the cut.

        Raises:
            UpstreamError: it did not.
        """
        for _ in range(MAX_ROUNDS):
            fresh = self._read_fresh()
            if len(fresh) <= CLOSE_TOKENS:
                return
            status = await self._send(fresh, FEED_TIMEOUT_S)
            if status != HTTPStatus.NO_CONTENT:
                raise UpstreamError(f"{self._worker.name} did not take more tokens: {status}")

    async def generate(self) -> Answer | None:
        """After the cut: the stream that follows what the client has.

        None: the worker has to be asked anew, which takes longer.

        Raises:
            UpstreamError: the worker is lost.
        """
        fresh, answer = self._read_fresh(), self._answer
        try:
            if not fresh or answer is None or self._stream.resumption.record.is_finished:
                return None
            status = await self._send(fresh, GENERATE_TIMEOUT_S, generates=True)
            if status != HTTPStatus.NO_CONTENT:
                return None
            self._answer = None  # the caller's from here on
            return answer
        finally:
            self.release()

    def release(self) -> None:
        """End the request at the worker, unless its stream is used."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.release()

    def _read_fresh(self) -> list[int]:
        """What the client has and the worker was not sent."""
        ids = self._stream.resumption.record.read_token_ids() or []
        return ids[self._num_sent :]

    async def _send(
        self, token_ids: list[int], timeout_s: float, *, generates: bool = False
    ) -> int:
        start = self._num_sent
        self._num_sent += len(token_ids)
        body = msgspec.json.encode(NextTokens(start, token_ids, generates))
        url = self._worker.url.with_path(standby_path(self._id))
        status, _ = await self._services.upstream.ask(url, body, timeout_s)
        return status
