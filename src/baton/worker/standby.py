"""Requests that wait for tokens which another worker samples, until they are to go on themselves.

    request with `baton_resume.standby` ─► KV received, the rest computed ─► head of the answer
    POST …/tokens                       ─► KV computed                    ─► 204; again and again
    POST …/tokens, `generates`          ─► 204, and the stream begins behind these tokens

A stream that moves has such a request at the new worker before it is cut at the old one: all that
is left to do after the cut is one step.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.engines.interface import DecodeRequest, GenerationRequest, NewToken, PrefillRequest
from baton.errors import UNDECODABLE, BatonError, InvalidRequestError
from baton.handoff.interface import SampledToken
from baton.ids import RequestId
from baton.protocol.worker_http import NextTokens
from baton.worker.errors import DeadlineError, StandbyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.tokenizer.tokenizer import Tokenizer
    from baton.worker.engine_client import AnswerStream, EngineClient
    from baton.worker.output_processor import OutputProcessor
    from baton.worker.prompts import Generation
    from baton.worker.resumed_answer import KnownTokens

NEXT_TOKENS_TIMEOUT_S: Final = 10.0
"""A standby request holds KV blocks: so long it waits for tokens."""

_decoder = msgspec.json.Decoder(NextTokens)


def read_next_tokens(body: bytes) -> NextTokens:
    """Decode and bounds-check.

    Raises:
        InvalidRequestError: not what the wire format allows.
    """
    try:
        return _decoder.decode(body)
    except UNDECODABLE as exc:
        raise InvalidRequestError(f"no next tokens: {exc}", code="invalid_value") from exc


@dataclass(frozen=True, slots=True)
class _Order:
    """Tokens that came; `done` is set when their sender is to be answered."""

    tokens: NextTokens
    done: asyncio.Future[None]

    def finish(self, error: BatonError | None = None) -> None:
        """Answer, unless the sender has left or was answered."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Standbys:
    """The standby requests of one worker, by their ids. Owner: the event loop's thread."""

    def __init__(self) -> None:
        self._orders: dict[str, asyncio.Queue[_Order]] = {}

    async def feed(self, standby: str, tokens: NextTokens) -> None:
        """Pass tokens on; returns when their KV is computed, or the request generates.

        Raises:
            StandbyError: there is no such request, or it has other tokens.
            BatonError: the request failed.
        """
        orders = self._orders.get(standby)
        if orders is None:
            raise StandbyError(f"no request waits for tokens as {standby[:64]!r}: it has ended")
        order = _Order(tokens, asyncio.get_running_loop().create_future())
        orders.put_nowait(order)
        await order.done

    @contextmanager
    def open(self, standby: str) -> Iterator[asyncio.Queue[_Order]]:
        """While the block runs, orders for `standby` come; those left at its end are refused.

        Raises:
            InvalidRequestError: another request has this id.
        """
        if standby in self._orders:
            raise InvalidRequestError(f"another request waits for tokens as {standby!r}")
        orders = self._orders[standby] = asyncio.Queue()
        try:
            yield orders
        finally:
            del self._orders[standby]
            while not orders.empty():
                orders.get_nowait().finish(StandbyError("the request does not wait any more"))


class StandbyRequest:
    """One request that waits. Owner: the task that serves it.

    `answer` is what the client has: each token that comes is added to it.
    """

    def __init__(  # noqa: PLR0913 - all of one request
        self,
        generation: Generation,
        request: GenerationRequest,
        known: KnownTokens,
        *,
        answer: OutputProcessor,
        stream: AnswerStream,
        client: EngineClient,
        tokenizer: Tokenizer,
    ) -> None:
        self._generation, self._request, self._known = generation, request, known
        self._answer, self._stream, self._client = answer, stream, client
        self._tokenizer = tokenizer
        self._num_prompt_tokens = len(request.prompt_ids) - len(known.given)

    async def wait_ready(self) -> None:
        """Return when the KV of all known tokens is there.

        Raises:
            BatonError: the request failed.
        """
        await self._stream.wait_computed(len(self._request.prompt_ids))

    async def follow(self, orders: asyncio.Queue[_Order]) -> KnownTokens:
        """Take tokens until the request is to generate: what the client has then.

        Raises:
            DeadlineError: no tokens came for a while.
            BatonError: the request failed.
        """
        while True:
            try:
                async with asyncio.timeout(NEXT_TOKENS_TIMEOUT_S):
                    order = await orders.get()
            except TimeoutError:
                raise DeadlineError(
                    f"no tokens came for {NEXT_TOKENS_TIMEOUT_S:g} s; the gateway that wanted to "
                    "move a stream here has failed, or its stream is very slow"
                ) from None
            try:
                if await self._carry_out(order):
                    return self._known
            except (StandbyError, InvalidRequestError) as exc:
                order.finish(exc)  # the sender's fault: the request is what it was
            except BaseException:
                order.finish(StandbyError("the request failed"))
                raise

    async def _carry_out(self, order: _Order) -> bool:
        """Whether the request generates from here on."""
        tokens, known = order.tokens, self._known
        num_known = len(known.given) + len(known.again)
        if tokens.start != num_known:
            raise StandbyError(f"{num_known} tokens are known here, not {tokens.start}")
        if num_known + len(tokens.token_ids) >= self._generation.sampling.max_tokens:
            raise StandbyError("the answer may not have so many tokens")
        extended = await known.extended(tokens.token_ids, self._generation, self._tokenizer)
        fresh = extended.given[len(known.given) :]
        if tokens.generates and not fresh:
            raise StandbyError("the text of these tokens was not sent: they are to be sampled here")
        if fresh:
            self._client.extend(self._request.id, fresh, generates=tokens.generates)
        for token_id in fresh:
            self._answer.push(NewToken(RequestId(""), SampledToken(token_id), 0))
        self._known = extended
        if not tokens.generates:
            await self._stream.wait_computed(self._num_prompt_tokens + len(extended.given))
        order.finish()
        return tokens.generates


def check_standby(request: GenerationRequest) -> None:
    """Pass, or raise.

    Raises:
        InvalidRequestError: the request cannot wait for tokens.
    """
    num_tokens = len(request.prompt_ids)
    match request.kind:
        case PrefillRequest():
            raise InvalidRequestError("a prefill request waits for no tokens")
        case DecodeRequest(ticket) if ticket.count_handed_over(num_tokens) >= num_tokens:
            raise InvalidRequestError("a request that waits for tokens computes its last one")
        case _:
            pass
