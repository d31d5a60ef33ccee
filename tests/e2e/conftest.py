"""One fleet of real workers and gateways for all end-to-end tests.

The model has random weights, made so that one foreign page of KV changes the next greedy tokens
(`tests/unit/engines/test_random_model.py` shows it): what the demo model says hardly would.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from baton.auth.credentials import Credentials
from baton.auth.issuing import Order, create_authority, issue
from baton.engines.transformers.random_model import RandomModelSpec, make_random_model
from baton.net.tls import ClusterTls
from baton.testing.fleet import Fleet, FleetProcess
from tests.e2e.client import KEY
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENGINE: dict[str, object] = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.max_batch_tokens": 256,  # a long prompt is computed in many chunks
    "engine.num_blocks": 1600,
}
SPEC = RandomModelSpec(
    num_layers=3,
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
    pool_gateway: FleetProcess
    identities: Path
    """Directories of `tcp`'s processes, by their names, and of their `authority`."""

    @property
    def authority(self) -> Path:
        """Whom `tcp`'s processes trust now: `test_identities` has them trust another one."""
        rotated = self.identities / "authority-2"
        return rotated if rotated.exists() else self.identities / "authority"

    @property
    def tcp_client(self) -> ssl.SSLContext:
        """Of one whom `tcp`'s workers serve: its gateway."""
        directory = self.identities / "tcp-gateway"
        return ClusterTls(Credentials.from_directory(directory, KEY.key)).dialing

    def gateway(self, transport: str) -> FleetProcess:
        return self.shared_gateway if transport == "shared" else self.tcp_gateway


def make_identities(directory: Path) -> Callable[[str], dict[str, object]]:
    """Of an authority; the setting by which a process takes up its own."""
    create_authority(directory / "authority")
    roles = {"tcp-prefill": "worker", "tcp-decode": "worker", "tcp-gateway": "gateway"}
    for name, role in roles.items():
        issue(Order(role, name), directory / "authority", directory / name)
    return lambda name: {"security.identity": str(directory / name)}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerCluster]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY.key.secret.hex())
    model = tmp_path_factory.mktemp("model") / "demo"
    make_random_model(model, SPEC)
    engine = ENGINE | {"worker.model": str(model), "worker.served_model_name": "demo"}
    identities = tmp_path_factory.mktemp("identities")
    own = make_identities(identities)
    tcp = engine | {"transfer.transports": ["tcp"], "security.tls": "all"}
    # Not measured: on a busy machine another transport may be the cheapest for a while.
    shared = engine | {"transfer.choice": "listed", "security.tls": "control"}
    shared |= {  # for mode pool alone
        "store.tiers": ["shared"],
        "store.options.shared.directory": str(tmp_path_factory.mktemp("store")),
        "store.prefixes": False,
    }
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        workers = [
            fleet.start_worker("colocated", "both", engine),
            fleet.start_worker("prefill", "prefill", shared),
            fleet.start_worker("decode", "decode", shared),
            fleet.start_worker("tcp-prefill", "prefill", tcp | own("tcp-prefill")),
            fleet.start_worker(
                "tcp-decode",
                "decode",
                tcp | own("tcp-decode") | {"engine.block_size": 24, "engine.num_blocks": 1100},
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
            tcp_gateway=fleet.start_gateway(
                [tcp_prefill], [tcp_decode], settings=tls | own("tcp-gateway")
            ),
            pulling_gateway=fleet.start_gateway(
                [prefill], [decode], settings=tls | {"gateway.mode": "pull"}
            ),
            early_gateway=fleet.start_gateway(
                [prefill], [decode], settings=tls | {"gateway.first_token_early": True}
            ),
            pool_gateway=fleet.start_gateway(
                [prefill], [decode], settings=tls | {"gateway.mode": "pool"}
            ),
            identities=identities,
        )
        assert set(fleet.stop().values()) == {0}
