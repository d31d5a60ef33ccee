"""Prompts go where their beginning is cached: real workers, real tokenizer, real events."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from baton.engines.transformers.random_model import RandomModelSpec, make_random_model
from baton.models import DEMO_MODEL_PATH
from baton.router.cost import LEAST_LOADED
from baton.testing.fleet import Fleet, FleetProcess
from tests.e2e.client import KEY
from tests.forked_module import run_forked
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BENCH_SERVE = [sys.executable, "-m", "baton.cli", "bench", "serve"]
BENCH_SERVE += ["--requests", "6", "--concurrency", "1", "--output-len", "8"]
TLS = {"security.tls": "control"}
ENGINE: dict[str, object] = {"engine.dtype": "float32", "engine.num_threads": 1}
QUEUED = 'baton_kv_events_total{type="BlocksExpected"'
CONNECTED = "baton_kv_event_connected{worker="
TEXT = "the prefill worker computes the prompt and the decode worker answers it. " * 12


@pytest.fixture(scope="module")
def standing_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        yield fleet
        assert set(fleet.stop().values()) <= {0, -9}


@pytest.fixture
def fleet(standing_fleet: Fleet, workers: dict[str, FleetProcess]) -> Iterator[Fleet]:
    """What a test starts ends with it: gateways look at their workers all the time."""
    num_standing = len(standing_fleet.processes)
    yield standing_fleet
    for process in standing_fleet.processes[num_standing:]:
        if process.is_alive:
            assert process.stop() == 0


@pytest.fixture(scope="module")
def workers(standing_fleet: Fleet) -> dict[str, FleetProcess]:
    settings = {**ENGINE, **TLS, "worker.model": str(DEMO_MODEL_PATH)}
    settings["worker.served_model_name"] = "demo"
    roles = {"one": "both", "two": "both", "prefill": "prefill", "decode": "decode"}
    started = {n: standing_fleet.start_worker(n, role, settings) for n, role in roles.items()}
    for worker in started.values():
        worker.wait_ready()
    return started


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read().decode()


def chat(gateway: FleetProcess, messages: list[dict], **fields: object) -> tuple[dict, str]:
    """The answer, and the worker that gave it."""
    answer, trace = chat_traced(gateway, messages, **fields)
    return answer, trace["gateway"]["peer"]


def chat_traced(gateway: FleetProcess, messages: list[dict], **fields: object) -> tuple[dict, dict]:
    body = {"model": "demo", "messages": messages, "max_tokens": 12, "temperature": 0} | fields
    request = urllib.request.Request(
        f"{gateway.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer, request_id = json.load(reply), reply.headers["x-request-id"]
    return answer, json.loads(get(f"{gateway.url}/debug/requests/{request_id}"))


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def num_prompt(trace: dict, side: str) -> int:
    return trace[side]["num_prompt_tokens"]


def metric(gateway: FleetProcess, name: str) -> float:
    lines = get(f"{gateway.url}/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def read_settled(gateway: FleetProcess, name: str) -> float:
    """A count that is the same a second later: a gateway is told of earlier events, too."""
    counts = [metric(gateway, name)]

    def has_settled() -> bool:
        time.sleep(1.0)
        counts.append(metric(gateway, name))
        return counts[-1] == counts[-2]

    until(has_settled)
    return counts[-1]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 30 s"
        time.sleep(0.05)


def ask_whole(fleet: Fleet, worker: FleetProcess, messages: list[dict]) -> list[dict]:
    """What one worker alone answers, with nothing cached."""
    alone = fleet.start_gateway([], [], both=[worker], settings=TLS)
    return chat(alone, messages, cache_salt="alone")[0]["choices"]


def test_two_idle_workers_share_a_long_prompt(fleet, workers):
    both = [workers["one"], workers["two"]]
    gateway = fleet.start_gateway([], [], both=both, settings={**TLS, "router.policy": "cost"})
    for number in range(5):  # on a busy machine the second one may begin when all has landed
        messages = [{"role": "user", "content": f"shared by two, {number}. {TEXT * 6}"}]
        answer, trace = chat_traced(gateway, messages)
        assert metric(gateway, "baton_gateway_split_prompts_total") == number + 1
        num_first = num_prompt(trace, "prefill")
        assert 0 < num_first < num_prompt(trace, "decode")
        assert trace["decode"]["num_received_tokens"] == num_first
        assert trace["decode"]["fallbacks"] == []
        first, second = trace["prefill"]["stamps"], trace["decode"]["stamps"]
        if second["prefill_started"] < first["prefill_done"]:
            break
    else:
        raise AssertionError("the second worker never computed while the first did")
    assert answer["choices"] == ask_whole(fleet, workers["one"], messages)
    off = {**TLS, "router.policy": "cost", "router.options.cost.split_prompts": False}
    gateway = fleet.start_gateway([], [], both=both, settings=off)
    chat(gateway, [{"role": "user", "content": f"not shared. {TEXT * 6}"}])
    assert metric(gateway, "baton_gateway_split_prompts_total") == 0


def test_a_shared_prompt_whose_first_worker_dies_is_computed_by_the_second(fleet, workers):
    settings = {**ENGINE, **TLS, "worker.model": str(DEMO_MODEL_PATH)}
    settings["worker.served_model_name"] = "demo"
    dies = fleet.start_worker("dies", "prefill", settings)
    dies.wait_ready()
    settings = {**TLS, "router.policy": "cost"}
    gateway = fleet.start_gateway([dies], [], both=[workers["one"]], settings=settings)
    messages = [{"role": "user", "content": f"its first worker dies. {TEXT * 12}"}]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(chat_traced, gateway, messages)
        until(lambda: metric(gateway, "baton_gateway_split_prompts_total") == 1)
        dies.kill()
        answer, trace = asked.result()
    assert any("computed locally" in line for line in trace["decode"]["fallbacks"])
    assert answer["choices"] == ask_whole(fleet, workers["one"], messages)


@pytest.mark.parametrize("policy", ["prefix", pytest.param("cost", marks=pytest.mark.every)])
def test_turns_of_conversations_go_where_their_kv_is(fleet, workers, policy):
    both = [workers["one"], workers["two"]]
    gateway = fleet.start_gateway([], [], both=both, settings={**TLS, "router.policy": policy})
    talks = [[{"role": "user", "content": f"{policy}, talk {talk}. {TEXT}"}] for talk in range(4)]
    at = {}
    for turn in range(3):
        for talk, messages in enumerate(talks):
            answer, trace = chat_traced(gateway, messages)
            # On a busy machine two may be better than one: then both have it.
            first, *others = trace["gateway"]["peer"].split(" → ")
            assert first in at.setdefault(talk, {first}), "a follow-up turn went elsewhere"
            at[talk].update(others)
            if turn:
                computing = trace["prefill"] or trace["decode"]
                assert computing["num_cached_tokens"] > 150 * turn
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": f"and turn {turn}? {TEXT}"},
            ]
    if policy == "prefix":  # in turns while nothing is cached
        assert sorted(map(sorted, at.values())) == [["one"], ["one"], ["two"], ["two"]]
    predicted = metric(gateway, 'baton_router_cached_tokens_total{kind="predicted"}')
    actual = metric(gateway, 'baton_router_cached_tokens_total{kind="actual"}')
    assert predicted == pytest.approx(actual, rel=0.02)
    assert actual > 4 * 450


def test_what_one_gateway_placed_is_known_to_another_before_it_is_computed(fleet, workers):
    both = [workers["one"], workers["two"]]
    settings = {**TLS, "router.policy": "prefix"}
    first, second = (fleet.start_gateway([], [], both=both, settings=settings) for _ in range(2))
    until(lambda: all(metric(second, f"{CONNECTED}{name}") for name in ('"one"', '"two"')))
    before = read_settled(second, QUEUED)
    chat(first, [{"role": "user", "content": f"its first turn. {TEXT * 5}"}])
    until(lambda: metric(second, QUEUED) == before + 1)
    messages = [{"role": "user", "content": f"which of two? {TEXT * 5}"}]
    with ThreadPoolExecutor(1) as pool:
        placed = pool.submit(chat, first, messages)
        until(lambda: metric(second, QUEUED) == before + 2)
        answer, worker = chat(second, messages)
        expected, same = placed.result()
    assert worker == same
    assert cached(answer) > 150
    assert answer["choices"] == expected["choices"]
    for gateway in (first, second):
        gateway.stop()


def test_kv_on_a_decode_worker_is_found(fleet, workers):
    """`cost`: the second turn is served where the first was answered, without a handoff."""
    settings = {**TLS, "router.policy": "cost", "gateway.mode": "push"}
    gateway = fleet.start_gateway([workers["prefill"]], [workers["decode"]], settings=settings)
    messages = [{"role": "user", "content": f"a long one. {TEXT * 4}"}]
    first, _ = chat(gateway, messages)
    messages.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    messages.append({"role": "user", "content": "and then?"})
    second, worker = chat(gateway, messages)
    assert worker == "decode"
    assert cached(second) > 600


def test_a_prefix_is_loaded_from_the_worker_that_has_it(fleet, workers):
    """Many prompts with one beginning at once: more than its worker should compute alone."""
    both = [workers["one"], workers["two"]]
    settings = {**TLS, "router.policy": "cost", "router.options.cost.objective": "throughput"}
    gateway = fleet.start_gateway([], [], both=both, settings=settings)
    for number in range(5):  # how many of them wait at once, is this machine's business
        beginning = {"role": "user", "content": f"one for all, {number}. {TEXT * 5}"}
        chat(gateway, [beginning])
        talks = [[beginning, {"role": "user", "content": f"{n}. {TEXT * 2}"}] for n in range(8)]
        with ThreadPoolExecutor(len(talks)) as pool:
            answers = list(pool.map(partial(chat_traced, gateway), talks))
        handoffs = [trace for _, trace in answers if trace["decode"]["num_received_tokens"]]
        loaded = [t for t in handoffs if num_prompt(t, "prefill") < num_prompt(t, "decode")]
        if loaded:
            break
    else:
        raise AssertionError("no prefix was loaded")
    for answer, trace in answers:
        if trace in loaded:
            assert cached(answer) == trace["prefill"]["num_cached_tokens"]
    for trace in loaded:
        num_tokens = num_prompt(trace, "decode")
        assert LEAST_LOADED <= trace["decode"]["num_received_tokens"] < num_tokens
        assert trace["prefill"]["num_cached_tokens"] == num_prompt(trace, "prefill")
        assert "prefill_started" in trace["decode"]["stamps"], "the rest is computed there"
        assert trace["summary"]["fallbacks"] == []
    gateway.stop()
    alone = fleet.start_gateway([], [], both=both[:1], settings=TLS)
    for messages, (answer, trace) in zip(talks, answers, strict=True):
        if trace not in loaded[:2]:
            continue
        again, _ = chat(alone, messages, cache_salt="again")
        assert again["choices"] == answer["choices"]


def test_whole_answers_teach_what_prompts_and_steps_take(fleet, workers):
    gateway = fleet.start_gateway(
        [], [], both=[workers["one"]], settings={**TLS, "router.policy": "cost"}
    )
    assert not metric(gateway, "baton_router_cost_error_ratio")
    for n in range(4):
        chat(gateway, [{"role": "user", "content": f"teach {n}. {TEXT * (n + 1)}"}])
    for cost in ("prefill", "step"):
        labels = f'cost="{cost}",model="demo",worker="one"'
        name = f"baton_router_cost_error_ratio{{{labels}}}"
        until(lambda name=name: metric(gateway, name) > 0)


def test_tenants_find_their_own_blocks_alone(fleet, workers):
    both = [workers["one"], workers["two"]]
    gateway = fleet.start_gateway([], [], both=both, settings={**TLS, "router.policy": "prefix"})
    messages = [{"role": "user", "content": f"a secret. {TEXT}"}]
    _, first = chat(gateway, messages, cache_salt="ours")
    for salt, has_it in (("theirs", False), ("ours", True)):
        answer, worker = chat(gateway, messages, cache_salt=salt)
        assert (cached(answer) > 0) is has_it
        assert (worker == first) is has_it
    name = "baton_router_cached_tokens_total"
    predicted, actual = (f'{name}{{kind="{kind}"}}' for kind in ("predicted", "actual"))
    until(lambda: metric(gateway, predicted) == metric(gateway, actual))


def test_what_is_evicted_is_not_counted_on(fleet, tmp_path):
    """A small pool: other prompts push the first one out, and the gateway learns it."""
    model = tmp_path / "model"
    spec = RandomModelSpec(
        num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, max_context_tokens=512
    )
    make_random_model(model, spec)
    settings = {**ENGINE, **TLS, "worker.model": str(model), "worker.served_model_name": "small"}
    worker = fleet.start_worker("small", "both", settings | {"engine.num_blocks": 40}).wait_ready()
    gateway = fleet.start_gateway(
        [], [], both=[worker], settings={**TLS, "router.policy": "prefix"}
    )

    def ask(first: int) -> int:
        body = {"model": "small", "prompt": [first] * 200, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{gateway.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return cached(json.load(reply))

    def held() -> float:
        return metric(gateway, "baton_router_prefix_blocks")

    assert ask(7) == 0
    until(lambda: held() == 12)
    assert ask(7) == 192
    for other in range(20, 24):
        assert ask(other) == 0
    until(lambda: held() <= 40)
    until(lambda: metric(gateway, "baton_kv_events_total") > 0)
    before = metric(gateway, 'baton_router_cached_tokens_total{kind="predicted"}')
    assert ask(7) == 0
    assert metric(gateway, 'baton_router_cached_tokens_total{kind="predicted"}') == before


def test_a_worker_that_died_is_not_asked_for_what_it_had(fleet, workers):
    """The last test: it kills one of the workers."""
    both = [workers["one"], workers["two"]]
    gateway = fleet.start_gateway([], [], both=both, settings={**TLS, "router.policy": "prefix"})
    messages = [{"role": "user", "content": f"who dies? {TEXT}"}]
    _, worker = chat(gateway, messages)
    again, same = chat(gateway, messages)
    assert (same, cached(again) > 150) == (worker, True), "it has the prompt, and is asked for it"
    workers[worker].kill()
    assert not workers[worker].is_alive
    answer, other = chat(gateway, messages)
    assert other != worker
    assert cached(answer) == 0
    assert answer["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]


def test_a_gateway_begins_with_the_costs_of_a_benchmark(fleet, workers, tmp_path):
    """`baton bench serve` teaches one, which is stopped; the next predicts a first placement."""
    costs, model = tmp_path / "costs.json", {"router.costs_file": str(tmp_path / "costs.json")}
    pair = [workers["prefill"]], [workers["decode"]]
    gateway = fleet.start_gateway(*pair, settings={**TLS, **model})
    for input_len in (64, 640):
        done = run_forked(
            [*BENCH_SERVE, "--url", gateway.url, "--input-len", str(input_len)], timeout_s=120
        )
        assert done.returncode == 0, done.stderr
    assert metric(gateway, 'baton_router_cost_error_ratio{cost="handoff",model="demo"') > 0
    gateway.stop()
    kept = json.loads(costs.read_bytes())["models"]["demo"]
    ((distance, handoff),) = kept["handoff"].items()
    assert distance == "same_host"

    again = fleet.start_gateway(*pair, settings={**TLS, **model, "router.policy": "cost"})
    unlearned = fleet.start_gateway(*pair, settings={**TLS, "router.policy": "cost"})
    prompt = {"model": "demo", "prompt": [*range(300, 800)], "max_tokens": 4}

    def predict(gateway: FleetProcess) -> dict[str | None, dict[str, float]]:
        request = urllib.request.Request(
            f"{gateway.url}/debug/route",
            json.dumps(prompt).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return {each["prefill"]: each["figures"] for each in json.load(reply)["candidates"]}

    for line, prefill, part in (
        (handoff, "prefill", "handoff_s"),
        (kept["prefill"], "prefill", "prefill_s"),
        (kept["prefill"], None, "prefill_s"),
    ):
        expected_s = line["fixed_s"] + 500 * line["each_s"]
        assert predict(again)[prefill][part] == pytest.approx(expected_s)
        assert predict(unlearned)[prefill][part] != pytest.approx(expected_s)
