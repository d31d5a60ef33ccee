"""The endpoint picker, asked over real gRPC as Envoy asks: headers, body, then the answer's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.clock import MachineClock
from baton.gateway.clients import make_key, write_keys
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.picker.processing import DESTINATION, MAX_PART_BYTES, SUBSET
from baton.gateway.picker.server import serving_picker
from baton.gateway.process import open_parts
from baton.gateway.upstream import worker_token
from baton.ids import new_epoch
from baton.protocol.worker_http import Role
from baton.router.division import Division
from tests.integration.gateway_cluster import PROMPT, STREAM, until_true
from tests.integration.scripted_worker import KEY, ScriptedWorker, say_abc

grpc = pytest.importorskip("grpc")
ext_proc = pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2")


if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

    from baton.gateway.request_context import Services

BUFFERED = ProcessingMode.BUFFERED
FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
SUBSET_NAMESPACE = "envoy.lb.subset_hint"


@dataclass
class Picker:
    channel: Any
    services: Services
    workers: list[ScriptedWorker]

    def addresses(self) -> list[str]:
        return [worker.url.removeprefix("http://") for worker in self.workers]

    def num_running(self) -> int:
        load = self.services.load
        found = (load.find(worker.name, "demo") for worker in self.workers)
        return sum(each.num_decodes for each in found if each is not None)


class Envoy:
    """One HTTP request, as Envoy's filter sends it."""

    def __init__(self, picker: Picker, mode: int = FULL_DUPLEX) -> None:
        self.call = ExternalProcessorStub(picker.channel).Process()
        self.mode = mode
        self.removed: list[str] = []
        self.body = b""

    async def send_headers(
        self, path: str = "/v1/completions", *, is_end: bool = False, **more: str
    ) -> None:
        fields = {":method": "POST", ":path": path, "content-type": "application/json"} | more
        message = ext_proc.ProcessingRequest()
        for key, value in fields.items():
            message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
        message.request_headers.end_of_stream = is_end
        message.protocol_config.request_body_mode = self.mode
        message.protocol_config.response_body_mode = self.mode
        await self.call.write(message)

    async def send_body(self, data: bytes, *, is_end: bool) -> None:
        body = ext_proc.HttpBody(body=data, end_of_stream=is_end)
        await self.call.write(ext_proc.ProcessingRequest(request_body=body))

    async def ask(self, request: object) -> None:
        await self.send_headers()
        await self.send_body(json.dumps(request).encode(), is_end=True)

    async def pick(self, request: object, **headers: str) -> str:
        """The address that it is to be sent to."""
        data = json.dumps(request).encode()
        await self.send_headers(**headers)
        if self.mode == BUFFERED:
            first = await self.call.read()
            assert first.WhichOneof("response") == "request_headers", first
            await self.send_body(data, is_end=True)
            answer = await self.call.read()
            common = answer.request_body.response
            self.body = common.body_mutation.body
        else:
            half = len(data) // 2
            await self.send_body(data[:half], is_end=False)
            await self.send_body(data[half:], is_end=True)
            answer = await self.call.read()
            common = answer.request_headers.response
            await self._read_body()
        return self._read_destination(answer, common)

    async def _read_body(self) -> None:
        is_end = False
        while not is_end:
            part = (await self.call.read()).request_body.response.body_mutation.streamed_response
            assert len(part.body) <= MAX_PART_BYTES
            self.body, is_end = self.body + part.body, part.end_of_stream

    def _read_destination(self, answer: Any, common: Any) -> str:
        values = {
            each.header.key: each.header.raw_value for each in common.header_mutation.set_headers
        }
        self.removed = list(common.header_mutation.remove_headers)
        address = values[DESTINATION].decode()
        assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == address
        assert int(values["content-length"]) == len(self.body)
        assert common.clear_route_cache
        return address

    async def forward(self, address: str) -> bytes:
        """Send it there, and the answer back through the picker."""
        # What proves to these workers, which have no TLS, that it is a gateway of their cluster.
        proof = {"authorization": f"Bearer {worker_token(KEY.key)}"}
        headers = {"content-type": "application/json"} | proof
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"http://{address}/v1/completions", data=self.body, headers=headers
            ) as answer,
        ):
            message = ext_proc.ProcessingRequest()
            status = str(answer.status).encode()
            message.response_headers.headers.headers.add(key=":status", raw_value=status)
            message.response_headers.headers.headers.add(
                key="content-type", raw_value=answer.headers["content-type"].encode()
            )
            await self.call.write(message)
            assert (await self.call.read()).WhichOneof("response") == "response_headers"
            received = b""
            async for chunk in answer.content.iter_any():
                received += await self._pass(chunk, is_end=False)
            return received + await self._pass(b"", is_end=True)

    async def _pass(self, data: bytes, *, is_end: bool) -> bytes:
        body = ext_proc.HttpBody(body=data, end_of_stream=is_end)
        await self.call.write(ext_proc.ProcessingRequest(response_body=body))
        answer = (await self.call.read()).response_body.response
        if self.mode == BUFFERED:
            assert not answer.HasField("body_mutation")
            return data
        part = answer.body_mutation.streamed_response
        assert part.end_of_stream == is_end
        return part.body

    async def read_error(self) -> tuple[int, str]:
        answer = (await self.call.read()).immediate_response
        return answer.status.code, json.loads(answer.body)["error"]["code"]


