"""`/dashboard` of a gateway: its files, its stream, and the key in front of both."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.gateway.dashboard.stream import MOST_VIEWERS
from baton.gateway.management_key import ManagementKey
from baton.gateway.options import WorkerPrices
from baton.gateway.targets import Targets
from baton.ops.gateway_pages import Gateway
from tests.integration.gateway_cluster import Cluster, run
from tests.integration.scripted_worker import ScriptedWorker, Visit

KEY = "0123456789abcdef0123456789abcdef"


async def say_four(visit: Visit) -> None:
    await visit.start_stream()
    for word in ("a", "b", "c", "d", "e"):
        await visit.token(word)
        await asyncio.sleep(0.02)  # in parts of its own: only then its pace is known
    await visit.done()


async def read_events(content: Any, *names: str) -> dict[str, Any]:
    """The stream's events until one of each name was there; the latest of each."""
    found: dict[str, Any] = {}
    name = ""
    async with asyncio.timeout(60):
        while not set(names) <= found.keys():
            line = (await content.readline()).decode().rstrip("\n")
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                found[name] = json.loads(value)
    return found


def test_page_comes_from_the_gateway_alone() -> None:
    async def scenario(running: Cluster) -> None:
        async with running.client.get(f"{running.url}/dashboard", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (307, "dashboard/")
        async with running.client.get(f"{running.url}/dashboard/") as answer:
            html = await answer.text()
            policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", html) is None
        names = re.findall(r'(?:src|href)="([^"#]+)"', html)
        assert {"main.js", "style.css", "uPlot.iife.min.js"} <= set(names)
        seen: set[str] = set()
        while names:
            name = names.pop().removeprefix("./")
            if name in seen:
                continue
            seen.add(name)
            async with running.client.get(f"{running.url}/dashboard/{name}") as answer:
                assert answer.status == 200, name
                text = await answer.text()
            names += re.findall(r'from "(\./[^"]+)"', text)
        assert len(seen) > 12
        for path in ("nothing.js", "../app.py", "%2e%2e/stream.py", "LICENSE-uPlot.txt"):
            async with running.client.get(f"{running.url}/dashboard/{path}") as answer:
                assert answer.status == 404, path
        async with running.client.post(f"{running.url}/dashboard/") as answer:
            assert answer.status == 405

    run(scenario)


def test_modules_come_to_the_own_page_alone() -> None:
    """Browsers name the page's origin when it asks for a module."""

    async def scenario(running: Cluster) -> None:
        own, foreign = {"origin": running.url}, {"origin": "http://elsewhere.example"}
        for path, headers, status in (
            ("/dashboard/main.js", own, 200),
            ("/dashboard/main.js", foreign, 403),
            ("/dashboard/events", foreign, 403),
            ("/debug/workers", own, 403),
            ("/v1/models", own, 403),
        ):
            async with running.client.get(running.url + path, headers=headers) as answer:
                assert answer.status == status, (path, headers)

    run(scenario)


def test_stream_shows_workers_requests_and_points() -> None:
    async def scenario(running: Cluster) -> None:
        async with running.client.get(f"{running.url}/dashboard/events") as events:
            assert events.headers["content-type"] == "text/event-stream; charset=utf-8"
            first = await read_events(events.content, "history", "tick", "links")
            assert first["history"]["fields"][0] == "at"
            assert len(first["history"]["points"][0]) == len(first["history"]["fields"])
            names = {each["worker"] for each in first["tick"]["workers"]["workers"]}
            assert names == {"prefill-0", "decode-0"}
            body = {"model": "demo", "prompt": "hello", "max_tokens": 5, "stream": True}
            async with running.post(body, **{"x-request-id": "mine"}) as answer:
                await answer.read()
            fields = first["history"]["fields"]
            async with asyncio.timeout(60):
                while True:
                    tick = (await read_events(events.content, "tick"))["tick"]
                    if tick["requests"] and tick["point"][fields.index("ttft_p50_s")] is not None:
                        break
            assert tick["requests"][0]["id"] == "mine"
            assert tick["requests"][0]["first_token_s"] > 0
            point = dict(zip(fields, tick["point"], strict=True))
            parts = [point["waited_s"], point["prefill_s"], point["handoff_s"]]
            assert sum(parts) == pytest.approx(point["ttft_p50_s"], abs=1e-5)
            assert point["answer_tokens"] > 0
            async with asyncio.timeout(60):
                while not tick["targets"]:
                    tick = (await read_events(events.content, "tick"))["tick"]
            (target,) = tick["targets"]
            assert (target["model"], target["objective"]) == ("demo", "itl")
            assert (target["num"], target["num_missed"]) == (1, 1), "20 ms between tokens"
            assert tick["cost"] is None, "no price is configured"

    decodes = [ScriptedWorker("decode-0", "decode", say_four)]
    run(scenario, decodes=decodes, targets={"*": Targets(itl_s=0.001)})


def test_tokens_of_answers_in_one_piece_are_shown() -> None:
    async def say_one(visit: Visit) -> None:
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        await visit.answer(200, {"id": "x", "choices": [{"index": 0, "text": "a"}], "usage": usage})

    async def scenario(running: Cluster) -> None:
        async with running.client.get(f"{running.url}/dashboard/events") as events:
            fields = (await read_events(events.content, "history"))["history"]["fields"]
            async with running.post({
                "model": "demo",
                "prompt": "hello",
                "max_tokens": 1,
            }) as answer:
                await answer.read()
            async with asyncio.timeout(30):
                while True:
                    tick = (await read_events(events.content, "tick"))["tick"]
                    point = dict(zip(fields, tick["point"], strict=True))
                    if point["answer_tokens"]:
                        break
            assert point["computed_tokens"] > 0

    run(scenario, decodes=[ScriptedWorker("decode-0", "decode", say_one)])


def test_cost_is_shown_where_prices_are_configured() -> None:
    async def scenario(running: Cluster) -> None:
        body = {"model": "demo", "prompt": "hello", "max_tokens": 5, "stream": True}
        async with running.post(body) as answer:
            await answer.read()
        async with running.client.get(f"{running.url}/dashboard/events") as events:
            async with asyncio.timeout(60):
                while True:
                    cost = (await read_events(events.content, "tick"))["tick"]["cost"]
                    assert cost["workers_per_hour"] == pytest.approx(5.0)
                    if cost["output_per_1000"] is not None:
                        break
        # 3 an hour for 5 tokens in some seconds, of which none is a minute from the start yet.
        assert 3.0 / 3600 / 5 * 1000 <= cost["output_per_1000"] * 1.001 < 60 * 3.0 / 3600 / 5 * 1000

    run(
        scenario,
        decodes=[ScriptedWorker("decode-0", "decode", say_four)],
        prices=WorkerPrices(2.0, 3.0, 1.0),
    )


def test_number_of_viewers_is_bounded_and_they_leave() -> None:
    async def scenario(running: Cluster) -> None:
        url = f"{running.url}/dashboard/events"
        open_ones = [await running.client.get(url) for _ in range(MOST_VIEWERS)]
        async with running.client.get(url) as refused:
            assert refused.status == 503
            assert "dashboards are open" in (await refused.json())["error"]["message"]
        for each in open_ones:
            each.close()
        async with asyncio.timeout(60):
            while True:
                async with running.client.get(url) as again:
                    if again.status == 200:
                        await read_events(again.content, "history", "tick")
                        break
                await asyncio.sleep(0.1)

    run(scenario)


def test_key_guards_what_shows_requests(tmp_path, monkeypatch) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")

    async def scenario(running: Cluster) -> None:
        basic = {"authorization": "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()}
        shown = {"x-baton-management-key": KEY}
        for path in ("/dashboard/", "/dashboard/events", "/debug/requests", "/debug/workers"):
            async with running.client.get(running.url + path) as answer:
                assert answer.status == 401, path
                assert answer.headers["www-authenticate"].startswith("Basic ")
            for wrong in (
                {"x-baton-management-key": KEY[:-1]},
                {"authorization": "Basic !"},
                {"authorization": f"Bearer {KEY}"},
                {"x-baton-management-key": ""},
            ):
                async with running.client.get(running.url + path, headers=wrong) as answer:
                    assert answer.status == 401, (path, wrong)
            for right in (basic, shown):
                async with running.client.get(running.url + path, headers=right) as answer:
                    assert answer.status == 200, (path, right)
        for path in ("/metrics", "/health", "/v1/models"):
            async with running.client.get(running.url + path) as answer:
                assert answer.status == 200, path
        gateway = Gateway.at(running.url, "--gateway")
        assert (await asyncio.to_thread(gateway.get, "/debug/workers"))[0] == 401
        monkeypatch.setenv("BATON_MANAGEMENT_KEY", KEY)
        assert (await asyncio.to_thread(gateway.get, "/debug/workers"))[0] == 200

    run(scenario, management_key_file=str(key_file))


@pytest.mark.parametrize(
    "text", ["", "short", "two words of sixteen and more", "ключ-ключ-ключ-ключ"]
)
def test_key_that_could_be_guessed_is_refused(tmp_path, text) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot read"):
        ManagementKey.read(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match="openssl rand"):
        ManagementKey.read(path)
