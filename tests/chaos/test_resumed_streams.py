"""SIGKILL of one of two decode workers under streams: their clients do not notice."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from baton.testing.fleet import Fleet, FleetProcess
from tests.chaos.clients import Prompts
from tests.chaos.conftest import ENGINE, GATEWAY, KEY, SEED, freeze, run
from tests.chaos.process_state import until
from tests.preloaded import start_preloaded
from tests.stream_answers import SeveralClient, StreamClient, StreamedAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

    from baton.config.sections import Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS = 140
FROZEN_S = 0.3
"""For what is on its way to a gateway; a worker is not missed for so long."""
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 7}
USAGE = {"stream_options": {"include_usage": True}}


@dataclass
class Decodes:
    """Two prefill workers, two decode workers, one of which dies, and their gateway."""

    fleet: Fleet
    prefills: list[FleetProcess]
    decodes: list[FleetProcess]
    gateway: FleetProcess = field(init=False)

    def settle(self) -> None:
        """Start others in the place of those that have died, and a fresh gateway."""
        self.prefills = [self._renew(worker, "prefill") for worker in self.prefills]
        self.decodes = [self._renew(worker, "decode") for worker in self.decodes]
        for worker in (*self.prefills, *self.decodes):
            worker.wait_ready()
        self.start_gateway()

    def start_gateway(self, **settings: object) -> None:
        if hasattr(self, "gateway"):
            self.gateway.kill()
        self.gateway = self.fleet.start_gateway(
            self.prefills, self.decodes, settings=GATEWAY | settings
        )

    def _renew(self, worker: FleetProcess, role: Role) -> FleetProcess:
        if worker.is_alive:
            return worker
        return self.fleet.start_worker(f"{role}-{len(self.fleet.processes)}", role, ENGINE)


@pytest.fixture(scope="module")
def standing_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decodes]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY)
    logs = tmp_path_factory.mktemp("logs")
    with Fleet(logs, environment, start=start_preloaded, tls="control") as fleet:
        yield Decodes(
            fleet,
            [fleet.start_worker(f"p{i}", "prefill", ENGINE) for i in range(2)],
            [fleet.start_worker(f"d{i}", "decode", ENGINE) for i in range(2)],
        )
        fleet.stop()


@pytest.fixture
def workers(standing_workers: Decodes) -> Decodes:
    standing_workers.settle()
    return standing_workers


async def read_counts(session: aiohttp.ClientSession, gateway: FleetProcess) -> dict[str, float]:
    async with session.get(gateway.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def resumed(counts: dict[str, float], result: str = "resumed") -> float:
    return counts[f'baton_gateway_resumed_streams_total{{result="{result}"}}']


async def begin(
    session: aiohttp.ClientSession, workers: Decodes, clients: list[StreamClient]
) -> list[asyncio.Task[StreamedAnswer]]:
    """Ask all, and return once all answers have begun."""
    asking = [asyncio.create_task(c.ask(session, workers.gateway.url)) for c in clients]

    async def flow() -> bool:
        return all(c.answer.num_events > 8 for c in clients)

    await until("all streams flow", flow, 20.0)
    return asking


async def kill_busy(session: aiohttp.ClientSession, workers: Decodes) -> int:
    """Kill a decode worker that has streams; how many it had.

    It is stopped first, and what it had sent is read: none of its streams ends in between.
    """
    victim = workers.decodes[0]
    await freeze(victim)
    await asyncio.sleep(FROZEN_S)
    counts = await read_counts(session, workers.gateway)
    num = counts[f'baton_router_requests{{model="demo",part="decode",worker="{victim.name}"}}']
    assert num > 0, "it has streams to lose"
    victim.kill()
    return int(num)


def same(answer: StreamedAnswer) -> StreamedAnswer:
    """What must be the same in every run: log-probabilities to a rounding, usage without caches."""
    usages = [{n: v for n, v in u.items() if n != "prompt_tokens_details"} for u in answer.usages]
    return replace(answer, ids=set(), num_events=0, logprobs=[], usages=usages)


def test_decode_dies_under_streams_of_all_kinds(workers: Decodes, oracle: FleetProcess) -> None:
    prompts = Prompts(SEED)
    messages = {"messages": [{"role": "user", "content": "What are you?"}]}
    bodies = [
        (COMPLETIONS, {**GREEDY, "prompt": prompts.make(90), "logprobs": 2, **USAGE}),
        (COMPLETIONS, {**SEEDED, "prompt": prompts.make(50), "logprobs": 0}),
        (
            COMPLETIONS,
            {**SEEDED, "prompt": prompts.make(50), "stop": ["no such text", "\ufffd\ufffd-"]},
        ),
        (CHAT, {**GREEDY, **messages, **USAGE}),
        (CHAT, {**SEEDED, **messages, "logprobs": True, "top_logprobs": 1, **USAGE}),
        (CHAT, {**GREEDY, **messages, "logprobs": True, "min_tokens": 100}),
        (COMPLETIONS, {**SEEDED, "seed": None, "prompt": prompts.make(40), "logprobs": 0}),
    ]

    async def scenario(session: aiohttp.ClientSession) -> None:
        asking = await begin(session, workers, [StreamClient(*each) for each in bodies])
        num_lost = await kill_busy(session, workers)
        assert not all(task.done() for task in asking)
        answers = await asyncio.gather(*asking)
        counts = await read_counts(session, workers.gateway)
        assert resumed(counts) == num_lost
        assert counts["baton_gateway_resumed_tokens_total"] >= num_lost

        oracle.wait_ready()
        expecting = [StreamClient(*each).ask(session, oracle.url) for each in bodies]
        for (path, body), answer, expected in zip(
            bodies, answers, await asyncio.gather(*expecting), strict=True
        ):
            assert not answer.is_broken, answer.errors
            assert len(answer.ids) == 1
            assert answer.roles == (["assistant"] if path == CHAT else [])
            assert answer.finishes == ["length"]
            if body.get("seed", 0) is None:  # by no run the same, and whole
                assert len(answer.tokens) == NUM_TOKENS
            else:
                assert same(answer) == same(expected)
                assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)

    run(scenario)


def test_prefill_dies_and_then_decode_under_several_answers_that_began_early(
    workers: Decodes, oracle: FleetProcess
) -> None:
    """One after the other, and a second decode worker once the first is back."""
    body = {**SEEDED, "prompt": Prompts(SEED + 1).make(80), "logprobs": 0, "n": 2}
    alone = {**SEEDED, "prompt": Prompts(SEED + 2).make(60), "logprobs": 0}

    async def scenario(session: aiohttp.ClientSession) -> None:
        await asyncio.to_thread(workers.start_gateway, **{"gateway.first_token_early": True})
        client = SeveralClient(body)
        asking = asyncio.create_task(client.ask(session, workers.gateway.url))
        (streaming,) = await begin(session, workers, [StreamClient(COMPLETIONS, alone)])

        async def all_flow() -> bool:
            choices = client.answers.values()
            return len(choices) == 2 and all(each.num_events > 8 for each in choices)

        workers.prefills[0].kill()
        await until("both choices flow", all_flow, 20.0)
        num_lost = await kill_busy(session, workers)
        several, answer = await asking, await streaming
        assert resumed(await read_counts(session, workers.gateway)) == num_lost

        oracle.wait_ready()
        for index, one in several.items():
            fields = {name: value for name, value in body.items() if name != "n"}
            seeded = StreamClient(COMPLETIONS, {**fields, "seed": body["seed"] + index})
            assert same(one) == same(await seeded.ask(session, oracle.url))
        expected = await StreamClient(COMPLETIONS, alone).ask(session, oracle.url)
        assert same(answer) == same(expected)

    run(scenario)


ASKED = {**SEEDED, "max_tokens": 12, "logprobs": 1, **USAGE}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, marks=pytest.mark.every),  # with stop strings, that and more
        {"logprobs": None},
        {"stop": []},
    ],
)
def test_an_answer_goes_on_after_any_of_its_events(
    oracle: FleetProcess, change: dict[str, object]
) -> None:
    """Asked as a gateway asks: the rest is the same, wherever it was cut.

    With stop strings, tokens that could begin one are held back, and sent with what follows.
    """
    body = {
        "model": "demo",
        "stream": True,
        "prompt": Prompts(SEED + 3).make(20),
        **ASKED,
        **change,
    }

    async def ask_for_rest(session: aiohttp.ClientSession, resume: object) -> list[bytes]:
        params = {} if resume is None else {"kv_transfer_params": {"baton_resume": resume}}
        headers = {"x-baton-token-ids": "1", "x-baton-created": "1", "x-request-id": "same"}
        url = oracle.url + COMPLETIONS
        async with session.post(url, json={**body, **params}, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["x-baton-token-ids"] == "1"
            return (await response.read()).split(b"\n\n")[:-1]

    async def scenario(session: aiohttp.ClientSession) -> None:
        oracle.wait_ready()
        if "stop" in change:
            plain = StreamedAnswer()
            for event in await ask_for_rest(session, None):
                plain.read(event.partition(b"\n")[2] if event.startswith(b":") else event)
            body["stop"] = [token + "\x01" for token in plain.tokens[2:8]]
        *events, usage, _ = whole = await ask_for_rest(session, None)
        ids: list[int] = []
        num_held_back = 0
        for number, event in enumerate(events, 1):
            line = event.partition(b"\n")[0]
            own = [int(token) for token in line.removeprefix(b":").split(b",")]
            num_held_back += len(own) - 1
            ids += own
            is_complete = number == len(events)
            rest = await ask_for_rest(session, {"token_ids": ids, "is_complete": is_complete})
            assert comparable(rest) == comparable(whole[number:])
        assert num_held_back or "stop" not in change
        assert b'"completion_tokens":%d' % len(ids) in usage

    run(scenario)


def comparable(events: list[bytes]) -> list[bytes]:
    """Without what differs in its last digits, and what a cache had."""
    return [re.sub(rb'-?\d+\.\d+(e-\d+)?|"cached_tokens":\d+', b"", event) for event in events]


@pytest.mark.parametrize(
    ("resume", "stream"),
    [
        ({"token_ids": [1] * 8}, True),  # all that it may have, and not complete
        ({"token_ids": [10**6]}, True),
        ({"token_ids": [-1]}, True),
        ({"token_ids": [1]}, False),
        ({"token_ids": "1"}, True),
    ],
)
def test_what_is_no_part_of_an_answer_is_refused(
    oracle: FleetProcess, resume: object, stream: bool
) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 8, "stream": stream}

    async def scenario(session: aiohttp.ClientSession) -> None:
        params = {"kv_transfer_params": {"baton_resume": resume}}
        url = oracle.wait_ready().url + COMPLETIONS
        async with session.post(url, json={**body, **params}) as response:
            assert response.status == 400

    run(scenario)
