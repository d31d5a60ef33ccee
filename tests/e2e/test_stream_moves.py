"""A running stream moves to another decode worker, with its KV; its client does not notice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest

from baton.engines.transformers.random_model import make_random_model
from baton.testing.fleet import Fleet, FleetProcess
from tests.e2e.client import KEY, TIMEOUT
from tests.e2e.conftest import ENGINE, SPEC
from tests.preloaded import start_preloaded
from tests.stream_answers import StreamClient, StreamedAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS, NUM_PROMPT = 300, 400
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 7}
USAGE = {"stream_options": {"include_usage": True}}
TLS = {"security.tls": "control"}
GATEWAY = {**TLS, "gateway.probe_interval_s": 0.2, "gateway.abandon_after_s": 150.0}


class Workers:
    """Decode workers of one model without a prefill worker, and a gateway for some of them."""

    def __init__(self, fleet: Fleet, engine: dict[str, object]) -> None:
        self._fleet, self._engine = fleet, engine
        self._num_started = 0

    def start(self, num: int, **settings: object) -> list[FleetProcess]:
        started = []
        for _ in range(num):
            name = f"d{self._num_started}"
            self._num_started += 1
            started.append(self._fleet.start_worker(name, "decode", self._engine | settings))
        for worker in started:
            worker.wait_ready()
        return started

    def start_gateway(self, decodes: list[FleetProcess], **settings: object) -> FleetProcess:
        return self._fleet.start_gateway([], decodes, settings=GATEWAY | settings)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    model = tmp_path_factory.mktemp("model") / "demo"
    make_random_model(model, SPEC)
    engine = ENGINE | {"worker.model": str(model), "worker.served_model_name": "demo"} | TLS
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        yield Workers(fleet, engine)


@pytest.fixture(scope="module")
def oracle(workers: Workers) -> FleetProcess:
    return workers.start_gateway(workers.start(1))


def prompt(seed: int, num_tokens: int = NUM_PROMPT) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(300, 4000, num_tokens).tolist()
    return ids


def run(scenario: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session, asyncio.timeout(120):
            await scenario(session)

    asyncio.run(main())


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at, "it did not happen in time"
        await asyncio.sleep(0.01)


async def read_counts(session: aiohttp.ClientSession, gateway: FleetProcess) -> dict[str, float]:
    async with session.get(gateway.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def moved(counts: dict[str, float], result: str = "moved", cause: str = "drain") -> float:
    name = "baton_gateway_moved_streams_total"
    return counts[f'{name}{{cause="{cause}",result="{result}"}}']


async def read_trace(
    session: aiohttp.ClientSession, gateway: FleetProcess, request_id: str
) -> dict[str, Any]:
    async with session.get(f"{gateway.url}/debug/requests/{request_id}") as response:
        assert response.status == 200, await response.text()
        trace: dict[str, Any] = await response.json()
        return trace


def id_of(answer: StreamedAnswer) -> str:
    ((name, _),) = answer.ids
    return name.removeprefix("cmpl-").removeprefix("chatcmpl-")


async def begin(
    session: aiohttp.ClientSession, gateway: FleetProcess, clients: list[StreamClient]
) -> list[asyncio.Task[StreamedAnswer]]:
    """Ask all, and return once all answers have begun."""
    asking = [asyncio.create_task(c.ask(session, gateway.url)) for c in clients]
    await until(lambda: all(c.answer.num_events > 8 for c in clients))
    return asking


def same(answer: StreamedAnswer) -> StreamedAnswer:
    """What must be the same in every run: log-probabilities to a rounding, usage without caches."""
    usages = [{n: v for n, v in u.items() if n != "prompt_tokens_details"} for u in answer.usages]
    return replace(answer, ids=set(), num_events=0, logprobs=[], usages=usages)


MESSAGES = {"messages": [{"role": "user", "content": "What are you? " * 20}]}
BODIES = [
    (COMPLETIONS, {**GREEDY, "prompt": prompt(1)}),
    (COMPLETIONS, {**GREEDY, "prompt": prompt(2), "logprobs": 2, **USAGE}),
    (COMPLETIONS, {**SEEDED, "prompt": prompt(3), "logprobs": 0}),
    (COMPLETIONS, {**SEEDED, "prompt": prompt(4), "stop": ["no such text", "\ufffd\ufffd-"]}),
    (CHAT, {**GREEDY, **MESSAGES, **USAGE}),
    (CHAT, {**SEEDED, **MESSAGES, "logprobs": True, "top_logprobs": 1, **USAGE}),
    (CHAT, {**GREEDY, **MESSAGES, "min_tokens": 150, "cache_salt": "mine"}),
]


def test_a_drained_workers_streams_go_on_elsewhere(workers: Workers, oracle: FleetProcess) -> None:
    first, second = workers.start(2)
    gateway = workers.start_gateway([first, second])

    async def scenario(session: aiohttp.ClientSession) -> None:
        asking = await begin(session, gateway, [StreamClient(*each) for each in BODIES])
        counts = await read_counts(session, gateway)
        num = counts['baton_router_requests{model="demo",part="decode",worker="%s"}' % first.name]
        assert num > 1, "it has streams to lose"
        first.send(signal.SIGTERM)
        began = time.monotonic()
        await until(lambda: not first.is_alive)
        print("drained in", time.monotonic() - began, [t.done() for t in asking])
        assert not all(task.done() for task in asking), "it waited for the streams' ends"
        answers = await asyncio.gather(*asking)
        counts = await read_counts(session, gateway)
        print({k: v for k, v in counts.items() if "move" in k and v})
        assert moved(counts) == num
        assert counts['baton_gateway_resumed_streams_total{result="resumed"}'] == 0

        expecting = [StreamClient(*each).ask(session, oracle.url) for each in BODIES]
        num_seen = 0
        for answer, expected in zip(answers, await asyncio.gather(*expecting), strict=True):
            assert not answer.is_broken, answer.errors
            assert len(answer.ids) == 1
            assert same(answer) == same(expected)
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
            trace = await read_trace(session, gateway, id_of(answer))
            if not trace["gateway"]["moves"]:
                continue
            num_seen += 1
            copied = await read_trace(session, gateway, f"{id_of(answer)}-move1")
            print(
                trace["gateway"]["moves"],
                copied["decode"]["num_prompt_tokens"],
                copied["decode"]["num_received_tokens"],
                copied["prefill"] and copied["prefill"]["num_cached_tokens"],
                trace["decode"]["num_prompt_tokens"],
                trace["decode"]["num_cached_tokens"],
            )
        assert num_seen == num

    run(scenario)
