"""Ask vLLM servers, and gateways in front of them; read traces and metrics."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.net.tls import ClusterTls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client.samples import Sample

    from baton.testing.fleet import FleetProcess

NUM_ANSWER_TOKENS = 8
TIMEOUT = aiohttp.ClientTimeout(total=120)
KEY = secrets.token_hex(32)
TLS = ClusterTls(Credentials.of(ClusterKey.from_hex(KEY))).dialing
TIMEOUT_S = 120.0
MAX_PAUSE_S = 0.1
"""To look at vLLM's metrics takes two processes 50 ms together."""
LOGPROB_TOLERANCE = 2e-3

Json = dict[str, object]


@dataclass(frozen=True)
class Answer:
    """Tokens with the log probability of each; equal if the tokens are."""

    tokens: tuple[str, ...]
    text: str = field(compare=False)
    logprobs: tuple[float, ...] = field(compare=False)
    num_cached: int = field(compare=False)
    request_id: str | None = field(compare=False)


def make_prompts(num_prompts: int, *, seed: int, shortest: int, longest: int) -> list[list[int]]:
    """Random token ids that share no prefix, lengths spread evenly on a logarithmic scale."""
    rng = np.random.default_rng(seed)
    lengths = np.geomspace(shortest, longest, num_prompts).round().astype(int)
    return [rng.integers(300, 4000, n).tolist() for n in lengths]


def make_body(prompt: object, **changes: object) -> Json:
    """A completion of greedy tokens, named by their ids."""
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NUM_ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        **changes,
    }


def read_answer(answer: Json, request_id: str | None) -> Answer:
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    return Answer(
        tokens=tuple(logprobs["tokens"]),
        text=choice["text"],
        logprobs=tuple(logprobs["token_logprobs"]),
        num_cached=(answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        request_id=request_id,
    )


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: object, **changes: object
) -> Answer:
    body = make_body(prompt, **changes)
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return read_answer(answer, response.headers.get("x-request-id"))


def ask_all(
    server: FleetProcess, prompts: Sequence[object], *, at_once: int = 8, **changes: object
) -> list[Answer]:
    """Answers in the order of the prompts, `at_once` of them under way at any time."""

    async def run() -> list[Answer]:
        gate = asyncio.Semaphore(at_once)
        async with open_session() as session:

            async def one(prompt: object) -> Answer:
                async with gate:
                    return await ask(session, server.url, prompt, **changes)

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return asyncio.run(run())


def ask_one(server: FleetProcess, prompt: object, **changes: object) -> Answer:
    return ask_all(server, [prompt], **changes)[0]


def check_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same tokens, with the same log probabilities within what float32 leaves open."""
    assert len(answers) == len(expected)
    for answer, oracle in zip(answers, expected, strict=True):
        assert answer == oracle
        assert len(answer.logprobs) == len(oracle.logprobs) > 0
        far = np.abs(np.subtract(answer.logprobs, oracle.logprobs)).max()
        assert far < LOGPROB_TOLERANCE, (answer, oracle)


def open_session() -> aiohttp.ClientSession:
    """Requests to workers and gateways alike."""
    return aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(ssl=TLS))


def post(url: str, body: Json, *, timeout_s: float = TIMEOUT_S) -> tuple[int, Json]:
    """Status and answer, also of an error."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=TLS) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60, context=TLS) as response:
        return response.read().decode()


def read_request(gateway: FleetProcess, request_id: str | None) -> Json:
    """What gateway and workers remember of one request."""
    return json.loads(get_text(f"{gateway.url}/debug/requests/{request_id}"))


def read_summary(gateway: FleetProcess, request_id: str | None) -> Json:
    request = read_request(gateway, request_id)
    assert request["summary"] is not None, request
    return request["summary"]


def read_info(server: FleetProcess) -> Json:
    """What a vLLM server with Baton's connector says of itself: the discovery probe."""
    body = {
        "model": "demo",
        "prompt": [0],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"baton_info": True},
    }
    status, answer = post(f"{server.url}/v1/completions", body)
    assert status == 200, answer
    return answer["kv_transfer_params"]["baton_info"]


def read_metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    samples = _read_samples(url, name)
    return sum(
        each.value
        for each in samples
        if each.name == name and labels.items() <= each.labels.items()
    )


def is_idle(server: FleetProcess) -> bool:
    """Whether vLLM has no request, and all its blocks are free or only cached."""
    gauges = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    names = {f"vllm:{gauge}" for gauge in gauges}
    samples = _read_samples(server.url, *names)
    return not any(sample.value for sample in samples if sample.name in names)


def _read_samples(url: str, *beginnings: str) -> list[Sample]:
    """Those of metrics with these beginnings alone: vLLM has 600, and tests poll."""
    lines = get_text(f"{url}/metrics").splitlines()
    text = "\n".join(line for line in lines if line.startswith(beginnings))
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


def wait_idle(*servers: FleetProcess, within_s: float = 20.0) -> None:
    for server in servers:
        wait_until(lambda server=server: is_idle(server), within_s, server.tail)


def wait_until(
    condition: Callable[[], bool], within_s: float, describe: Callable[[], object] = lambda: ""
) -> float:
    """Poll until it holds; the seconds that this took."""
    begun, pause_s = time.monotonic(), 0.01
    while not condition():
        assert time.monotonic() < begun + within_s, f"not within {within_s} s: {describe()}"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, MAX_PAUSE_S)
    return time.monotonic() - begun
