"""All servers of a peer's arm: started, watched, stopped. Owned by one event loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import aiohttp

from baton.bench.architectures.fleet import InterruptedBenchError, LogDisplay
from baton.bench.architectures.peers.counters import MetricsWitness, NoWitness
from baton.bench.architectures.peers.pinning import pin_session
from baton.bench.architectures.peers.plan import HOST, Ports
from baton.bench.architectures.peers.process import PeerProcess, Start, spawn
from baton.launch.supervisor import GATEWAY, ChildFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from baton.bench.architectures.fleet import Surroundings
    from baton.bench.architectures.peers.plan import PeerPlan
    from baton.bench.architectures.witness import Witness

START_TIMEOUT_S: Final = 300.0
ASK_AGAIN_S: Final = 0.2
ASK_TIMEOUT_S: Final = 5.0
OK: Final = 200


@dataclass(slots=True)
class PeerFleet:
    """See `Servers`. What stands before the servers is called `GATEWAY`."""

    ports: dict[str, Ports]
    front: Ports
    witness: Witness
    notes: tuple[str, ...] = ()
    running: list[PeerProcess] = field(default_factory=list)

    @property
    def url(self) -> str:
        """See `Servers`."""
        return url_of(self.front)

    @property
    def processes(self) -> dict[str, int]:
        """See `Servers`."""
        return {process.name: process.pid for process in self.running}

    @property
    def is_over(self) -> bool:
        """See `Servers`."""
        return any(process.is_ended for process in self.running)

    async def until_ended(self) -> None:
        """See `Servers`."""
        waits = [asyncio.create_task(process.until_ended()) for process in self.running]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


@asynccontextmanager
async def open_peer_fleet(
    plan: PeerPlan, surroundings: Surroundings, log: Path
) -> AsyncGenerator[PeerFleet]:
    """Servers that are all up; leaving it stops them. What they say goes to `log`.

    Raises:
        ChildFailedError: a server did not start, or died meanwhile (on leaving).
        InterruptedBenchError: somebody wanted the end before they were up.
    """
    with log.open("wb", buffering=0) as file:
        display = LogDisplay(file)
        *ports, front = _free_ports(len(plan.servers) + 1)
        by_name = {server.name: each for server, each in zip(plan.servers, ports, strict=True)}
        fleet = PeerFleet(by_name, front, _witness(plan, by_name))
        starting = asyncio.create_task(_start(plan, surroundings, display, fleet))
        try:
            await _until_done(starting, surroundings.interrupt)
            yield fleet
            dead = [process for process in fleet.running if process.is_ended]
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await _stop(fleet)
    for process in dead:
        raise process.failure("ended")


async def _start(
    plan: PeerPlan, surroundings: Surroundings, display: LogDisplay, fleet: PeerFleet
) -> None:
    urls = {name: url_of(ports) for name, ports in fleet.ports.items()}
    inherited = surroundings.environment
    for server in plan.servers:
        own = fleet.ports[server.name]
        environment = plan.server_environment(inherited, server, own)
        start = Start(server.name, plan.server_command(own.http), environment, server.cores)
        await _spawn(start, display, fleet)
    async with aiohttp.ClientSession() as session:
        for process, url in zip(list(fleet.running), urls.values(), strict=True):
            await _until_up(session, process, f"{url}/health")
        start = Start(GATEWAY, plan.front_command(urls, fleet.front), inherited, None)
        process = await _spawn(start, display, fleet)
        await _until_up(session, process, f"{fleet.url}/v1/models")
    fleet.notes = tuple(_pin_again(plan, fleet))


async def _spawn(start: Start, display: LogDisplay, fleet: PeerFleet) -> PeerProcess:
    display.print_line(f"{start.name}: {' '.join(start.command)}")
    process = await spawn(start, lambda line: display.child_line(start.name, line))
    fleet.running.append(process)
    return process


async def _until_up(session: aiohttp.ClientSession, process: PeerProcess, url: str) -> None:
    """Until it answers.

    Raises:
        ChildFailedError: it ended, or takes too long.
    """
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not process.is_ended:
                try:
                    async with session.get(url, timeout=timeout) as response:
                        if response.status == OK:
                            return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass
                await asyncio.sleep(ASK_AGAIN_S)
    except TimeoutError as exc:
        raise ChildFailedError(
            f"{process.name} does not answer {url} after {START_TIMEOUT_S:g} s"
        ) from exc
    raise process.failure("ended while starting")


async def _until_done(starting: asyncio.Task[None], interrupt: asyncio.Event) -> None:
    wanted = asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait({starting, wanted}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        wanted.cancel()
    if not starting.done():
        raise InterruptedBenchError
    starting.result()


async def _stop(fleet: PeerFleet) -> None:
    """What stands before the servers first: they then finish what it asked for."""
    front = [process for process in fleet.running if process.name == GATEWAY]
    servers = [process for process in fleet.running if process.name != GATEWAY]
    for some in (front, servers):
        await asyncio.gather(*(process.stop() for process in some))


def _pin_again(plan: PeerPlan, fleet: PeerFleet) -> list[str]:
    pids = fleet.processes
    said = []
    for server in plan.servers:
        strays = pin_session(pids[server.name], server.cores)
        if strays:
            said.append(
                f"peer {plan.peer}: {server.name} had moved threads to cores {sorted(strays)}; "
                f"they were pinned to its share again, {list(server.cores)}"
            )
    return said


def url_of(ports: Ports) -> str:
    """Where a process answers."""
    return f"http://{HOST}:{ports.http}"


def _witness(plan: PeerPlan, ports: dict[str, Ports]) -> Witness:
    decodes = [url_of(ports[server.name]) for server in plan.servers if server.role == "decode"]
    return MetricsWitness(tuple(decodes)) if decodes else NoWitness()


def _free_ports(num: int) -> list[Ports]:
    """Ports that are free now, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 * num)]
        for each in sockets:
            each.bind((HOST, 0))
        numbers = [each.getsockname()[1] for each in sockets]
    return [Ports(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
