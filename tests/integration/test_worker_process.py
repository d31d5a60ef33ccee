"""One worker's process: its address, its signals, its parent, and what it does for a client."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.free_ports import find_free_port
from tests.integration.worker_process import WorkerProcess, starting
from tests.lazy_modules import openai

if TYPE_CHECKING:
    from collections.abc import Generator

pytest.importorskip("torch")

PROMPT = "It is a truth universally acknowledged"


@pytest.fixture(scope="module")
def worker() -> Generator[WorkerProcess]:
    with starting("solo") as process:
        process.wait_until_ready()
        yield process
        assert process.end() == 0


@pytest.fixture
def client(worker: WorkerProcess) -> Generator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_completes(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2
    )
    parts = list(
        client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = whole.choices[0].text
    assert "".join(p.choices[0].text for p in parts if p.choices) == text
    assert parts[-1].usage is not None
    assert whole.usage is not None
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == text
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs or [])


def test_openais_client_chats(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Who is Emma?"}],
        "max_completion_tokens": 12,
        "temperature": 0.8,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**options)
    parts = list(client.chat.completions.create(stream=True, **options))
    content = whole.choices[0].message.content
    assert "".join(p.choices[0].delta.content or "" for p in parts) == content
    assert parts[0].choices[0].delta.role == "assistant"
    assert whole.choices[0].logprobs is not None
    for entry in whole.choices[0].logprobs.content or []:
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token


def test_a_cached_prefix_is_in_the_usage(client: openai.OpenAI) -> None:
    prompt = "The same long beginning of a letter, again and again. " * 5
    usages = [
        client.completions.create(model="demo", prompt=prompt, max_tokens=1).usage for _ in range(2)
    ]
    cached = [
        usage.prompt_tokens_details.cached_tokens
        for usage in usages
        if usage is not None and usage.prompt_tokens_details is not None
    ]
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] >= 16


def test_openais_client_understands_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="demo", prompt="a", max_tokens=100_000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as several:
        client.completions.create(model="demo", prompt="a", n=2)
    assert (several.value.code, several.value.param) == ("unsupported_parameter", "n")


def test_a_stop_string_is_kept_from_the_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0}
    whole = client.completions.create(max_tokens=30, **options).choices[0].text
    stop = whole[10:16]
    cut = client.completions.create(max_tokens=30, stop=stop, **options).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(worker: WorkerProcess, stream: bool) -> None:
    async def scenario() -> None:
        # The event loop of this test stands in for the network: sockets close at once.
        async with aiohttp.ClientSession() as session:
            body = {"model": "demo", "prompt": "a", "max_tokens": 3000, "stream": stream}
            asking = asyncio.create_task(
                session.post(f"{worker.url}/v1/completions", json={**body, "ignore_eos": True})
            )
            await _until_running(session, worker.url, 1)
            if stream:
                (await asking).close()
            asking.cancel()
            before = await _count_tokens(session, worker.url)
            await _until_running(session, worker.url, 0)
            # Those of some milliseconds, on an idle machine.
            assert await _count_tokens(session, worker.url) - before < 1500

    asyncio.run(scenario())


async def _until_running(session: aiohttp.ClientSession, url: str, num_running: int) -> None:
    wanted = f'baton_worker_inflight_requests{{state="running"}} {float(num_running)}'
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/metrics") as reply:
                if wanted in await reply.text():
                    return
            await asyncio.sleep(0.005)


async def _count_tokens(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    (line,) = (line for line in lines if line.startswith("baton_worker_output_tokens_total "))
    return float(line.rpartition(" ")[2])


def test_a_long_prompt_does_not_stall_the_loop(worker: WorkerProcess) -> None:
    async def scenario() -> None:
        body = {"model": "demo", "prompt": "some words that are all alike " * 60_000}
        async with aiohttp.ClientSession() as session:
            data = io.BytesIO(json.dumps(body).encode())
            asking = asyncio.create_task(session.post(f"{worker.url}/v1/completions", data=data))
            began_at, slowest_s = time.monotonic(), 0.0
            while not asking.done():
                asked_at = time.monotonic()
                async with session.get(f"{worker.url}/health") as health:
                    assert health.status == 200
                slowest_s = max(slowest_s, time.monotonic() - asked_at)
                await asyncio.sleep(0.01)
            reply, took_s = await asking, time.monotonic() - began_at
            assert reply.status == 400
            assert (await reply.json())["error"]["code"] == "context_length_exceeded"
            # On the event loop all else would wait for as long as this prompt takes: over a second.
            assert slowest_s < max(1.0, 0.8 * took_s)

    asyncio.run(scenario())


def test_sigterm_finishes_what_is_open_and_ends_with_0() -> None:
    probe_port = find_free_port()

    async def probe(session: aiohttp.ClientSession, path: str) -> int:
        async with session.get(f"http://127.0.0.1:{probe_port}{path}") as answer:
            return answer.status

    async def scenario(process: WorkerProcess) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": "demo", "prompt": "a", "max_tokens": 60, "ignore_eos": True}
            url = f"{process.url}/v1/completions"
            asking = asyncio.create_task(session.post(url, json=body))
            await _until_running(session, process.url, 1)
            assert await probe(session, "/ready") == 200
            assert await probe(session, "/live") == 200
            assert await probe(session, "/metrics") == 404
            process.popen.send_signal(signal.SIGTERM)
            assert (await asyncio.to_thread(process.next_event))["event"] == "draining"
            async with session.get(f"{process.url}/health") as health:
                assert health.status == 503
            assert await probe(session, "/ready") == 503
            assert await probe(session, "/live") == 200
            async with session.post(url, json=body) as late:
                assert late.status == 503
                assert late.headers["retry-after"] == "1"
            reply = await asking
            assert reply.status == 200
            assert (await reply.json())["usage"]["completion_tokens"] == 60

    with starting("ending", probe_port=probe_port) as process:
        loading = process.next_event()
        assert loading["event"] == "loading"
        process.wait_until_ready()
        assert process.url == loading["url"]
        asyncio.run(scenario(process))
        assert process.popen.wait(30) == 0


def test_drain_has_an_end_and_a_second_signal_ends_at_once() -> None:
    async def scenario(process: WorkerProcess) -> None:
        async with aiohttp.ClientSession() as session:
            body = {"model": "demo", "prompt": "a", "max_tokens": 3000, "ignore_eos": True}
            url = f"{process.url}/v1/completions"
            async with session.post(url, json={**body, "stream": True}) as reply:
                assert reply.status == 200
                process.popen.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.next_event)
                process.popen.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.popen.wait, 5) == 128 + signal.SIGTERM

    with starting("stubborn") as process:
        process.wait_until_ready()
        asyncio.run(scenario(process))


def test_a_taken_port_is_said_before_the_model_loads() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        given = {"name": "late", "port": port}
        result = subprocess.run(
            [sys.executable, "-m", "tests.integration.worker_process", json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode != 0
    assert f"127.0.0.1:{port} is taken by another process" in result.stderr
    assert "--port 0" in result.stderr
    assert result.stdout == ""


def test_a_worker_ends_with_the_process_it_is_tied_to() -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            with starting("tied", parent_pid=other.pid) as process:
                assert process.next_event()["event"] == "loading"
                other.kill()
                assert process.popen.wait(30) in {-signal.SIGTERM, 0}
        finally:
            other.kill()
