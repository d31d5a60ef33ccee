"""Two pairs of real workers, one for each transport, behind a gateway each; and an oracle."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import aiohttp
import pytest

from baton.auth.key import ClusterKey
from baton.testing.fleet import Fleet, FleetProcess
from tests.chaos.clients import CLIENT_TIMEOUT, ClientRequest, Prompt, Prompts, Reply, ask
from tests.chaos.process_state import (
    TIMEOUT_S,
    MappedPages,
    find_processes_of_sessions,
    find_trace,
    is_listening,
    is_stopped,
    read_abstract_names,
    read_all_abstract_names,
    read_footprint,
    read_listening_ports,
    read_shm_files,
    until,
)
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from baton.config.sections import Role

KEY = secrets.token_hex(32)
BEARER = {"authorization": f"Bearer {ClusterKey.from_hex(KEY).sign('http', b'worker').hex()}"}
"""What workers beyond loopback want of whoever asks them."""
SEED = 20261121
NUM_BLOCKS = 440
LONG = 1600
"""Tokens of a prompt that is being prefilled long enough for a fault to find it there."""
LIVENESS_TIMEOUT_S = 1.5
ENGINE: dict[str, object] = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.num_blocks": NUM_BLOCKS,
    "handoff.liveness_timeout_s": LIVENESS_TIMEOUT_S,
    # Each layer by itself: these prompts have so few bytes that they would go at once.
    "handoff.layer_batch_bytes": 0,
}
ROLES: dict[Role, dict[str, object]] = {
    # Small steps make prefill slow there, while decode computes the same in a moment.
    "prefill": ENGINE | {"engine.max_batch_tokens": 16},
    "decode": ENGINE | {"engine.max_batch_tokens": 512},
}
GATEWAY: dict[str, object] = {
    "gateway.probe_interval_s": 0.2,
    "gateway.probe_timeout_s": 1.0,
    "gateway.wait_for_worker_s": 0.5,  # who dies here stays away for longer
    # A worker may be kept stopped for as long as another one starts, on however busy a machine.
    "gateway.abandon_after_s": 150.0,
}


@dataclass
class Pair:
    """A prefill and a decode worker that hand over by one transport, and their gateway.

    `unlinked` is what each worker holds while it knows no peer; `mode` is the operator's, of each
    gateway that is started; `changes` are settings of one role's workers, in each life.
    """

    transport: str
    fleet: Fleet
    prefill: FleetProcess
    decode: FleetProcess
    gateway: FleetProcess = field(init=False)
    unlinked: dict[int, MappedPages] = field(default_factory=dict)
    mode: str = "auto"
    changes: dict[Role, dict[str, object]] = field(default_factory=dict)

    @property
    def way(self) -> tuple[str, str | None]:
        """The mode and the transport by which a short prompt is handed over here."""
        match self.mode:
            case "auto":
                return "push", self.transport
            case "reference":
                return "reference", "reference"
            case "pool":
                return "pool", None
            case _:
                return self.mode, self.transport

    def settle(self) -> None:
        """Wait for the workers, note what they hold, and start a gateway."""
        for worker in (self.prefill, self.decode):
            self._negotiate(worker.wait_ready())
        self.start_gateway()

    def start_gateway(self, port: int = 0) -> None:
        settings = GATEWAY | {"gateway.port": port, "gateway.mode": self.mode}
        self.gateway = self.fleet.start_gateway([self.prefill], [self.decode], settings=settings)

    def heal(self) -> None:
        """Undo what a test that failed has left behind."""
        for role in ("prefill", "decode"):
            worker = self.prefill if role == "prefill" else self.decode
            worker.send(signal.SIGCONT)
            if not worker.is_alive:
                self.restart(role)
        self.gateway.send(signal.SIGCONT)
        if not self.gateway.is_alive:
            self.start_gateway()

    def restart(self, role: Role) -> None:
        """Start a worker at the address of the one that died, and wait until it answers."""
        dead = self.prefill if role == "prefill" else self.decode
        assert not dead.is_alive
        assert dead.ready is not None
        endpoints = {
            "worker.port": port_of(dead.ready.url),
            "worker.handoff_port": port_of(dead.ready.handoff_address),
        }
        changes = self.changes.get(role, {}) | endpoints
        fresh = start(self.fleet, self.transport, role, changes).wait_ready()
        self._negotiate(fresh)
        if role == "prefill":
            self.prefill = fresh
        else:
            self.decode = fresh

    def _negotiate(self, worker: FleetProcess) -> None:
        """Note what a worker holds once it has opened all that it opens at its first request."""

        async def warm_up(session: aiohttp.ClientSession) -> None:
            reply = await ask(session, worker.url, ClientRequest([300, 301, 302]))
            assert reply.error is None
            self.unlinked[worker.pid] = read_footprint(worker)

        run(warm_up)


@dataclass
class ChaosCluster:
    """Everything that runs. `prompts` are fresh for each request unless a test wants otherwise."""

    oracle: FleetProcess
    pairs: tuple[Pair, ...]
    prompts: Prompts

    def pair(self, transport: str) -> Pair:
        return next(pair for pair in self.pairs if pair.transport == transport)

    async def expect(
        self, session: aiohttp.ClientSession, prompt: Prompt, num_tokens: int = 8
    ) -> Reply:
        """What a single worker, to which nothing happens, says."""
        reply = await ask(session, self.oracle.url, ClientRequest(prompt, num_tokens))
        assert reply.error is None
        return reply

    async def check_handoff(self, session: aiohttp.ClientSession, pair: Pair) -> None:
        """Soon, a fresh prompt is handed over as it should be here, and answered rightly."""

        async def handed_over() -> bool:
            request = ClientRequest(self.prompts.make(50))
            reply = await ask(session, pair.gateway.url, request)
            if reply.error is not None:
                assert reply.is_clean_error
                return False
            assert reply == await self.expect(session, request.prompt)
            trace = await find_trace(session, pair.decode, request.id)
            assert trace is not None
            ways.append((trace.mode, trace.transport))
            return trace.num_received_tokens > 0 and ways[-1] == pair.way

        ways: list[tuple[str | None, str | None]] = []
        try:
            await until(f"a request is handed over by {pair.way}", handed_over, TIMEOUT_S)
        except AssertionError as exc:
            exc.add_note(f"the ways that were taken: {ways}")
            raise


@asynccontextmanager
async def opened_session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        timeout=CLIENT_TIMEOUT, connector=connector, headers=BEARER
    ) as session:
        yield session


AnyPair = TypeVar("AnyPair", bound=Pair)


def run(scenario: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    """Run one scenario to its end."""

    async def main() -> None:
        async with opened_session() as session:
            await scenario(session)

    asyncio.run(main())


def run_on_both(
    cluster: ChaosCluster, scenario: Callable[[aiohttp.ClientSession, Pair], Awaitable[None]]
) -> None:
    """Run one scenario on both pairs at once: they share nothing but the machine."""
    run_on(cluster.pairs, scenario)


def run_on(
    pairs: Sequence[AnyPair], scenario: Callable[[aiohttp.ClientSession, AnyPair], Awaitable[None]]
) -> None:
    """Run one scenario on several pairs at once."""

    async def one(session: aiohttp.ClientSession, pair: AnyPair) -> None:
        try:
            await scenario(session, pair)
        except Exception as exc:
            exc.add_note(f"pair: {pair.prefill.name}")
            raise

    async def main(session: aiohttp.ClientSession) -> None:
        outcomes = await asyncio.gather(
            *(one(session, pair) for pair in pairs), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    run(main)


async def freeze(process: FleetProcess) -> None:
    """SIGSTOP, and wait until the kernel says that it took effect."""
    process.send(signal.SIGSTOP)

    async def stopped() -> bool:
        return is_stopped(process)

    await until("stopped", stopped, 2.0)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def start(
    fleet: Fleet, transport: str, role: Role, changes: Mapping[str, object] | None = None
) -> FleetProcess:
    settings = ROLES[role] | {"transfer.transports": [transport]} | dict(changes or {})
    return fleet.start_worker(f"{transport}-{role}", role, settings)


@pytest.fixture
def cluster(standing_cluster: ChaosCluster) -> ChaosCluster:
    """A cluster that is well, whatever the test before has done to it."""
    for pair in standing_cluster.pairs:
        pair.heal()
    return standing_cluster


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """A worker to which nothing happens."""
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY)
    with Fleet(tmp_path_factory.mktemp("oracle"), environment, start=start_preloaded) as fleet:
        yield fleet.start_worker("oracle", "both", ENGINE)
        fleet.stop()


@pytest.fixture(scope="session")
def standing_cluster(
    tmp_path_factory: pytest.TempPathFactory, oracle: FleetProcess
) -> Iterator[ChaosCluster]:
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY)
    with Fleet(tmp_path_factory.mktemp("logs"), environment, start=start_preloaded) as fleet:
        shared, tcp = (
            Pair(kind, fleet, start(fleet, kind, "prefill"), start(fleet, kind, "decode"))
            for kind in ("shared", "tcp")
        )
        for pair in (shared, tcp):
            pair.settle()
        print(f"seed {SEED}, logs in {fleet.logs}")
        yield ChaosCluster(oracle.wait_ready(), (shared, tcp), Prompts(SEED))
        check_shutdown(fleet)


def check_shutdown(fleet: Fleet) -> None:
    """Whatever happened before, SIGTERM ends every process well, and nothing of it is left."""
    alive = [process for process in fleet.processes if process.is_alive]
    ports = {port for process in alive for port in read_listening_ports(process.pid)}
    names = {name for process in alive for name in read_abstract_names(process.pid)}
    assert len(ports) > len(alive), "each has a port, and workers have more"
    assert names, "shared listens too"
    assert not any(read_shm_files(process.pid) for process in alive)
    fleet.stop()
    assert [process.popen.returncode for process in alive] == [0] * len(alive)
    assert not any(is_listening(port) for port in ports)
    assert not names & read_all_abstract_names()
    sessions = {process.pid for process in fleet.processes}
    assert not find_processes_of_sessions(sessions), "a child outlived its parent"
