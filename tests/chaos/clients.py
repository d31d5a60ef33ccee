"""Clients that expect faults: an answer is right, or an error that is said properly, or a bug."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import aiohttp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Prompt: TypeAlias = list[int]

CLIENT_TIMEOUT = aiohttp.ClientTimeout(total=240)
"""No test waits this long, but for a worker that starts on a busy machine: it turns a hang into a
failure."""
SERVER_FAULTS = frozenset({502, 503, 504})

_numbers = itertools.count()


@dataclass(frozen=True)
class Reply:
    """What a client was told of one request: tokens, and an error where it was not answered.

    `status` is the HTTP status; a stream that breaks has 200 and an error.
    """

    tokens: tuple[str, ...]
    error: str | None = field(default=None)
    status: int = field(default=200, compare=False)

    @property
    def is_clean_error(self) -> bool:
        """Whether it failed as the API promises: in the status, or as the stream's last event."""
        return self.error is not None and (self.status == 200 or self.status in SERVER_FAULTS)


@dataclass(frozen=True)
class ClientRequest:
    """A completion request for greedy tokens; every one has an id of its own."""

    prompt: Prompt
    num_tokens: int = 8
    stream: bool = False
    id: str = field(default_factory=lambda: f"chaos-{next(_numbers)}")

    @property
    def body(self) -> dict[str, object]:
        return {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "stream": self.stream,
        }


class Streaming:
    """A client that takes tokens as they come. `tokens` are those that came so far."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def read(self, response: aiohttp.ClientResponse) -> Reply:
        """To the end of the stream, which must be `[DONE]` and then a proper end of the body."""
        error: str | None = None
        done = False
        async for line in response.content:
            if not line.startswith(b"data: "):
                assert not line.strip(), line
                continue
            data = line.removeprefix(b"data: ").strip()
            assert not done, f"after [DONE]: {data!r}"
            if data == b"[DONE]":
                done = True
            elif "error" in (event := json.loads(data)):
                assert error is None, "two errors"
                error = check_error(event)
            else:
                assert error is None, f"after the error: {event}"
                self._take(event)
        assert done, "the stream was closed in silence"
        return Reply(tuple(self.tokens), error)

    def _take(self, event: dict[str, list[dict[str, dict[str, list[str]]]]]) -> None:
        for choice in event["choices"]:
            self.tokens += (choice.get("logprobs") or {}).get("tokens", [])


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    request: ClientRequest,
    streaming: Streaming | None = None,
) -> Reply:
    """Ask, and read all that is said. A broken connection is an exception: nobody promised one."""
    async with session.post(
        f"{url}/v1/completions", json=request.body, headers={"x-request-id": request.id}
    ) as response:
        if response.status == 200 and request.stream:
            assert response.content_type == "text/event-stream"
            return await (streaming or Streaming()).read(response)
        answer = await response.json()
        if response.status != 200:
            return Reply((), check_error(answer), response.status)
    return Reply(tuple(answer["choices"][0]["logprobs"]["tokens"]))


def check_error(answer: dict[str, dict[str, object]]) -> str:
    """The code of an error in OpenAI's shape."""
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"], error
    assert error["type"], error
    return str(error["code"])


class Prompts:
    """Random prompts that share nothing with each other, so that no cache knows them."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def make(self, num_tokens: int) -> Prompt:
        tokens: Prompt = self._rng.integers(300, 4000, num_tokens).tolist()
        return tokens

    def make_mixed(self, num_prompts: int, *, longest: int) -> Sequence[Prompt]:
        """Lengths spread evenly on a logarithmic scale, in random order."""
        lengths = np.geomspace(2, longest, num_prompts).astype(int)
        return [self.make(int(n)) for n in self._rng.permutation(lengths)]
