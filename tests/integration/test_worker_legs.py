"""Two workers' processes and a ticket: the legs of one request, as the gateway asks for them."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef, seal
from baton.config.sections import StoreSection
from baton.ids import Epoch
from baton.telemetry.trace import RequestSpan, summarize
from baton.telemetry.transfer_report import TransferReport
from tests.integration.worker_process import WorkerProcess, make_ticket, starting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

pytest.importorskip("torch")

Json = dict[str, Any]
LEASE_S = 2.0


@dataclass
class Pair:
    prefill: WorkerProcess
    decode: WorkerProcess

    def ticket(self, **fields: Any) -> tuple[Ticket, str]:
        return make_ticket(self.prefill.ref, self.decode.ref, **fields)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Generator[Pair]:
    place = str(tmp_path_factory.mktemp("place") / "store")
    store = {"tiers": ["file"], "options": {"file": {"directory": place}}}
    options: Json = {"handoff": {"lease_s": LEASE_S}, "store": store}
    with (
        starting("p0", role="prefill", **options) as prefill,
        starting("d0", role="decode", **options) as decode,
    ):
        prefill.wait_until_ready()
        decode.wait_until_ready()
        yield Pair(prefill, decode)
        assert decode.end() == 0
        assert prefill.end() == 0


def prompt() -> str:
    """A prompt that no test has used: nothing of it is cached."""
    return f"Letter {uuid.uuid4().hex}. " + "She smiled, and said nothing of it. " * 12


@dataclass
class Answer:
    status: int
    headers: Any
    text: str

    def json(self) -> Json:
        return dict(json.loads(self.text))

    def streamed_text(self) -> str:
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@asynccontextmanager
async def asking() -> AsyncGenerator[Any]:
    async with aiohttp.ClientSession() as session:

        async def ask(worker: WorkerProcess, body: Json, ticket: str | None = None) -> Answer:
            fields: Json = {"model": "demo", "temperature": 0, "max_tokens": 16, **body}
            if ticket is not None:
                fields["kv_transfer_params"] = {"baton_ticket": ticket}
            headers = {"x-request-id": fields.pop("id", "req-test")}
            url = f"{worker.url}/v1/completions"
            async with session.post(url, json=fields, headers=headers) as reply:
                return Answer(reply.status, reply.headers, await reply.text())

        yield ask


async def read_trace(worker: WorkerProcess, request_id: str) -> RequestSpan:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{worker.url}/baton/v1/traces/{request_id}") as reply,
    ):
        return msgspec.json.decode(await reply.read(), type=RequestSpan)


async def read_metrics(worker: WorkerProcess) -> dict[str, float]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{worker.url}/metrics") as reply,
    ):
        lines = [line for line in (await reply.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.parametrize("stream", [False, True])
def test_both_legs_give_what_one_worker_gives(pair: Pair, stream: bool) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt(), "logprobs": 1, "stream": stream, "id": f"both-{stream}"}
        ticket, text = pair.ticket()
        async with asking() as ask:
            prefill, decode = await asyncio.gather(
                ask(pair.prefill, body, text), ask(pair.decode, body, text)
            )
            alone = await ask(pair.prefill, body | {"id": "alone"})
        assert (prefill.status, decode.status) == (200, 200)
        reply = prefill.json()
        num_prompt_tokens = reply["prompt_tokens"]
        assert 0 < reply.pop("computed_s_ago") < 5
        assert reply == {
            "object": "baton.prefill",
            "request_id": f"both-{stream}",
            "prompt_tokens": num_prompt_tokens,
            "cached_tokens": 0,
        }
        if stream:
            assert decode.streamed_text() == alone.streamed_text()
        else:
            (got_choice,), (alone_choice,) = decode.json()["choices"], alone.json()["choices"]
            for name in ("tokens", "text_offset"):
                assert got_choice["logprobs"][name] == alone_choice["logprobs"][name]
            # The one that was alone had a cached prefix: other shapes, other rounding.
            assert got_choice["logprobs"]["token_logprobs"] == pytest.approx(
                alone_choice["logprobs"]["token_logprobs"], abs=1e-4
            )
            assert got_choice["text"] == alone_choice["text"]
            assert decode.json()["usage"]["completion_tokens"] == 16
        sent = await read_trace(pair.prefill, f"both-{stream}")
        got = await read_trace(pair.decode, f"both-{stream}")
        assert (sent.role, sent.outcome, sent.peer) == ("prefill", "prefilled", "d0")
        assert (got.role, got.outcome, got.peer) == ("decode", "length", "p0")
        assert sent.ticket == got.ticket == ticket.id.hex()
        assert got.num_received_tokens == num_prompt_tokens
        summary = summarize(None, got, sent)
        assert summary.fallbacks == ()
        assert summary.transport == summary.expected_transport
        assert summary.num_bytes > 0
        for seconds in (
            summary.queue_s,
            summary.prefill_s,
            summary.first_layer_ready_s,
            summary.last_layer_landed_s,
            summary.decode_queue_s,
            summary.first_token_s,
        ):
            assert seconds is not None
            # Processes of one host share a clock; the measured offset is off by microseconds.
            assert -0.005 < seconds < 30
        assert summary.exposed_transfer_s is not None
        assert summary.exposed_transfer_s < 30

    asyncio.run(scenario())


def test_metrics_prove_the_handoff(pair: Pair) -> None:
    async def scenario() -> None:
        before = await read_metrics(pair.decode)
        body = {"prompt": prompt()}
        _, text = pair.ticket(distance="same_host")
        async with asking() as ask:
            await asyncio.gather(ask(pair.prefill, body, text), ask(pair.decode, body, text))
        after = await read_metrics(pair.decode)
        assert len(after) < 2000
        grown = {name for name in after if after[name] > before[name]}
        trace = await read_trace(pair.decode, "req-test")
        transport = trace.transport
        assert (trace.distance, trace.operation) == ("same_host", "WRITE")
        sent = await read_trace(pair.prefill, "req-test")
        assert (sent.distance, sent.operation) == ("same_host", "WRITE")
        labels = f'{{result="completed",role="decode",transport="{transport}"}}'
        assert f"baton_handoffs_total{labels}" in grown
        assert 'baton_worker_prompt_tokens_total{source="received"}' in grown
        assert 'baton_worker_prompt_tokens_total{source="computed"}' not in grown
        path = f'distance="same_host",mode="push",operation="WRITE",transport="{transport}"'
        for name in (
            "received_bytes_total",
            "transfer_seconds_count",
            "transfer_seconds_per_mib_count",
            "exposed_share_count",
        ):
            assert f"baton_handoff_{name}{{{path}}}" in grown
        (received,) = [
            each
            for each in (await read_transfers(pair.decode)).handoffs
            if (each.peer, each.distance, each.mode) == ("p0", "same_host", "push")
        ]
        assert (received.operation, received.transport) == ("WRITE", transport)
        assert received.num_bytes == trace.num_bytes
        summary = summarize(None, trace, sent)
        took_s = received.transfer_s.quantile(0.5)
        assert took_s == pytest.approx(received.seconds, rel=0.01)
        assert (summary.distance, summary.operation) == ("same_host", "WRITE")
        written = [
            each
            for each in (await read_transfers(pair.prefill)).links
            if (each.peer, each.distance) == ("d0", "same_host")
        ]
        assert [each.operation for each in written] == ["WRITE"]
        assert written[0].observed_s > 0

    asyncio.run(scenario())


async def read_transfers(worker: WorkerProcess) -> TransferReport:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{worker.url}/baton/v1/transfers") as reply,
    ):
        return msgspec.json.decode(await reply.read(), type=TransferReport)


def grown(before: dict[str, float], after: dict[str, float], prefix: str) -> dict[str, float]:
    """Samples whose names begin so, where they differ, without the prefix: by how much."""
    differences = {
        name.removeprefix(prefix): after[name] - before[name]
        for name in after
        if name.startswith(prefix)
    }
    return {name: difference for name, difference in differences.items() if difference}


def test_what_goes_through_the_store_is_in_both_workers_metrics(pair: Pair) -> None:
    async def scenario() -> None:
        workers = (pair.prefill, pair.decode)
        before = [await read_metrics(worker) for worker in workers]
        body = {"prompt": prompt()}
        async with asking() as ask:
            _, text = pair.ticket(mode="pool")
            num_tokens = (await ask(pair.prefill, body, text)).json()["prompt_tokens"]
            got = await ask(pair.decode, body, text)
            _, again = pair.ticket(mode="pool")  # what is in the store is not put again
            assert (await ask(pair.prefill, body, again)).status == 200
            alone = await ask(pair.prefill, body)
        assert got.json()["choices"] == alone.json()["choices"]
        after = [await read_metrics(worker) for worker in workers]
        num_entries = -(-num_tokens // StoreSection().block_size)
        entries, store = "baton_pool_entries_total", "baton_store_"
        assert grown(before[0], after[0], entries) == {
            '{result="stored",role="prefill"}': num_entries,
            '{result="present",role="prefill"}': num_entries,
        }
        assert grown(before[1], after[1], entries) == {
            '{result="loaded",role="decode"}': num_entries
        }
        put, read = (grown(*each, store) for each in zip(before, after, strict=True))
        # Each handoff leaves a note, too; a prefill worker that computes, signs of life.
        assert put['puts_total{result="stored",tier="file"}'] >= num_entries + 2
        assert read['leases_total{result="hit",tier="file"}'] >= num_entries + 1
        assert 'leases_total{result="miss",tier="file"}' not in read
        written, taken = (
            f'bytes_total{{direction="{d}",tier="file"}}' for d in ("written", "read")
        )
        assert put[written] > read[taken] > 0
        assert put['used_bytes{tier="file"}'] == read['used_bytes{tier="file"}'] > 0
        held = grown(before[0], after[0], "baton_handoff_held_block_seconds_total")
        assert held.keys() == {f'{{mode="pool",phase="{p}"}}' for p in ("computing", "waiting")}

    asyncio.run(scenario())


def test_a_ticket_is_refused_when_stale_forged_or_used(pair: Pair) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt()}
        ticket, text = pair.ticket()
        earlier = WorkerRef(ticket.prefill.worker, Epoch("0" * 32), ticket.prefill.address)
        _, stale = make_ticket(earlier, earlier)
        forged = seal(ticket, Credentials.of(ClusterKey(b"x" * 32)))
        async with asking() as ask:
            await asyncio.gather(ask(pair.prefill, body, text), ask(pair.decode, body, text))
            for again, status, code in (
                (text, 409, "stale_ticket"),
                (stale, 409, "stale_ticket"),
                (forged, 403, "invalid_ticket"),
                ("nonsense", 403, "invalid_ticket"),
            ):
                reply = await ask(pair.decode, body, again)
                assert (reply.status, reply.json()["error"]["code"]) == (status, code)

    asyncio.run(scenario())


def test_decode_recomputes_when_it_is_told_that_prefill_will_not_come(pair: Pair) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt(), "id": "orphan"}
        ticket, text = pair.ticket()
        async with asking() as ask, aiohttp.ClientSession() as session:
            decode = asyncio.create_task(ask(pair.decode, body, text))
            while (await read_metrics(pair.decode))[
                'baton_worker_inflight_requests{state="awaiting_kv"}'
            ] == 0:
                await asyncio.sleep(0.01)
            url = f"{pair.decode.url}/baton/v1/handoffs/{ticket.id.hex()}/abort"
            async with session.post(url, json={"reason": "prefill refused"}) as reply:
                assert reply.status == 204
                assert await reply.read() == b""
            alone = await ask(pair.prefill, body | {"id": "alone"})
            assert (await decode).json()["choices"] == alone.json()["choices"]
        (fallback,) = (await read_trace(pair.decode, "orphan")).fallbacks
        assert fallback.startswith("computed locally: ")
        after = await read_metrics(pair.decode)
        assert after['baton_handoff_fallbacks_total{cause="computed locally"}'] >= 1

    asyncio.run(scenario())


def test_a_prefill_leg_whose_decode_worker_never_asks_ends_when_told(pair: Pair) -> None:
    async def scenario() -> None:
        ticket, text = pair.ticket()
        async with asking() as ask, aiohttp.ClientSession() as session:
            prefill = asyncio.create_task(ask(pair.prefill, {"prompt": prompt()}, text))
            await asyncio.sleep(0.2)
            url = f"{pair.prefill.url}/baton/v1/handoffs/{ticket.id.hex()}/abort"
            async with session.post(url, json={"reason": "decode refused"}) as reply:
                assert reply.status == 204
            reply = await asyncio.wait_for(prefill, 30)
        assert (reply.status, reply.json()["error"]["code"]) == (502, "handoff_failed")

    asyncio.run(scenario())


def test_tenants_do_not_share_a_cache(pair: Pair) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt()}
        async with asking() as ask:
            salted = [
                (await ask(pair.prefill, body | {"cache_salt": salt})).json()
                for salt in ("one", "one", "two")
            ]
        cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in salted]
        assert cached[0] == 0
        assert cached[1] > 0
        assert cached[2] == 0

    asyncio.run(scenario())


HELD = 'baton_worker_blocks{state="held"}'
LAPSED = "baton_handoff_leases_lapsed_total"


async def until_metric(worker: WorkerProcess, name: str, wanted: float) -> None:
    async with asyncio.timeout(30):
        while (await read_metrics(worker))[name] != wanted:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_pulled_prompt_waits_at_prefill_and_gives_the_same_answer(
    pair: Pair, stream: bool
) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt(), "logprobs": 1, "stream": stream, "id": f"pull-{stream}"}
        _, text = pair.ticket(mode="pull")
        async with asking() as ask:
            held = await ask(pair.prefill, body, text)
            assert (held.status, held.json()["object"]) == (200, "baton.prefill")
            await until_metric(pair.prefill, HELD, -(-held.json()["prompt_tokens"] // 16))
            reserved = 'baton_worker_blocks{state="reserved"}'
            assert (await read_metrics(pair.decode))[reserved] == 0
            got = await ask(pair.decode, body, text)
            await until_metric(pair.prefill, HELD, 0)
            alone = await ask(pair.prefill, body | {"id": "alone"})
        if stream:
            assert got.streamed_text() == alone.streamed_text()
        else:
            got_choice, alone_choice = got.json()["choices"][0], alone.json()["choices"][0]
            assert got_choice["logprobs"]["tokens"] == alone_choice["logprobs"]["tokens"]
        trace = await read_trace(pair.decode, f"pull-{stream}")
        assert trace.num_received_tokens == held.json()["prompt_tokens"]
        assert (trace.mode, trace.fallbacks) == ("pull", [])
        assert (await read_metrics(pair.prefill))[LAPSED] == 0

    asyncio.run(scenario())


def test_a_pull_that_comes_after_the_lease_is_recomputed(pair: Pair) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt(), "id": "late"}
        lapsed = (await read_metrics(pair.prefill))[LAPSED]
        _, text = pair.ticket(mode="pull")
        async with asking() as ask:
            assert (await ask(pair.prefill, body, text)).status == 200
            await until_metric(pair.prefill, LAPSED, lapsed + 1)
            await until_metric(pair.prefill, HELD, 0)
            got = await ask(pair.decode, body, text)
            alone = await ask(pair.prefill, body | {"id": "alone"})
        assert got.json()["choices"] == alone.json()["choices"]
        (fallback,) = (await read_trace(pair.decode, "late")).fallbacks
        assert fallback.startswith("computed locally: ")

    asyncio.run(scenario())


def test_a_held_prompt_is_given_back_when_the_gateway_says_so(pair: Pair) -> None:
    async def scenario() -> None:
        lapsed = (await read_metrics(pair.prefill))[LAPSED]
        ticket, text = pair.ticket(mode="pull")
        async with asking() as ask, aiohttp.ClientSession() as session:
            assert (await ask(pair.prefill, {"prompt": prompt()}, text)).status == 200
            url = f"{pair.prefill.url}/baton/v1/handoffs/{ticket.id.hex()}/abort"
            async with session.post(url, json={"reason": "the client left"}) as reply:
                assert reply.status == 204
            await until_metric(pair.prefill, HELD, 0)
        assert (await read_metrics(pair.prefill))[LAPSED] == lapsed

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_what_prefill_says_early_is_how_decodes_stream_begins(pair: Pair, mode: str) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt(), "logprobs": 2, "stream": True, "temperature": 0.8, "seed": 5}
        _, text = pair.ticket(mode=mode, early=True)
        async with asking() as ask:
            decode = None
            if mode == "push":
                decode = asyncio.create_task(ask(pair.decode, body, text))
            first = (await ask(pair.prefill, body, text)).json()["first"]
            got = await (decode or ask(pair.decode, body, text))
            alone = await ask(pair.prefill, body | {"id": "alone"})
        assert first["events"].startswith('data: {"id":"cmpl-req-test"')
        assert without_time(got.text).startswith(without_time(first["events"]))
        assert got.streamed_text() == alone.streamed_text()
        await until_metric(pair.prefill, 'baton_worker_blocks{state="held"}', 0)

    asyncio.run(scenario())


def without_time(events: str) -> str:
    return re.sub(r'"created":[0-9]+', "", events)


def test_decode_recomputes_and_goes_on_from_the_token_that_was_said(pair: Pair) -> None:
    async def scenario() -> None:
        body = {"prompt": prompt(), "logprobs": 0, "id": "pinned"}
        ticket, text = pair.ticket(early=True)
        said = {"token_id": 300, "logprob": -0.5, "top": []}
        base = f"{pair.decode.url}/baton/v1/handoffs/{ticket.id.hex()}"
        async with asking() as ask, aiohttp.ClientSession() as session:
            async with session.post(f"{base}/first_token", json=said) as reply:
                assert (reply.status, await reply.json()) == (200, said)
            other = {**said, "token_id": 301}
            async with session.post(f"{base}/first_token", json=other) as reply:
                assert await reply.json() == said
            async with session.post(f"{base}/first_token", json={"token_id": -1}) as reply:
                assert reply.status == 400
            async with session.post(f"{base}/abort", json={"reason": "prefill died"}) as reply:
                assert reply.status == 204
            got = await ask(pair.decode, body, text)
        logprobs = got.json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][0] == -0.5
        assert len(logprobs["tokens"]) == 16

    asyncio.run(scenario())