@contextlib.asynccontextmanager
async def picking(num_workers: int = 2, **options: Any) -> AsyncGenerator[Picker]:
    workers = [ScriptedWorker(f"w{i}", "both", say_abc) for i in range(num_workers)]
    settings: dict[str, Any] = {"probe_interval_s": 0.1, "tls": "off", "port": 0} | options
    addresses = tuple(WorkerAddress(w.url, Role.BOTH) for w in workers)
    gateway = GatewayOptions(addresses=addresses, credentials=KEY, **settings)
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker.running())
        parts = open_parts(gateway, MachineClock())
        _, services = await stack.enter_async_context(parts)
        port = await stack.enter_async_context(serving_picker(services))
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        await stack.enter_async_context(channel)

        async def all_up() -> bool:
            return sum(worker.is_available for worker in services.workers.all) == num_workers

        await until_true(all_up)
        yield Picker(channel, services, workers)


def run(scenario: Callable[[Picker], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), picking(**options) as picker:
            await scenario(picker)

    asyncio.run(main())


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
@pytest.mark.parametrize("request_", [PROMPT, STREAM], ids=["whole", "stream"])
def test_a_request_goes_to_a_worker_and_its_answer_comes_back(
    mode: int, request_: dict[str, object]
) -> None:
    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker, mode)
        address = await envoy.pick(request_)
        assert address in picker.addresses()
        assert picker.num_running() == 1
        answer = await envoy.forward(address)
        assert b'"text": "abc"' in answer or answer.endswith(b"data: [DONE]\n\n")
        await envoy.call.done_writing()
        assert await envoy.call.read() == grpc.aio.EOF

        async def is_over() -> bool:
            return picker.num_running() == 0

        await until_true(is_over)
        assert sum(len(worker.visits) for worker in picker.workers) == 1

    run(scenario)


