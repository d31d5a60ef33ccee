"""A vLLM prefill server that is slow and short of memory, before the cluster's decode server."""

from __future__ import annotations

import http.client
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton.telemetry.trace import Stamp
from tests.chaos.clients import Prompts
from tests.e2e_vllm.client import (
    ask_one,
    check_same,
    is_idle,
    make_body,
    post,
    read_answer,
    read_metric,
    read_request,
    wait_until,
)
from tests.e2e_vllm.cluster import KV_BYTES_PER_TOKEN, wait_ready
from tests.e2e_vllm.tickets import Server

if TYPE_CHECKING:
    from concurrent.futures import Future

    from baton.testing.fleet import FleetProcess
    from tests.e2e_vllm.client import Answer
    from tests.e2e_vllm.cluster import ClusterFactory, VllmCluster

SEED = 20261121
NUM_SEQS = 4
POOL_TOKENS = 3072
CONTEXT_TOKENS = 2944
LONG = 2800
"""Tokens of a prompt that is being prefilled long enough for a fault to find it there."""

LIVENESS_TIMEOUT_S = 3.0
SETTLE_S = 20.0
HEAL_S = 30.0

_numbers = itertools.count()


@dataclass
class Pair:
    """`prefill` is this pair's own, and is killed at times; decode and oracle are the cluster's.

    `server` is the same prefill server, in its present life.
    """

    cluster_factory: ClusterFactory
    cluster: VllmCluster
    prefill: FleetProcess = field(init=False)
    server: Server = field(init=False)
    gateway: FleetProcess = field(init=False)
    prompts: Prompts = field(default_factory=lambda: Prompts(SEED))
    clients: list[Client] = field(default_factory=list)

    @property
    def decode(self) -> FleetProcess:
        return self.cluster.decode

    def open(self) -> None:
        (prefill,) = self.cluster_factory.take("standing_pair", start_slow_prefill)
        self._meet(prefill)
        changes = {"gateway.probe_interval_s": 0.2}
        self.gateway = self.cluster_factory.start_gateway([self.prefill], [self.decode], **changes)

    def connect(self, prompt: list[int], **changes: object) -> Client:
        """A client that asks the gateway."""
        self.clients.append(Client(self.gateway, prompt, **changes))
        return self.clients[-1]

    def disconnect(self) -> None:
        """Close the connections that a test has left open."""
        for client in self.clients:
            client.leave()
        self.clients.clear()

    def restart_prefill(self) -> None:
        """Start it at the address of the one that died."""
        assert not self.prefill.is_alive
        port = int(self.prefill.url.rpartition(":")[2])
        (prefill,) = start_slow_prefill(self.cluster_factory, port)
        wait_ready(prefill)
        self._meet(prefill)

    def _meet(self, prefill: FleetProcess) -> None:
        # Asked now: while a long prompt is computed, the probe would wait behind it.
        self.prefill, self.server = prefill, Server.of(prefill)

    def expect(self, prompt: list[int], **changes: object) -> Answer:
        return ask_one(self.cluster.oracle, prompt, **changes)

    def check_handoff(self, gateway: FleetProcess | None = None) -> None:
        """The pair works: soon, a fresh prompt is handed over and answered rightly."""
        through = gateway or self.gateway

        def handed_over() -> bool:
            prompt = self.prompts.make(70)
            answer = ask_one(through, prompt)
            check_same([answer], [self.expect(prompt)])
            summary = read_request(through, answer.request_id)["summary"]
            return summary is not None and summary["num_received_tokens"] == len(prompt)

        wait_until(handed_over, HEAL_S)

    def wait_settled(self, *servers: FleetProcess) -> None:
        """Nothing is left of any request, in either server or the gateway."""
        for server in servers or (self.prefill, self.decode):
            wait_until(lambda server=server: is_idle(server), SETTLE_S, server.tail)
        inflight = "baton_gateway_inflight_requests"
        wait_until(lambda: read_metric(self.gateway.url, inflight) == 0, SETTLE_S)

    def wait_prefilling(self, request_id: str) -> None:
        """Until some of a prompt's KV was computed, and not all."""

        def prefilling() -> bool:
            leg = self.server.find_trace(request_id)
            if leg is None or Stamp.FIRST_LAYER_READY not in leg.stamps:
                return False
            assert Stamp.PREFILL_DONE not in leg.stamps, "too late: prefill is done"
            return True

        wait_until(prefilling, 60.0)


def start_slow_prefill(cluster_factory: ClusterFactory, port: int = 0) -> tuple[FleetProcess, ...]:
    server = cluster_factory.start(
        "slow-prefill",
        "prefill",
        worker__port=port,
        handoff__liveness_timeout_s=LIVENESS_TIMEOUT_S,
        handoff__layer_batch_bytes=0,
        engine__max_context_tokens=CONTEXT_TOKENS,
        engine__max_num_batched_tokens=16,
        engine__kv_cache_bytes=POOL_TOKENS * KV_BYTES_PER_TOKEN,
        engine__arguments=["--enable-prompt-tokens-details", f"--max-num-seqs={NUM_SEQS}"],
    )
    return (server,)


class Client:
    """One request whose client may leave."""

    def __init__(self, server: FleetProcess, prompt: list[int], **changes: object) -> None:
        self.id = f"vllm-chaos-{next(_numbers)}"
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        headers = {"content-type": "application/json", "x-request-id": self.id}
        body = json.dumps(make_body(prompt, **changes))
        self._response: http.client.HTTPResponse | None = None
        self._connection.request("POST", "/v1/completions", body, headers)

    def read_lines(self, num_lines: int) -> None:
        """Read as much of a stream."""
        self._response = response = self._connection.getresponse()
        assert response.status == 200
        lines = (line for line in response if line.startswith(b"data: "))
        assert len(list(itertools.islice(lines, num_lines))) == num_lines

    def read_answer(self) -> Answer:
        response = self._connection.getresponse()
        answer = json.load(response)
        assert response.status == 200, answer
        self._connection.close()
        return read_answer(answer, self.id)

    def leave(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


def fill(server: FleetProcess, prompts: Prompts, pool, num: int, **changes) -> list[Future]:
    """Requests that keep a server busy, asked without Baton."""
    bodies = [make_body(prompts.make(300), **changes) for _ in range(num)]
    return [pool.submit(post, f"{server.url}/v1/completions", body) for body in bodies]
