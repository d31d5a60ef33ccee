"""One fleet of real workers and gateways for all end-to-end tests.

The model has random weights, made so that one foreign page of KV changes the next greedy tokens
(`tests/unit/engines/test_random_model.py` shows it): what the demo model says hardly would.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from baton.engines.transformers.random_model import RandomModelSpec, make_random_model
from baton.testing.fleet import Fleet, FleetProcess
from tests.e2e.client import KEY
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE: dict[str, object] = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.max_batch_tokens": 256,  # a long prompt is computed in many chunks
    "engine.num_blocks": 1600,
}
SPEC = RandomModelSpec(
    num_layers=6,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    max_context_tokens=8192,
    dtype="float32",
)


@dataclass(frozen=True)
class WorkerCluster:
    """The same model served in three ways.

    `pulling_gateway` and `early_gateway` have the workers of `shared`, and settings of their own.

    `colocated` is one worker that does both parts: the oracle. `shared` hands over through shared
    memory between equal layouts, `tcp` through sockets into blocks of another size.
    """

    colocated: FleetProcess
    prefill: FleetProcess
    decode: FleetProcess
    tcp_prefill: FleetProcess
    tcp_decode: FleetProcess
    shared_gateway: FleetProcess
    tcp_gateway: FleetProcess
    pulling_gateway: FleetProcess
    early_gateway: FleetProcess

    def gateway(self, transport: str) -> FleetProcess:
        return self.shared_gateway if transport == "shared" else self.tcp_gateway


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerCluster]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.secret.hex())
    model = tmp_path_factory.mktemp("model") / "demo"
    make_random_model(model, SPEC)
    engine = ENGINE | {"worker.model": str(model), "worker.served_model_name": "demo"}
    tcp = engine | {"transfer.transports": ["tcp"], "security.tls": "all"}
    # Not measured: on a busy machine another transport may be the cheapest for a while.
    shared = engine | {"transfer.choice": "listed", "security.tls": "control"}
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        workers = [
            fleet.start_worker("colocated", "both", engine),
            fleet.start_worker("prefill", "prefill", shared),
            fleet.start_worker("decode", "decode", shared),
            fleet.start_worker("tcp-prefill", "prefill", tcp),
            fleet.start_worker(
                "tcp-decode", "decode", tcp | {"engine.block_size": 24, "engine.num_blocks": 1100}
            ),
        ]
        for worker in workers:
            worker.wait_ready()
        _, prefill, decode, tcp_prefill, tcp_decode = workers
        tls = {"security.tls": "control"}
        yield WorkerCluster(
            *workers,
            # Where decode has a queue, `auto` would lend instead of moving anything.
            shared_gateway=fleet.start_gateway(
                [prefill], [decode], settings=tls | {"gateway.mode": "push"}
            ),
            tcp_gateway=fleet.start_gateway([tcp_prefill], [tcp_decode], settings=tls),
            pulling_gateway=fleet.start_gateway(
                [prefill], [decode], settings=tls | {"gateway.mode": "pull"}
            ),
            early_gateway=fleet.start_gateway(
                [prefill], [decode], settings=tls | {"gateway.first_token_early": True}
            ),
        )
        assert set(fleet.stop().values()) == {0}
