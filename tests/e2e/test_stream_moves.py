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
from baton.net.tls import ClusterTls
from baton.testing.fleet import Fleet, FleetProcess
from tests.e2e.client import KEY, TIMEOUT
from tests.e2e.conftest import ENGINE, SPEC
from tests.preloaded import start_preloaded
from tests.stream_answers import SeveralClient, StreamClient, StreamedAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS, NUM_PROMPT = 120, 300
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 7}
USAGE = {"stream_options": {"include_usage": True}}
TLS = {"security.tls": "control"}
NOTICE_S = 30.0
"""The default of `preemption.notice_s`: by then it must have left."""
GATEWAY = {**TLS, "gateway.probe_interval_s": 0.2, "gateway.abandon_after_s": 150.0}


class Workers:
    """Decode workers of one model without a prefill worker, and a gateway for some of them."""

    def __init__(self, fleet: Fleet, engine: dict[str, object]) -> None:
        self.fleet, self._engine = fleet, engine
        self._num_started = 0

    def start(self, num: int, **settings: object) -> list[FleetProcess]:
        started = []
        for _ in range(num):
            name = f"d{self._num_started}"
            self._num_started += 1
            started.append(self.fleet.start_worker(name, "decode", self._engine | settings))
        for worker in started:
            worker.wait_ready()
        return started

    def start_gateway(self, decodes: list[FleetProcess], **settings: object) -> FleetProcess:
        return self.fleet.start_gateway([], decodes, settings=GATEWAY | settings)


@pytest.fixture(scope="module")
def standing_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    model = tmp_path_factory.mktemp("model") / "demo"
    make_random_model(model, replace(SPEC, num_layers=6))  # streams that last
    engine = ENGINE | {"worker.model": str(model), "worker.served_model_name": "demo"} | TLS
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        yield Workers(fleet, engine)


@pytest.fixture(scope="module")
def oracle(standing_workers: Workers) -> FleetProcess:
    return standing_workers.start_gateway(standing_workers.start(1))


@pytest.fixture(scope="module")
def target(standing_workers: Workers) -> FleetProcess:
    """To which streams move; the last test kills it."""
    (started,) = standing_workers.start(1)
    return started


@pytest.fixture
def workers(standing_workers: Workers) -> Iterator[Workers]:
    """What a test starts ends with it: gateways look at their workers all the time."""
    processes = standing_workers.fleet.processes
    num_standing = len(processes)
    yield standing_workers
    started = processes[num_standing:]
    for process in started:  # all first: each takes a while to end on a busy machine
        process.send(signal.SIGKILL)
    for process in started:
        process.kill()


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


async def until_true(condition: Callable[[], Awaitable[bool]], within_s: float = 30.0) -> None:
    ends_at = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < ends_at, "it did not happen in time"
        await asyncio.sleep(0.02)


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
    (COMPLETIONS, {**GREEDY, "prompt": prompt(2), "logprobs": 2, **USAGE}),
    (COMPLETIONS, {**SEEDED, "prompt": prompt(4), "stop": ["no such text", "\ufffd\ufffd-"]}),
    (CHAT, {**SEEDED, **MESSAGES, "logprobs": True, "top_logprobs": 1, **USAGE}),
    (CHAT, {**GREEDY, **MESSAGES, "min_tokens": 80, "cache_salt": "mine"}),
]


async def count_streams(
    session: aiohttp.ClientSession, gateway: FleetProcess, worker: FleetProcess
) -> float:
    counts = await read_counts(session, gateway)
    labels = f'model="demo",part="decode",worker="{worker.name}"'
    return counts.get(f"baton_router_requests{{{labels}}}", 0.0)


async def drain(
    session: aiohttp.ClientSession, gateway: FleetProcess, worker: FleetProcess
) -> None:
    """Have it end, and wait until the gateway knows that."""
    worker.send(signal.SIGTERM)
    line = f'role="decode",state="draining",url="{worker.url}"'

    async def is_known() -> bool:
        counts = await read_counts(session, gateway)
        return counts[f"baton_gateway_worker_state{{{line}}}"] == 1

    await until_true(is_known)


_expected: dict[str, StreamedAnswer] = {}


async def expect(
    session: aiohttp.ClientSession, oracle: FleetProcess, path: str, body: dict[str, Any]
) -> StreamedAnswer:
    """What an undisturbed worker answers; each body is asked once."""
    key = f"{path} {body}"
    if key not in _expected:
        _expected[key] = await StreamClient(path, body).ask(session, oracle.url)
    return _expected[key]


