"""Which tokens the events of a vLLM server's streams end: ASGI middleware of servers Baton starts.

A gateway that asks for it (`TOKEN_IDS_HEADER`) gets a comment with token ids before each event, as
from Baton's own workers (docs/wire/vllm.md). `resumed_streams` sees the tokens, this the events;
one `StreamTokens` for each HTTP request, found by a context variable, connects the two.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from baton.protocol.worker_http import (
    PROMPT_TOKENS_HEADER,
    SEED_HEADER,
    TOKEN_IDS_HEADER,
    read_seed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASKED: Final = (TOKEN_IDS_HEADER.encode(), b"1")
SEED: Final = SEED_HEADER.encode()
PROMPT_TOKENS: Final = PROMPT_TOKENS_HEADER.encode()
DATA: Final = b"data: "


@dataclass(slots=True, eq=False)
class StreamTokens:
    """One request's. Owner: the event loop's thread.

    `given` are the answer's first tokens, which another server generated; `restored` are their
    outputs, which vLLM's serving layer has not seen yet. `is_reported`: the stream can go on from
    token ids, and its events name them. `pending` are those that no event has named.
    `num_prompt_tokens` are the client's, without `given`. `seed` is the gateway's; `is_seeded`: the
    answer is sampled with it.
    """

    seed: int | None = None

    given: tuple[int, ...] = ()
    restored: list[Any] = field(default_factory=list)
    is_reported: bool = False
    is_seeded: bool = False
    num_answers: int = 0
    num_prompt_tokens: int = 0
    pending: list[int] = field(default_factory=list)

    def begin(self, given: tuple[int, ...] | None, num_prompt_tokens: int) -> None:
        """The engine is asked for an answer, which begins with `given`; None: it cannot go on.

        Of several answers in one stream, none does.
        """
        self.num_answers += 1
        self.num_prompt_tokens = num_prompt_tokens
        self.is_reported = given is not None and self.num_answers == 1
        self.given = given or () if self.is_reported else ()
        self.is_seeded = False

    def use_seed(self) -> int | None:
        """The seed to sample the answer with, so that another server samples the same tokens.

        Of several answers in one stream, none gets it: those to the same prompt would be the same.
        """
        self.is_seeded = self.seed is not None and self.num_answers == 1
        return self.seed if self.is_seeded else None

    def add(self, token_ids: Iterable[int]) -> None:
        """The next event ends these tokens."""
        if self.is_reported:
            self.pending.extend(token_ids)

    def take_restored(self) -> list[Any]:
        """The outputs of `given`, once."""
        restored, self.restored = self.restored, []
        return restored

    def take_comment(self) -> bytes:
        """The line before an event; empty where there is nothing to name."""
        if not self.pending:
            return b""
        comment = b":%b\n" % ",".join(map(str, self.pending)).encode()
        self.pending.clear()
        return comment


CURRENT: Final[ContextVar[StreamTokens | None]] = ContextVar("stream_tokens", default=None)
"""Of the HTTP request that is being served, where its client asked for token ids."""


class TokenIdsMiddleware:
    """Adds the ids of their tokens to the events of streams whose client asked for them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI has it."""
        if scope["type"] != "http" or ASKED not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        seed = next((value for name, value in scope["headers"] if name == SEED), b"")
        stream = StreamTokens(read_seed(seed))
        before = CURRENT.set(stream)
        try:
            await self._app(scope, receive, partial(_send, stream, send))
        finally:
            CURRENT.reset(before)


async def _send(stream: StreamTokens, send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        if stream.is_reported:
            prompt_tokens = (PROMPT_TOKENS, str(stream.num_prompt_tokens).encode())
            message = {**message, "headers": [*message["headers"], ASKED, prompt_tokens]}
        elif stream.is_seeded:
            message = {
                **message,
                "headers": [*message["headers"], (SEED, str(stream.seed).encode())],
            }
    elif stream.pending and message.get("body", b"").startswith(DATA):
        message = {**message, "body": stream.take_comment() + message["body"]}
    await send(message)