def test_nothing_is_answered_before_the_end_of_a_streamed_body() -> None:
    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker)
        await envoy.send_headers()
        await envoy.send_body(b'{"model": "demo", "prompt": ', is_end=False)
        reading = asyncio.ensure_future(envoy.call.read())
        await asyncio.wait([reading], timeout=0.2)
        assert not reading.done()
        await envoy.send_body(b'"x"}', is_end=True)
        assert (await reading).WhichOneof("response") == "request_headers"

    run(scenario)


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
def test_trailers_end_a_body(mode: int) -> None:
    """Then no part of it says that it is the last one."""

    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker, mode)
        await envoy.send_headers()
        if mode == BUFFERED:
            assert (await envoy.call.read()).HasField("request_headers")
        await envoy.send_body(json.dumps(PROMPT).encode(), is_end=False)
        if mode == BUFFERED:
            answer = await envoy.call.read()
            assert json.loads(answer.request_body.response.body_mutation.body) == PROMPT
            return
        await envoy.call.write(ext_proc.ProcessingRequest(request_trailers={}))
        assert (await envoy.call.read()).HasField("request_headers")
        part = (await envoy.call.read()).request_body.response.body_mutation.streamed_response
        assert (json.loads(part.body), part.end_of_stream) == (PROMPT, False)
        assert (await envoy.call.read()).HasField("request_trailers")

    run(scenario)


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
def test_a_request_without_a_body_is_refused(mode: int) -> None:
    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker, mode)
        await envoy.send_headers(is_end=True)
        status, _ = await envoy.read_error()
        assert status == 400

    run(scenario)


@pytest.mark.parametrize("request_", [PROMPT, STREAM], ids=["whole", "stream"])
def test_only_streams_show_how_long_a_prompt_takes(request_: dict[str, object]) -> None:
    """The first part of an answer in one piece comes when all of it was generated."""

    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker)
        await envoy.forward(await envoy.pick(request_))
        prefill = picker.services.load.costs("demo").prefill
        assert prefill.num_seen == (1 if request_ is STREAM else 0)

    run(scenario)


