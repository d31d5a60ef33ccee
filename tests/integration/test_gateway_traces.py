"""Traces at the gateway: W3C ids, workers' clocks, what is kept, and what is exported."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import types

import pytest

from baton.cli.main import run as run_command
from baton.config.sections import TraceSection
from baton.errors import ConfigError
from tests.integration.gateway_cluster import PROMPT, STREAM, Cluster, cluster, run
from tests.integration.otlp_receiver import read_attributes, receiving
from tests.integration.scripted_vllm import ScriptedVllm, say_abc_as_vllm
from tests.integration.scripted_worker import ScriptedWorker, Visit, prefill_at_once, say_abc

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
AHEAD_S = 5000.0


def ahead() -> float:
    """The clock of a worker on another host."""
    return time.monotonic() + AHEAD_S


class TracingWorker(ScriptedWorker):
    """Reports its clock, and records a span of each request on it."""

    def __init__(self, name: str, role: str) -> None:
        super().__init__(name, role, self._serve)
        self.read_clock = lambda: {"domain": "another-host", "at_s": ahead()}

    async def _serve(self, visit: Visit) -> None:
        now = ahead()
        names = ("received", "prefill_started", "prefill_done")
        if self.role == "decode":
            names = ("received", "pages_reserved", "last_layer_landed", "kv_ready")
        self.trace = {
            "request_id": visit.headers["x-request-id"],
            "worker": self.name,
            "epoch": self.epoch,
            "role": self.role,
            "stamps": dict.fromkeys(names, now),
            "tokenize_s": 0.0,
            "num_prompt_tokens": 3,
            "num_bytes": 4096,
            "transport": "tcp",
            "expected_transport": "shared",
            "span_id": "00000000000000aa" if self.role == "decode" else "00000000000000bb",
            "outcome": "stop",
        }
        if self.role == "prefill":
            await prefill_at_once(visit)
        elif not visit.body.get("stream"):
            await say_abc(visit)
        else:
            await visit.start_stream()
            for text in "abc":
                await visit.token(text)
                await asyncio.sleep(0.02)  # else all three arrive at once
            await visit.done()


def tracing() -> dict[str, list[ScriptedWorker]]:
    return {
        "prefills": [TracingWorker("prefill-0", "prefill")],
        "decodes": [TracingWorker("decode-0", "decode")],
    }


async def ask(running: Cluster, request_id: str, body: object = STREAM, **headers: str) -> int:
    async with running.post(body, **{"x-request-id": request_id, **headers}) as response:
        await response.read()
        return response.status


async def until_equal(running: Cluster, metric: str, value: float) -> None:
    async with asyncio.timeout(60):
        while await running.metric(metric) != value:
            await asyncio.sleep(0.02)


def test_workers_are_children_in_the_clients_trace():
    async def scenario(running: Cluster):
        parent = f"00-{TRACE}-{SPAN}-01"
        await ask(running, "r", traceparent=parent, tracestate="vendor=1")
        _, shown = await running.get_json("/debug/requests/r")
        own = shown["gateway"]
        assert (own["trace_id"], own["parent_id"]) == (TRACE, SPAN)
        for worker in (*running.prefills, *running.decodes):
            sent = worker.visits[0].headers
            assert sent["traceparent"] == f"00-{TRACE}-{own['span_id']}-01"
            assert sent["tracestate"] == "vendor=1"
        assert await running.metric("baton_gateway_invalid_trace_contexts_total") == 0

    run(scenario)


def test_garbage_in_traceparent_is_counted_and_a_new_trace_begins():
    async def scenario(running: Cluster):
        for number, garbage in enumerate(("00-abc-def-01", "x" * 4000, "00-" + "0" * 32)):
            assert await ask(running, f"r{number}", traceparent=garbage, tracestate="a=1") == 200
            _, shown = await running.get_json(f"/debug/requests/r{number}")
            assert len(shown["gateway"]["trace_id"]) == 32
            assert shown["gateway"].get("parent_id", "") == ""
            sent = running.decodes[0].visits[-1].headers
            assert shown["gateway"]["trace_id"] in sent["traceparent"]
            assert "tracestate" not in sent
        assert await running.metric("baton_gateway_invalid_trace_contexts_total") == 3

    run(scenario)


def test_stages_of_workers_on_other_hosts_are_on_the_gateways_axis():
    async def scenario(running: Cluster):
        await ask(running, "r")
        _, shown = await running.get_json("/debug/requests/r")
        lanes = {lane["name"]: lane for lane in shown["timeline"]}
        assert list(lanes) == ["gateway", "prefill", "decode"]
        whole = lanes["gateway"]["end_s"]
        for name in ("prefill", "decode"):
            clock = lanes[name]["clock"]
            assert 0 < clock["error_s"] < 1.0
            assert abs(clock["offset_s"] - AHEAD_S) <= clock["error_s"]
            assert -clock["error_s"] <= lanes[name]["start_s"] <= whole + clock["error_s"]
        assert [each["part"] for each in shown["compared"]][:2] == ["queue", "prefill"]
        ttft = next(each for each in shown["compared"] if each["part"] == "ttft")
        assert 0 < ttft["actual_s"] < whole
        assert ttft["predicted_s"] > 0
        assert 1 <= shown["token_gaps"]["num"] <= 3  # parts that arrive together are one

    run(scenario, **tracing())


def test_a_clock_that_jumps_by_an_hour_moves_no_stage_out_of_the_request():
    async def scenario(running: Cluster):
        decode = running.decodes[0]
        await ask(running, "r")
        real, decode.read_clock = decode.read_clock, lambda: {
            "domain": "another-host", "at_s": ahead() + 3600.0
        }  # fmt: skip
        read = decode.num_health_reads
        while decode.num_health_reads < read + 2:
            await asyncio.sleep(0.02)
        _, shown = await running.get_json("/debug/requests/r")
        lane = next(lane for lane in shown["timeline"] if lane["name"] == "decode")
        assert lane["clock"] is None, "the jump was not seen"
        placed = next(s for s in shown["timeline"][0]["stages"] if s["name"] == "place")
        assert lane["start_s"] == pytest.approx(placed["end_s"])
        decode.read_clock = real

    run(scenario, **tracing())


def test_failed_requests_stay_with_their_workers_spans_when_others_are_forgotten(caplog):
    async def fails(visit: Visit) -> None:
        await visit.fail(500, "engine_error")

    async def scenario(running: Cluster):
        decode = running.decodes[0]
        decode.trace = {"request_id": "bad", "worker": "decode-0", "epoch": "e", "role": "decode"}
        decode.script = fails
        with caplog.at_level(logging.WARNING):
            assert await ask(running, "bad") == 500
        decode.script = say_abc
        _, shown = await running.get_json("/debug/requests/bad")
        trace_id = shown["gateway"]["trace_id"]
        assert f"bad (trace {trace_id})" in caplog.text
        await asyncio.sleep(0.6)  # until its workers' spans were fetched
        decode.trace = None
        for number in range(4):
            await ask(running, f"good{number}")
        _, listed = await running.get_json("/debug/requests?most=10")
        assert [each["id"] for each in listed["requests"]] == ["good3", "good2"]
        _, listed = await running.get_json("/debug/requests?failed")
        assert [each["id"] for each in listed["requests"]] == ["bad"]
        assert "500" in listed["requests"][0]["kept"] or "error" in listed["requests"][0]["kept"]
        status, shown = await running.get_json("/debug/requests/bad")
        assert status == 200
        assert shown["decode"]["worker"] == "decode-0"
        assert (await running.get_json("/debug/requests/good0"))[0] == 404
        assert await running.metric('baton_gateway_kept_traces_total{cause="failed"}') == 1

    run(scenario, trace=TraceSection(ring_size=2))


@pytest.mark.parametrize(
    "query", ["fast", "most=x", "last_s=-1", "slow&failed", "most=" + "9" * 300]
)
def test_a_query_that_cannot_be_read_is_refused(query):
    async def scenario(running: Cluster):
        status, answer = await running.get_json(f"/debug/requests?{query}")
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"

    run(scenario, wait=False)


def test_sampled_requests_are_exported_with_the_conventions_names():
    with receiving() as receiver:

        async def scenario(running: Cluster):
            await ask(running, "no", traceparent=f"00-{TRACE}-{SPAN}-00")
            await ask(running, "yes", traceparent=f"00-{TRACE}-{SPAN}-01")
            await until_equal(running, "baton_gateway_exported_traces_total", 1)
            check(receiver.spans)

        def check(spans):
            roots = [span for worker, span in spans if worker == "gateway" and span.kind == 2]
            (root,) = roots
            assert root.name == "text_completion demo"
            assert root.trace_id.hex() == TRACE
            assert root.parent_span_id.hex() == SPAN
            attributes = read_attributes(root)
            assert attributes["gen_ai.operation.name"] == "text_completion"
            assert attributes["gen_ai.provider.name"] == "baton"
            assert attributes["gen_ai.request.model"] == "demo"
            assert attributes["gen_ai.usage.input_tokens"] == 3
            assert attributes["baton.request_id"] == "yes"
            assert {span.trace_id.hex() for _, span in spans} == {TRACE}
            by_id = {span.span_id: span for _, span in spans}
            assert len(by_id) == len(spans)
            for _, span in spans:
                assert span.end_time_unix_nano >= span.start_time_unix_nano
                assert span is root or span.parent_span_id in by_id
            decode = by_id[bytes.fromhex("00000000000000aa")]
            assert decode.parent_span_id == root.span_id
            assert read_attributes(decode)["baton.transport"] == "tcp"
            assert abs(root.start_time_unix_nano / 1e9 - time.time()) < 30
            names = {span.name for _, span in spans}
            assert {"admit", "tokenize", "queue", "place", "wait", "answer", "prefill"} <= names

        run(scenario, trace=TraceSection(otlp_endpoint=receiver.url), **tracing())


def test_a_collector_that_is_slow_then_refuses_loses_spans_and_nothing_else():
    with receiving() as receiver:
        receiver.release.clear()
        receiver.status = 400

        async def scenario(running: Cluster):
            for number in range(5):
                began = time.monotonic()
                assert await ask(running, f"r{number}") == 200
                assert time.monotonic() - began < 2.0
            async with asyncio.timeout(60):
                while not receiver.arrived.is_set():
                    await asyncio.sleep(0.02)
            receiver.release.set()
            await until_equal(running, 'baton_gateway_lost_traces_total{cause="collector"}', 5)
            assert await running.metric("baton_gateway_exported_traces_total") == 0

        section = TraceSection(otlp_endpoint=receiver.url, sample_share=1.0)
        run(scenario, trace=section)


def test_an_absent_collector_loses_spans_and_nothing_else():
    with receiving() as receiver:
        url = receiver.url

    async def scenario(running: Cluster):
        assert await ask(running, "r") == 200
        await until_equal(running, 'baton_gateway_lost_traces_total{cause="collector"}', 1)

    run(scenario, trace=TraceSection(otlp_endpoint=url, sample_share=1.0))


def command(*arguments: str) -> int:
    return run_command(list(arguments))


def test_explain_draws_the_waterfall(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    async def main():
        async with cluster(**tracing()) as running:
            await ask(running, "r")
            arguments = ("--gateway", running.url)
            assert await asyncio.to_thread(command, "explain", "r", *arguments) == 0
            text = capsys.readouterr().out
            assert "prefill-0 → decode-0, push" in text
            assert "4096 bytes in 0 pages over tcp, NOT shared as expected" in text
            for word in ("admit", "wait", "answer", "█", "predicted", "happened", "ttft"):
                assert word in text, word
            assert "Times of prefill-0 are right to within" in text
            assert max(map(len, text.splitlines())) <= 120
            assert await asyncio.to_thread(command, "explain", "r", "--json", *arguments) == 0
            assert json.loads(capsys.readouterr().out)["id"] == "r"
            assert await asyncio.to_thread(command, "explain", "x", *arguments) == 1
            error = capsys.readouterr().err
            assert "no request 'x' is remembered" in error
            assert "trace.ring_size" in error
            return running.url

    url = asyncio.run(main())
    assert command("explain", "r", "--gateway", url) == 1
    assert "is the gateway running" in capsys.readouterr().err
    assert command("explain", "r", "--gateway", "localhost:1") == 2


def test_a_window_is_written_in_the_trace_event_format(capsys, tmp_path):
    output = tmp_path / "trace.json"

    async def main():
        async with cluster(**tracing()) as running:
            await asyncio.gather(*(ask(running, f"r{n}") for n in range(8)))
            await ask(running, "whole", PROMPT)
            arguments = ("trace", "export", "--gateway", running.url, "-o", str(output))
            assert await asyncio.to_thread(command, *arguments, "--last", "1m") == 0
            assert "9 requests" in capsys.readouterr().out
            assert await asyncio.to_thread(command, *arguments, "--last", "soon") == 2

    asyncio.run(main())
    content = json.loads(output.read_text("utf-8"))
    requests = {e["name"] for e in content["traceEvents"] if e["name"].startswith("r")}
    assert requests >= {f"r{n}" for n in range(8)}


def test_ranks_of_a_vllm_server_have_one_span_and_one_that_is_silent_is_named() -> None:
    server = ScriptedVllm("decode-0", "decode", say_abc_as_vllm, num_ranks=3)
    for rank in (0, 2):
        now = time.monotonic()
        server.controls[rank].trace = {
            "request_id": "req-1", "worker": f"decode-0/{rank}", "epoch": "e", "role": "decode",
            "stamps": {"received": now, "last_layer_landed": now + rank}, "num_bytes": 4096,
            "transport": "shared" if rank == 0 else "tcp", "expected_transport": "shared",
        }  # fmt: skip

    async def scenario(running: Cluster) -> None:
        assert await ask(running, "req-1", PROMPT) == 200
        _, shown = await running.get_json("/debug/requests/req-1")
        span = shown["decode"]
        assert (span["worker"], span["num_bytes"], span["transport"]) == ("decode-0", 8192, "tcp")
        assert "decode (decode-0, rank 1)" in shown["missing"]

    run(scenario, decodes=[server])


def test_an_opentelemetry_that_another_package_damaged_is_an_error_that_says_how_to_mend_it(
    monkeypatch,
):
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # nothing to import from it
    repair = r"xds-protos.*pip install --force-reinstall --no-deps opentelemetry-proto==[\d.]+$"
    with pytest.raises(ConfigError, match=repair):
        run(None, trace=TraceSection(otlp_endpoint="http://127.0.0.1:9/v1/traces"), **tracing())