async def check(
    session: aiohttp.ClientSession,
    oracle: FleetProcess,
    bodies: list[tuple[str, dict[str, Any]]],
    answers: list[StreamedAnswer],
) -> None:
    """They are whole, and as an undisturbed worker gives them."""
    expecting = [expect(session, oracle, *each) for each in bodies]
    for answer, expected in zip(answers, await asyncio.gather(*expecting), strict=True):
        assert not answer.is_broken, answer.errors
        assert len(answer.ids) == 1
        assert same(answer) == same(expected)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_a_preempted_workers_streams_go_on_elsewhere(
    workers: Workers, target: FleetProcess, oracle: FleetProcess, tmp_path: Path
) -> None:
    """Its notice has the effect of SIGTERM, which the other tests send, and names the reason."""
    notices = {"source": "file", "file": f"{tmp_path}/{{worker}}", "interval_s": 0.1}
    settings = {f"preemption.{name}": value for name, value in notices.items()}
    (first,) = workers.start(1, **settings)
    gateway = workers.start_gateway([first, target])
    several = {**SEEDED, "prompt": prompt(9), "logprobs": 0, "n": 2}

    async def scenario(session: aiohttp.ClientSession) -> None:
        asking_several = asyncio.create_task(SeveralClient(several).ask(session, gateway.url))
        asking = await begin(session, gateway, [StreamClient(*each) for each in BODIES])
        num = await count_streams(session, gateway, first)
        assert num > 1, "it has streams to lose"
        (tmp_path / first.name).touch()
        await until(lambda: not first.is_alive, NOTICE_S)
        assert not all(task.done() for task in asking), "it did not wait for its streams' ends"
        assert first.popen.poll() == 0
        assert "its machine will be taken (file: " in gateway.log.read_text()
        answers, both = await asyncio.gather(*asking), await asking_several
        counts = await read_counts(session, gateway)
        assert moved(counts) == num
        assert counts["baton_gateway_preempted_workers_total"] == 1
        assert counts["baton_gateway_move_pause_seconds_count"] == num
        assert counts['baton_gateway_resumed_streams_total{result="resumed"}'] == 0

        await check(session, oracle, BODIES, answers)
        alone = {name: value for name, value in several.items() if name != "n"}
        seeds = [(COMPLETIONS, {**alone, "seed": 7 + index}) for index in range(2)]
        await check(session, oracle, seeds, [both[0], both[1]])
        num_seen = num_received_tokens = 0
        for answer in answers:
            trace = await read_trace(session, gateway, id_of(answer))
            if trace["gateway"]["moves"]:
                num_seen += 1
                num_received_tokens += await check_kv_came(session, gateway, target, trace)
        assert num_received_tokens > 0
        assert num - num_seen in {0, 1, 2}, "those of `several` have traces of their own"

    run(scenario)


async def check_kv_came(
    session: aiohttp.ClientSession,
    gateway: FleetProcess,
    target: FleetProcess,
    trace: dict[str, Any],
) -> int:
    """The new worker got all whole blocks that it lacked from the old one; tokens of those."""
    handoff = await read_trace(session, gateway, f"{trace['id']}-move1")
    taken = trace["decode"]
    assert handoff["gateway"]["mode"] == taken["mode"] == "push"
    assert trace["gateway"]["peer"] == taken["worker"] == target.name
    num_there = taken["num_received_tokens"] + taken["num_cached_tokens"]
    assert num_there > 0
    assert num_there % 16 == 0
    assert 0 < taken["num_prompt_tokens"] - num_there <= 16
    assert taken["fallbacks"] == []
    (move,) = trace["gateway"]["moves"]
    assert move.endswith("(drain)"), "its request waited there"
    return int(taken["num_received_tokens"])


async def drain_one(
    session: aiohttp.ClientSession,
    workers: Workers,
    oracle: FleetProcess,
    bodies: list[tuple[str, dict[str, Any]]],
    **settings: object,
) -> tuple[float, float]:
    """Half of some streams move to the worker of the other half: how many, and its preemptions."""
    first, second = await asyncio.to_thread(workers.start, 2, **settings)
    gateway = await asyncio.to_thread(workers.start_gateway, [first, second])
    asking = await begin(session, gateway, [StreamClient(*each) for each in bodies])
    num = await count_streams(session, gateway, first)
    first.send(signal.SIGTERM)
    answers = await asyncio.gather(*asking)
    await until(lambda: not first.is_alive)
    assert first.popen.poll() == 0
    await check(session, oracle, bodies, list(answers))
    counts = await read_counts(session, gateway)
    assert counts['baton_gateway_resumed_streams_total{result="resumed"}'] == 0
    assert moved(counts, "lost") == 0
    assert moved(counts) + moved(counts, "ended") <= num
    async with session.get(second.url + "/metrics", ssl=ClusterTls(KEY).dialing) as response:
        lines = (await response.text()).splitlines()
    (line,) = (each for each in lines if each.startswith("baton_worker_preemptions_total "))
    return moved(counts), float(line.rpartition(" ")[2])


@pytest.mark.every
def test_sixteen_streams_move_at_a_time(workers: Workers, oracle: FleetProcess) -> None:
    """Eight at a time; those that wait go on where they are."""
    bodies = [
        (COMPLETIONS, {**sampling, "prompt": prompt(100 + number, 60), "max_tokens": 140})
        for number, sampling in enumerate([GREEDY, SEEDED] * 16)
    ]

    async def scenario(session: aiohttp.ClientSession) -> None:
        num_moved, _ = await drain_one(session, workers, oracle, bodies)
        assert num_moved > 8, "the others may have ended before their turn"

    run(scenario)


