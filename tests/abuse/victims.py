"""A fleet of real processes that is attacked, and what an honest client beside the attack sees."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.net.tls import ClusterTls
from baton.testing.fleet import Fleet, FleetProcess
from tests.abuse.attacks import JSON, MIB, TIMEOUT, Addresses
from tests.chaos.clients import ClientRequest, Prompts, Reply, ask
from tests.chaos.process_state import read_listening_ports
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from baton.testing.fleet import StartChild

MAX_GROWTH_MIB: Final = 64
NORMAL_AGAIN_S: Final = 5.0
ENGINE: Final[dict[str, object]] = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.num_blocks": 128,
}


@dataclass(frozen=True)
class Victims:
    """A gateway with its two workers, with TLS between them."""

    gateway: FleetProcess
    workers: tuple[FleetProcess, ...]
    key: Credentials

    @property
    def addresses(self) -> Addresses:
        parts = urlsplit(self.gateway.url)
        assert parts.hostname is not None
        assert parts.port is not None
        ports = frozenset[int]().union(*(read_listening_ports(w.pid) for w in self.workers))
        return Addresses(self.gateway.url, parts.hostname, parts.port, tuple(sorted(ports)))

    def find(self, name: str) -> FleetProcess:
        """`gateway`, `prefill` or `decode`."""
        return next((w for w in self.workers if w.name == name), self.gateway)

    def read_rss_bytes(self) -> dict[str, int]:
        """Of each process; shared pages count where they are mapped."""
        return {process.name: _read_rss_bytes(process) for process in (self.gateway, *self.workers)}

    async def read_metric(self, name: str, beginning: str) -> float:
        """The sum of the samples of a process whose lines begin so."""
        process = self.find(name)
        tls = {}
        if process is not self.gateway:
            tls = {"ssl": ClusterTls(self.key).dialing}
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.get(f"{process.url}/metrics", **tls) as response,
        ):
            assert response.status == 200
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(beginning))


def _read_rss_bytes(process: FleetProcess) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def running_victims(
    logs: Path,
    start: StartChild = start_preloaded,
    *,
    engine: Mapping[str, object] = MappingProxyType({}),
    max_inflight_requests: int = 8,
) -> Iterator[Victims]:
    """A fleet with bounds that attacks reach soon; `engine` are further settings of its workers."""
    secret = secrets.token_bytes(32)
    environment = dict(os.environ, BATON_CLUSTER_KEY=secret.hex())
    with Fleet(logs, environment, start=start, tls="control") as fleet:
        prefill = fleet.start_worker("prefill", "prefill", {**ENGINE, **engine})
        decode = fleet.start_worker("decode", "decode", {**ENGINE, **engine})
        workers = prefill.wait_ready(), decode.wait_ready()
        settings = {"gateway.max_inflight_requests": max_inflight_requests}
        gateway = fleet.start_gateway([prefill], [decode], settings=settings)
        yield Victims(gateway, workers, Credentials.of(ClusterKey(secret)))
        assert set(fleet.stop().values()) == {0}


class HonestClient:
    """Asks the same again and again; each answer must be the first one's."""

    def __init__(self, gateway_url: str, num_tokens: int = 40) -> None:
        self._url, self._prompt = gateway_url, Prompts(7).make(num_tokens)
        self._expected: Reply | None = None

    async def ask(self) -> None:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            reply = await ask(session, self._url, ClientRequest(self._prompt))
        self._expected = self._expected or reply
        assert reply.error is None
        assert reply == self._expected

    async def measure_ttft_s(self) -> float:
        """Of a stream: until the first event."""
        body = {**ClientRequest(self._prompt, num_tokens=2, stream=True).body}
        began_at = time.perf_counter()
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT) as session,
            session.post(
                f"{self._url}/v1/completions", data=json.dumps(body), headers=JSON
            ) as response,
        ):
            assert response.status == 200, await response.text()
            await response.content.readline()
            ttft_s = time.perf_counter() - began_at
            rest = await response.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        return ttft_s


async def until_memory_is_back(victims: Victims, before: dict[str, int]) -> dict[str, int]:
    """Wait until no process holds more than it may; MiB by which each has grown.

    Raises:
        AssertionError: one does after `NORMAL_AGAIN_S`.
    """
    deadline = time.monotonic() + NORMAL_AGAIN_S
    while True:
        after = victims.read_rss_bytes()
        grown = {name: (after[name] - before[name]) // MIB for name in before}
        if max(grown.values()) <= MAX_GROWTH_MIB:
            return grown
        assert time.monotonic() < deadline, f"grown by MiB: {grown}"
        await asyncio.sleep(0.05)
