"""Ask many prompts at once; read traces and metrics."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

from baton.auth.credentials import Credentials
from baton.net.tls import ClusterTls

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

NUM_ANSWER_TOKENS = 10
TIMEOUT = aiohttp.ClientTimeout(total=240)
KEY = Credentials.generate()
TLS = ClusterTls(KEY).dialing


@dataclass(frozen=True)
class Answer:
    """Tokens as the API names them, with the log probability of each."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...] = field(compare=False)
    num_cached: int = field(compare=False)
    request_id: str = field(compare=False)


def make_prompts(num_prompts: int, *, seed: int, longest: int = 4000) -> list[list[int]]:
    """Random token ids, lengths from 1 to `longest` spread evenly on a logarithmic scale."""
    rng = np.random.default_rng(seed)
    lengths = np.unique(np.geomspace(1, longest, num_prompts).astype(int))
    extra = rng.integers(1, longest // 8, num_prompts - len(lengths))
    return [rng.integers(300, 4000, n).tolist() for n in [*lengths.tolist(), *extra.tolist()]]


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> Answer:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NUM_ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    logprobs = answer["choices"][0]["logprobs"]
    return Answer(
        tokens=tuple(logprobs["tokens"]),
        logprobs=tuple(logprobs["token_logprobs"]),
        num_cached=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        request_id=response.headers["x-request-id"],
    )


def ask_all(
    url: str, prompts: Sequence[list[int]], *, at_once: int = 16, tls: ssl.SSLContext = TLS
) -> list[Answer]:
    """Answers in the order of the prompts, `at_once` of them under way at any time."""

    async def run() -> list[Answer]:
        gate = asyncio.Semaphore(at_once)
        connector = aiohttp.TCPConnector(ssl=tls)
        async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as session:

            async def one(prompt: list[int]) -> Answer:
                async with gate:
                    return await ask(session, url, prompt)

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return asyncio.run(run())


def read_trace(gateway_url: str, request_id: str) -> dict[str, object]:
    """The gateway's summary of one request."""

    async def run() -> dict[str, object]:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.get(f"{gateway_url}/debug/requests/{request_id}") as response,
        ):
            assert response.status == 200
            return (await response.json())["summary"]

    return asyncio.run(run())


def stream(url: str, body: dict[str, object], request_id: str) -> str:
    """The whole text of an answer, without what names the request and its time."""

    async def run() -> str:
        headers = {"x-request-id": request_id}
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.post(
                f"{url}/v1/completions", json={"model": "demo", **body}, headers=headers
            ) as response,
        ):
            text = await response.text()
            assert response.status == 200, text
        return re.sub(r'"created":[0-9]+', '"created":0', text.replace(request_id, "ID"))

    return asyncio.run(run())