def test_streams_move_to_a_worker_that_lacks_blocks(workers: Workers, oracle: FleetProcess) -> None:
    """It has blocks for two of four streams: requests that wait there lose theirs, too."""
    asked = {**GREEDY, "max_tokens": 150}
    bodies = [(COMPLETIONS, {**asked, "prompt": prompt(200 + n, 200)}) for n in range(4)]

    async def scenario(session: aiohttp.ClientSession) -> None:
        settings = {"engine.num_blocks": 52}
        num_moved, num_preemptions = await drain_one(session, workers, oracle, bodies, **settings)
        assert num_moved > 0
        assert num_preemptions > 0

    run(scenario)


LONG = {**SEEDED, "prompt": prompt(11), "logprobs": 0, "max_tokens": 240}


async def begin_at(
    session: aiohttp.ClientSession,
    gateway: FleetProcess,
    wanted: FleetProcess,
    other: FleetProcess,
) -> tuple[StreamClient, asyncio.Task[StreamedAnswer]]:
    """One stream, at the wanted worker, and none at the other one."""
    strays = []
    while True:
        client = StreamClient(COMPLETIONS, LONG)
        (asking,) = await begin(session, gateway, [client])
        if await count_streams(session, gateway, wanted):
            break
        strays.append(asking)
    for stray in strays:
        stray.cancel()
    await until_unused(session, gateway, other)
    return client, asking


async def until_unused(
    session: aiohttp.ClientSession, gateway: FleetProcess, worker: FleetProcess
) -> None:
    async def is_unused() -> bool:
        return await count_streams(session, gateway, worker) == 0

    await until_true(is_unused)


async def begin_move(
    session: aiohttp.ClientSession, workers: Workers, target: FleetProcess
) -> tuple[FleetProcess, FleetProcess, StreamClient, asyncio.Task[StreamedAnswer]]:
    """A stream that is being moved from a worker that drains: the other one does not answer."""
    # On a busy machine a stream lasts longer than a drain does by default.
    (source,) = await asyncio.to_thread(workers.start, 1, **{"worker.drain_timeout_s": 110.0})
    settings = {"gateway.probe_timeout_s": 60.0}  # a worker that is stopped can be chosen
    gateway = await asyncio.to_thread(workers.start_gateway, [source, target], **settings)
    client, asking = await begin_at(session, gateway, source, target)
    target.send(signal.SIGSTOP)
    await drain(session, gateway, source)
    trace = f"{source.url}/baton/v1/traces/{id_of(client.answer)}-move1"

    async def has_begun() -> bool:
        async with session.get(trace, ssl=ClusterTls(KEY).dialing) as response:
            return response.status == 200

    await until_true(has_begun)
    return source, gateway, client, asking


@pytest.mark.every  # the new one dies below, and running ones in chaos/test_resumed_streams.py
def test_the_old_worker_dies_in_mid_move(
    workers: Workers, target: FleetProcess, oracle: FleetProcess
) -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        source, gateway, _, asking = await begin_move(session, workers, target)
        source.kill()
        target.send(signal.SIGCONT)
        await check(session, oracle, [(COMPLETIONS, LONG)], [await asking])
        counts = await read_counts(session, gateway)
        assert moved(counts, "ended") + moved(counts, "not_copied") == 1
        assert moved(counts) == 0
        assert counts['baton_gateway_resumed_streams_total{result="resumed"}'] == 1

    run(scenario)


def test_the_client_leaves_in_mid_move(workers: Workers, target: FleetProcess) -> None:
    async def scenario(session: aiohttp.ClientSession) -> None:
        source, gateway, _, asking = await begin_move(session, workers, target)
        asking.cancel()
        await until(lambda: not source.is_alive)
        assert source.popen.poll() == 0
        target.send(signal.SIGCONT)

        async def is_counted() -> bool:
            return moved(await read_counts(session, gateway), "ended") == 1

        await until_true(is_counted)
        await until_unused(session, gateway, target)

    run(scenario)


def test_the_new_worker_dies_in_mid_move(
    workers: Workers, target: FleetProcess, oracle: FleetProcess
) -> None:
    """The last test: it kills the worker that the others share."""

    async def scenario(session: aiohttp.ClientSession) -> None:
        source, gateway, _, asking = await begin_move(session, workers, target)
        target.kill()
        await check(session, oracle, [(COMPLETIONS, LONG)], [await asking])
        counts = await read_counts(session, gateway)
        assert moved(counts, "not_copied") == 1
        assert moved(counts) == moved(counts, "ended") == 0
        await until(lambda: not source.is_alive)
        assert source.popen.poll() == 0

    run(scenario)