def test_no_worker_is_kept_for_prefill_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is handed over, so it would have nothing to do."""
    looked: list[Division] = []
    monkeypatch.setattr(Division, "look", lambda division, *_: looked.append(division))

    async def scenario(picker: Picker) -> None:
        await Envoy(picker).pick(PROMPT)

    run(scenario, policy="cost")
    assert not looked


def test_requests_under_way_count() -> None:
    async def scenario(picker: Picker) -> None:
        first, second = Envoy(picker), Envoy(picker)
        addresses = {await first.pick(PROMPT), await second.pick(PROMPT)}
        assert addresses == set(picker.addresses())
        first.call.cancel()  # its client left

        async def has_one() -> bool:
            return picker.num_running() == 1

        await until_true(has_one)

    run(scenario, policy="least_loaded")


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "cost"])
def test_one_worker_of_the_subset_is_chosen(policy: str) -> None:
    async def scenario(picker: Picker) -> None:
        wanted = picker.addresses()[1]
        for _ in range(4):
            envoy = Envoy(picker, BUFFERED)
            message = ext_proc.ProcessingRequest()
            hint = message.metadata_context.filter_metadata[SUBSET_NAMESPACE]
            hint.get_or_create_list(SUBSET).append(wanted)
            for key, value in {":method": "POST", ":path": "/v1/completions"}.items():
                message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
            message.request_headers.headers.headers.add(
                key="content-type", value="application/json"
            )
            message.protocol_config.request_body_mode = BUFFERED
            await envoy.call.write(message)
            await envoy.call.read()
            await envoy.send_body(json.dumps(PROMPT).encode(), is_end=True)
            answer = await envoy.call.read()
            assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == wanted

    run(scenario, policy=policy)


def test_what_clients_may_not_send_does_not_reach_a_worker() -> None:
    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker)
        ticket = {"kv_transfer_params": {"baton": "forged"}}
        await envoy.pick(PROMPT | ticket, **{"x-baton-timeout": "1"})
        assert json.loads(envoy.body) == PROMPT
        assert envoy.removed == ["x-baton-timeout"]

    run(scenario)


def test_a_long_body_is_streamed_in_parts() -> None:
    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker)
        request = PROMPT | {"prompt": "x" * 200_000}
        await envoy.pick(request)
        assert json.loads(envoy.body) == request

    run(scenario)


@pytest.mark.parametrize(
    ("headers", "body", "options", "expected"),
    [
        ({"path": "/v1/embeddings"}, PROMPT, {}, (404, "not_found")),
        ({":method": "GET"}, PROMPT, {}, (404, "not_found")),
        ({"content-type": "text/plain"}, PROMPT, {}, (415, "unsupported_media_type")),
        ({}, PROMPT | {"model": "none"}, {}, (404, "model_not_found")),
        ({}, [], {}, (400, None)),
        ({}, PROMPT | {"prompt": "x" * 2000}, {"max_body_bytes": 1000}, (413, "request_too_large")),
        ({}, PROMPT, {"max_total_body_bytes": 10}, (429, "overloaded")),
    ],
)
def test_a_request_that_is_refused_is_answered_at_once(
    headers: dict[str, str], body: object, options: dict[str, Any], expected: tuple[int, str | None]
) -> None:
    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker)
        await envoy.send_headers(**headers)
        with contextlib.suppress(asyncio.InvalidStateError):  # it may be refused by now
            await envoy.send_body(json.dumps(body).encode(), is_end=True)
        status, code = await envoy.read_error()
        assert status == expected[0]
        assert expected[1] in {code, None}
        assert picker.num_running() == 0

    run(scenario, **options)


def test_without_a_worker_and_without_room() -> None:
    async def scenario(picker: Picker) -> None:
        queue, asked = picker.services.admission.queue, list[Envoy]()

        async def is_placed_or_waits() -> bool:
            return picker.num_running() + queue.num_requests == len(asked)

        while not queue.num_requests:
            asked.append(envoy := Envoy(picker))
            await envoy.ask(PROMPT)
            await until_true(is_placed_or_waits)
        refused = Envoy(picker)
        await refused.ask(PROMPT)
        assert await refused.read_error() == (429, "overloaded")
        assert len(asked) > 1
        asked[0].call.cancel()
        waited = await asked[-1].call.read()
        assert waited.HasField("request_headers"), "it waited for its turn"
        for envoy in asked:
            envoy.call.cancel()
        health = health_pb2_grpc.HealthStub(picker.channel)

        async def check(service: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        async def is_ready() -> bool:
            return await check("readiness") == health_pb2.HealthCheckResponse.SERVING

        await until_true(is_ready)
        picker.workers[0].health_status = 503  # it drains

        async def is_not_ready() -> bool:
            return await check("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING

        await until_true(is_not_ready)
        assert await check("liveness") == health_pb2.HealthCheckResponse.SERVING
        refused = Envoy(picker)
        await refused.ask(PROMPT)
        assert await refused.read_error() == (503, "no_worker")

    run(scenario, num_workers=1, max_running_per_worker=1, max_queued_requests=1)


def test_a_model_that_is_not_served_any_more_once_the_wait_is_over() -> None:
    async def scenario(picker: Picker) -> None:
        queue, asked = picker.services.admission.queue, list[Envoy]()

        async def is_placed_or_waits() -> bool:
            return picker.num_running() + queue.num_requests == len(asked)

        while not queue.num_requests:
            asked.append(envoy := Envoy(picker))
            await envoy.ask(PROMPT)
            await until_true(is_placed_or_waits)
        (worker,) = picker.workers
        worker.extra_info, worker.epoch = {"served_model_name": "other"}, new_epoch()
        assert await asked[-1].read_error() == (503, "no_worker")

    run(scenario, num_workers=1, max_running_per_worker=1)


def test_clients_show_a_key_that_workers_do_not_get(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret, key = make_key("acme")
    write_keys(file, [key])

    async def scenario(picker: Picker) -> None:
        envoy = Envoy(picker)
        await envoy.send_headers()
        assert await envoy.read_error() == (401, "missing_api_key")
        envoy = Envoy(picker)
        await envoy.pick(PROMPT, authorization=f"Bearer {secret}")
        assert envoy.removed == ["authorization"]

    run(scenario, client_keys_file=file)
