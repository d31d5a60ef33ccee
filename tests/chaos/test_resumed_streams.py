"""SIGKILL of one of two decode workers under streams: their clients do not notice."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from baton.testing.fleet import Fleet, FleetProcess
from tests.chaos.clients import Prompts
from tests.chaos.conftest import ENGINE, GATEWAY, KEY, SEED, run
from tests.chaos.process_state import read_load, until
from tests.preloaded import start_preloaded
from tests.stream_answers import StreamedAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS = 600
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 7}
USAGE = {"stream_options": {"include_usage": True}}


@dataclass
class Client:
    """A stream that is read as it comes."""

    path: str
    body: dict[str, Any]
    answer: StreamedAnswer = field(default_factory=StreamedAnswer)

    async def ask(self, session: aiohttp.ClientSession, url: str) -> StreamedAnswer:
        body = {"model": "demo", "stream": True, **self.body}
        async with session.post(url + self.path, json=body) as response:
            assert response.status == 200, await response.text()
            rest = b""
            async for chunk in response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    self.answer.read(event)
            assert not rest
        return self.answer


@dataclass
class Decodes:
    """Two prefill workers, two decode workers, one of which dies, and their gateway."""

    fleet: Fleet
    prefills: list[FleetProcess]
    decodes: list[FleetProcess]
    gateway: FleetProcess = field(init=False)

    def settle(self, **settings: object) -> None:
        for worker in (*self.prefills, *self.decodes):
            worker.wait_ready()
        self.gateway = self.fleet.start_gateway(
            self.prefills, self.decodes, settings=GATEWAY | settings
        )


@pytest.fixture
def workers(tmp_path: Any) -> Iterator[Decodes]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY)
    with Fleet(tmp_path, environment, start=start_preloaded) as fleet:
        started = Decodes(
            fleet,
            [fleet.start_worker(f"p{i}", "prefill", ENGINE) for i in range(2)],
            [fleet.start_worker(f"d{i}", "decode", ENGINE) for i in range(2)],
        )
        started.settle()
        yield started
        fleet.stop()


async def read_counts(session: aiohttp.ClientSession, gateway: FleetProcess) -> dict[str, float]:
    async with session.get(gateway.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def resumed(counts: dict[str, float], result: str = "resumed") -> float:
    return counts[f'baton_gateway_resumed_streams_total{{result="{result}"}}']


async def kill_under(
    session: aiohttp.ClientSession, workers: Decodes, clients: list[Client]
) -> list[StreamedAnswer]:
    """Ask all, kill a decode worker that has streams once all have begun; the answers."""
    asking = [asyncio.create_task(c.ask(session, workers.gateway.url)) for c in clients]

    async def flow() -> bool:
        return all(c.answer.num_events > 8 for c in clients)

    await until("all streams flow", flow, 20.0)
    victim = workers.decodes[0]
    load = await read_load(session, victim)
    assert load.running > 0, "it has streams to lose"
    victim.kill()
    assert not all(task.done() for task in asking)
    answers = await asyncio.gather(*asking)
    counts = await read_counts(session, workers.gateway)
    assert resumed(counts) == load.running
    assert counts["baton_gateway_resumed_tokens_total"] >= load.running
    return answers


def same(answer: StreamedAnswer) -> StreamedAnswer:
    """What must be the same in every run: log-probabilities to a rounding, usage without caches."""
    usages = [{n: v for n, v in u.items() if n != "prompt_tokens_details"} for u in answer.usages]
    return replace(answer, ids=set(), num_events=0, logprobs=[], usages=usages)


def test_decode_dies_under_streams_of_all_kinds(workers: Decodes, oracle: FleetProcess) -> None:
    prompts = Prompts(SEED)
    messages = {"messages": [{"role": "user", "content": "What are you?"}]}
    bodies = [
        (COMPLETIONS, {**GREEDY, "prompt": prompts.make(40)}),
        (COMPLETIONS, {**GREEDY, "prompt": prompts.make(90), "logprobs": 2, **USAGE}),
        (COMPLETIONS, {**SEEDED, "prompt": prompts.make(50), "logprobs": 0}),
        (
            COMPLETIONS,
            {**SEEDED, "prompt": prompts.make(50), "stop": ["no such text", "\ufffd\ufffd-"]},
        ),
        (CHAT, {**GREEDY, **messages, **USAGE}),
        (CHAT, {**SEEDED, **messages, "logprobs": True, "top_logprobs": 1, **USAGE}),
        (CHAT, {**GREEDY, **messages, "logprobs": True, "min_tokens": 500}),
        (COMPLETIONS, {**SEEDED, "seed": None, "prompt": prompts.make(40), "logprobs": 0}),
    ]

    async def scenario(session: aiohttp.ClientSession) -> None:
        oracle.wait_ready()
        answers = await kill_under(session, workers, [Client(*each) for each in bodies])
        for (path, body), answer in zip(bodies, answers, strict=True):
            assert not answer.is_broken, answer.errors
            assert len(answer.ids) == 1
            assert answer.roles == (["assistant"] if path == CHAT else [])
            assert answer.finishes == ["length"]
            if body.get("seed", 0) is None:  # by no run the same, and whole
                assert len(answer.tokens) == NUM_TOKENS
                continue
            expected = await Client(path, body).ask(session, oracle.url)
            assert same(answer) == same(expected)
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)

    run(scenario)
