"""Starts all processes, keeps them running, drains them."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.errors import BatonError
from baton.launch.child import (
    Child,
    ChildExited,
    RestartBudget,
    RestartPolicy,
    describe_exit,
    likely_cause,
    spawn,
)
from baton.launch.plan import Ports
from baton.launch.ports import require_free_port
from baton.launch.progress import until_all_up

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence

    from baton.clock import Clock
    from baton.launch.plan import LaunchPlan
    from baton.launch.progress import Display
    from baton.telemetry.process_status import Ready


@dataclass(slots=True)
class ProcessSlot:
    """Owned by the launcher's event loop.

    `command` gives the command line on given ports: 0 at first, then those that the first life
    announced, so that its peers find the next one where it was.
    """

    name: str
    command: Callable[[Ports], tuple[str, ...]]
    child: Child
    budget: RestartBudget
    ports: Ports = field(default_factory=Ports)

    def record_ports(self, ready: Ready) -> None:
        """Keep the ports that this life got for the lives to come."""
        self.ports = Ports.of(ready)


GATEWAY: Final = "gateway"
TICK_S: Final = 0.25
SERVING_TIMEOUT_S: Final = 15.0
KILL_MARGIN_S: Final = 5.0
"""How much longer than its own drain timeout a child may take before it is killed."""


class ChildFailedError(BatonError):
    """A process ended that should not have; its last log lines are in the message."""


class Ending(IntEnum):
    """How a launch that was asked to stop has ended; the values are exit codes."""

    DRAINED = 0
    OVERDUE = 1
    KILLED = 130


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a launch needs from outside. `environment` is the children's."""

    environment: Mapping[str, str]
    clock: Clock
    display: Display
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True, slots=True)
class Service:
    """What a launch that is ready serves: the gateway's URL and the model's name."""

    url: str
    model: str


