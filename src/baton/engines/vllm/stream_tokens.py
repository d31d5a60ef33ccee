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
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASKED: Final = (TOKEN_IDS_HEADER.encode(), b"1")
SEED: Final = SEED_HEADER.encode()
PROMPT_TOKENS: Final = PROMPT_TOKENS_HEADER.encode()
DATA: Final = b"data: "
MOST_UNNAMED: Final = 4
"""Outputs without an event, until the gateway gets their tokens by themselves."""


@dataclass(slots=True, eq=False)
class StreamTokens:
    """One request's. Owner: the event loop's thread.

    `given` are the answer's first tokens, which another server generated; `restored` are their
    outputs, which vLLM's serving layer has not seen yet: of `group_sizes` tokens; None: of one.
    `is_reported`: the stream can go on from token ids, and its events name them. `pending` are
    those that were not named, written as in the comment: an item for each of the engine's outputs.
    `send` sends a part of the answer that has begun. `is_open`: the last part was a comment without
    its end. `num_prompt_tokens` are the client's, without `given`. `seed` is the gateway's;
    `is_seeded`: the answer is sampled with it.
    """

    seed: int | None = None

    given: tuple[int, ...] = ()
    group_sizes: list[int] | None = None
    restored: list[Any] = field(default_factory=list)
    is_reported: bool = False
    is_seeded: bool = False
    num_answers: int = 0
    num_prompt_tokens: int = 0
    pending: list[bytes] = field(default_factory=list)
    send: Send | None = None
    is_open: bool = False

    def begin(
        self,
        given: tuple[int, ...] | None,
        num_prompt_tokens: int,
        group_sizes: list[int] | None = None,
    ) -> None:
        """The engine is asked for an answer, which begins with `given`; None: it cannot go on.

        Of several answers in one stream, none does.
        """
        self.num_answers += 1
        self.num_prompt_tokens = num_prompt_tokens
        self.is_reported = given is not None and self.num_answers == 1
        self.given = given or () if self.is_reported else ()
        self.group_sizes = group_sizes
        self.is_seeded = False

    def use_seed(self) -> int | None:
        """The seed to sample the answer with, so that another server samples the same tokens.

        Of several answers in one stream, none gets it: those to the same prompt would be the same.
        """
        self.is_seeded = self.seed is not None and self.num_answers == 1
        return self.seed if self.is_seeded else None

    def add(self, token_ids: Sequence[int]) -> None:
        """The next event ends these tokens, which are one output of the engine's."""
        if self.is_reported and token_ids:
            self.pending.append(", ".join(map(str, token_ids)).encode())

    async def name_pending(self) -> None:
        """Name tokens for which no event has come: the comment of the next one begins now.

        The last of them stays pending, so that the comment has an end.
        """
        if self.send is None:
            return
        named, self.pending = self.pending[:-1], self.pending[-1:]
        begun = (b"" if self.is_open else b":") + b",".join(named) + b","
        self.is_open = True
        await self.send({"type": "http.response.body", "body": begun, "more_body": True})

    def take_restored(self) -> list[Any]:
        """The outputs of `given`, once."""
        restored, self.restored = self.restored, []
        return restored

    def take_comment(self) -> bytes:
        """The line before an event; empty where there is nothing to name."""
        if not self.pending:
            return b""
        comment = (b"" if self.is_open else b":") + b",".join(self.pending) + b"\n"
        self.pending.clear()
        self.is_open = False
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
            stream.send = send
            prompt_tokens = (PROMPT_TOKENS, str(stream.num_prompt_tokens).encode())
            message = {**message, "headers": [*message["headers"], ASKED, prompt_tokens]}
        elif stream.is_seeded:
            message = {
                **message,
                "headers": [*message["headers"], (SEED, str(stream.seed).encode())],
            }
    elif (
        stream.pending
        and (body := message.get("body"))
        and (stream.is_open or body.startswith(DATA))
    ):
        message = {**message, "body": stream.take_comment() + body}
    await send(message)