class Supervisor:
    """One launch, from start to end. Owned by one event loop; `run` or `serve` is called once."""

    def __init__(self, plan: LaunchPlan, context: LaunchContext) -> None:
        self._plan = plan
        self._context = context
        self._display = context.display
        self._slots: dict[str, ProcessSlot] = {}
        self._num_stop_requests = 0
        self._stop_requested = asyncio.Event()

    async def run(self, on_ready: Callable[[Service], None]) -> Ending:
        """The same as `serve`, and a signal asks to stop."""
        with self._signals_handled():
            return await self.serve(on_ready)

    async def serve(self, on_ready: Callable[[Service], None]) -> Ending:
        """Start everything, call `on_ready`, run until `request_stop`.

        Raises:
            ConfigError: the gateway's port is taken.
            ChildFailedError: a process died at start, or too often, or the gateway refuses a
                worker; everything else was stopped.
        """
        gateway = self._plan.config.gateway
        require_free_port(gateway.host, gateway.port)
        life = asyncio.create_task(self._run_until_stopped(on_ready))
        stop = asyncio.create_task(self._stop_requested.wait())
        await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
        life.cancel()
        stop.cancel()
        (outcome, _) = await asyncio.gather(life, stop, return_exceptions=True)
        ending = await self._stop_all()
        if isinstance(outcome, Exception):
            raise outcome
        return ending

    @property
    def processes(self) -> dict[str, int]:
        """Each process's id by name, the gateway's too; it leads a session of its own."""
        return {name: slot.child.pid for name, slot in self._slots.items()}

    def request_stop(self) -> None:
        """The first time: drain. The second time: kill."""
        self._num_stop_requests += 1
        self._stop_requested.set()
        if self._num_stop_requests == 1:
            self._display.print_line("draining; press Ctrl-C again to kill")
            return
        for slot in self._slots.values():
            slot.child.kill()

    async def _run_until_stopped(self, on_ready: Callable[[Service], None]) -> None:
        started = self._context.clock.now()
        async with self._progress(self._unready):
            url = await self._start_all()
            model = await self._until_serving(url)
        self._display.print_line(f"ready after {self._context.clock.now() - started:.1f} s")
        on_ready(Service(url, model))
        restarters = [
            asyncio.create_task(self._restart_when_ended(slot)) for slot in self._slots.values()
        ]
        try:
            await asyncio.gather(*restarters)
        finally:
            for restarter in restarters:
                restarter.cancel()
            await asyncio.gather(*restarters, return_exceptions=True)

    # Starting

    async def _start_all(self) -> str:
        names = [worker.name for worker in self._plan.workers]
        for worker in self._plan.workers:
            await self._fill(worker.name, partial(worker.command, self._plan.file))
        urls = await asyncio.gather(*(self._url_of(name) for name in names))
        by_name = dict(zip(names, urls, strict=True))
        # Workers may still be loading: the gateway finds them when they answer.
        await self._fill(GATEWAY, partial(self._plan.gateway_command, by_name))
        readies = await asyncio.gather(*(self._ready_of(name) for name in self._slots))
        for slot, ready in zip(self._slots.values(), readies, strict=True):
            slot.record_ports(ready)
        return readies[-1].url  # the gateway came last

    async def _until_serving(self, url: str) -> str:
        num_workers, gateway = len(self._plan.workers), self._plan.config.gateway
        metrics_url = url
        if gateway.management_port:
            metrics_url = f"http://{gateway.management_host}:{gateway.management_port}"
        try:
            async with asyncio.timeout(SERVING_TIMEOUT_S):
                return await until_all_up(url, metrics_url, num_workers)
        except TimeoutError as exc:
            raise ChildFailedError(
                f"all processes are ready, but the gateway does not use all {num_workers} workers "
                f"after {SERVING_TIMEOUT_S:g} s; its lines above give the reason"
            ) from exc

    async def _fill(self, name: str, command: Callable[[Ports], tuple[str, ...]]) -> None:
        child = await self._spawn(name, command(Ports()))
        self._slots[name] = ProcessSlot(name, command, child, RestartBudget(self._context.restarts))

    async def _spawn(self, name: str, command: Sequence[str]) -> Child:
        def on_line(line: str) -> None:
            self._display.child_line(name, line)

        return await spawn(name, command, self._context.environment, on_line)

    async def _url_of(self, name: str) -> str:
        slot = self._slots[name]
        url = await slot.child.wait_for_url()
        if isinstance(url, ChildExited):
            raise _failure(slot, url, "ended while starting")
        return url

    async def _ready_of(self, name: str) -> Ready:
        slot = self._slots[name]
        ready = await slot.child.wait_until_ready()
        if isinstance(ready, ChildExited):
            raise _failure(slot, ready, "ended while starting")
        return ready

    # Keeping

    async def _restart_when_ended(self, slot: ProcessSlot) -> None:
        while True:
            ended = await slot.child.wait_until_exited()
            delay_s = slot.budget.next_delay_s(self._context.clock.now())
            if delay_s is None:
                raise _failure(slot, ended, "ended too often")
            self._display.print_line(
                f"{slot.name} ended: {describe_exit(ended.returncode)}; restart in {delay_s:g} s"
                f" ({slot.budget.num_recent} of at most {self._context.restarts.max_restarts})"
            )
            await asyncio.sleep(delay_s)
            slot.child = await self._spawn(slot.name, slot.command(slot.ports))
            ready = await slot.child.wait_until_ready()
            if not isinstance(ready, ChildExited):
                self._display.print_line(f"{slot.name} is back at {ready.url}")

    # Stopping

    async def _stop_all(self) -> Ending:
        """The gateway first: workers then finish what it still streams."""
        config = self._plan.config
        workers = [slot for name, slot in self._slots.items() if name != GATEWAY]
        gateway = [slot for name, slot in self._slots.items() if name == GATEWAY]
        async with self._progress(self._unended):
            in_time = await self._drain(gateway, config.gateway.drain_timeout_s)
            in_time &= await self._drain(workers, config.worker.drain_timeout_s)
        self._display.print_line(
            "stopped: " + (", ".join(await self._describe_ends()) or "nothing was running")
        )
        if self._num_stop_requests > 1:
            return Ending.KILLED
        return Ending.DRAINED if in_time else Ending.OVERDUE

    async def _drain(self, slots: Sequence[ProcessSlot], timeout_s: float) -> bool:
        """Ask, wait, kill what is left; whether nothing had to be killed."""
        if not slots:
            return True
        ends = [asyncio.create_task(slot.child.wait_until_exited()) for slot in slots]
        for slot in slots:
            if self._num_stop_requests > 1:
                slot.child.kill()
            else:
                slot.child.terminate()
        _, late = await asyncio.wait(ends, timeout=timeout_s + KILL_MARGIN_S)
        if late:
            for slot in slots:
                slot.child.kill()
            await asyncio.wait(late)
        return not late

    async def _describe_ends(self) -> list[str]:
        return [
            f"{slot.name} ({describe_exit((await slot.child.wait_until_exited()).returncode)})"
            for slot in self._slots.values()
        ]

    # Showing

    def _unready(self) -> list[str]:
        names = [*(worker.name for worker in self._plan.workers), GATEWAY]
        ready = {name for name, slot in self._slots.items() if slot.child.is_ready}
        waiting = [self._with_phase(name) for name in names if name not in ready]
        return waiting or ["the gateway to find its workers"]

    def _with_phase(self, name: str) -> str:
        phase = self._slots[name].child.phase if name in self._slots else None
        return name if phase is None else f"{name} ({phase})"

    def _unended(self) -> list[str]:
        return [name for name, slot in self._slots.items() if not slot.child.is_ended]

    @asynccontextmanager
    async def _progress(self, pending: Callable[[], list[str]]) -> AsyncGenerator[None]:
        async def show() -> None:
            while True:
                self._display.waiting_for(pending())
                await asyncio.sleep(TICK_S)

        ticker = asyncio.create_task(show())
        try:
            yield
        finally:
            ticker.cancel()
            self._display.waiting_for(())

    @contextmanager
    def _signals_handled(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.request_stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def _failure(slot: ProcessSlot, ended: ChildExited, what: str) -> ChildFailedError:
    lines = list(slot.child.last_lines)
    quoted = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
    return ChildFailedError(
        f"{slot.name} {what} ({describe_exit(ended.returncode)}). Its last lines:\n{quoted}\n"
        f"  likely cause: {likely_cause(ended.returncode, lines)}"
    )
