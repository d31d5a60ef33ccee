"""Starts all processes, keeps them running, drains them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never

from baton.launch.child import Child, ChildExited, spawn
from baton.launch.errors import FleetError
from baton.launch.gateways import until_all_up
from baton.launch.members_file import write_members
from baton.launch.plan import LaunchPlan, Ports, WorkerPlan
from baton.launch.progress import Display, showing
from baton.launch.restarter import Restarter
from baton.launch.restarts import RestartHistory, RestartPolicy
from baton.launch.slots import GATEWAY, ChildFailedError, ProcessSlot, drain
from baton.launch.sockets import GatewaySockets, open_gateway_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
    from pathlib import Path

    from baton.clock import Clock

SERVING_TIMEOUT_S: Final = 15.0


class Ending(IntEnum):
    """How a launch that was asked to stop has ended; the values are exit codes."""

    DRAINED = 0
    OVERDUE = 1
    WORKERS_FAILED = 3
    """Drained, and when that was asked for, a worker had ended too often and did not serve."""
    KILLED = 130


@dataclass(frozen=True, slots=True)
class Stopped:
    """A launch whose processes have ended; `processes` has how each of them did, in words."""

    ending: Ending
    processes: str

    @property
    def problem(self) -> str | None:
        """Why not every process has drained; None: each has."""
        match self.ending:
            case Ending.DRAINED | Ending.WORKERS_FAILED:
                return None
            case Ending.OVERDUE:
                return (
                    "the fleet has ended, but processes that took too long had to be killed, with "
                    "the requests that they had: raise worker.drain_timeout_s and "
                    "gateway.drain_timeout_s where requests take longer"
                )
            case Ending.KILLED:
                return "the fleet has ended; a second signal had its processes killed"
            case _:
                assert_never(self.ending)


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a launch needs from outside. `environment` is the children's.

    `restarts`: None ends the launch with the first process that ends. `members` is where the
    gateways find the workers while the launch runs; None: they are the same from start to end.
    """

    environment: Mapping[str, str]
    clock: Clock
    display: Display
    restarts: RestartPolicy | None = field(default_factory=RestartPolicy)
    members: Path | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """What a launch that is ready serves: the gateway's URL and the model's name.

    `management_urls`: where each gateway process answers operators.
    """

    url: str
    model: str
    management_urls: tuple[str, ...]


class Supervisor:
    """One launch, from start to end. Owned by one event loop; `run` or `serve` is called once."""

    def __init__(self, plan: LaunchPlan, context: LaunchContext) -> None:
        self.plan, self.context = plan, context
        self.slots: dict[str, ProcessSlot] = {}
        self._display = context.display
        self._sockets: GatewaySockets | None = None
        self._service: Service | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._operation: asyncio.Task[None] | None = None
        self._num_stop_requests = 0
        self._stop_requested = asyncio.Event()
        self.stopped: asyncio.Future[Stopped] = asyncio.get_running_loop().create_future()
        """Set when all processes have ended."""

    async def run(self, on_ready: Callable[[Service], None]) -> Ending:
        """The same as `serve`, and a signal asks to stop."""
        with self._signals_handled():
            return await self.serve(on_ready)

    async def serve(self, on_ready: Callable[[Service], None]) -> Ending:
        """Start everything, call `on_ready`, run until `request_stop`.

        Raises:
            ConfigError: the gateway's port is taken.
            FleetError: a process cannot be started; everything else was stopped.
            ChildFailedError: a process ended at start, the gateway ended too often, or it refuses
                a worker; everything else was stopped.
        """
        self._sockets = open_gateway_sockets(self.plan.config.gateway)
        try:
            life = asyncio.create_task(self._run_until_stopped(self._sockets, on_ready))
            stop = asyncio.create_task(self._stop_requested.wait())
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            self._stop_requested.set()
            await self._cancel_operation()  # at first: it starts processes, and restarts them
            life.cancel()
            stop.cancel()
            (outcome, _) = await asyncio.gather(life, stop, return_exceptions=True)
        finally:
            self._sockets.close()
        failed = [(slot.name, slot.reason) for slot in self.slots.values() if slot.has_failed]
        ending = await self._stop_all()
        ends = ", ".join(await self._describe_ends()) or "nothing was running"
        self._display.print_line(f"stopped: {ends}")
        for name, reason in failed:
            self._display.print_line(f"{name} did not serve any more when it was stopped: {reason}")
        if failed and ending is Ending.DRAINED:
            ending = Ending.WORKERS_FAILED
        self.stopped.set_result(Stopped(ending, ends))
        if isinstance(outcome, Exception):
            raise outcome
        return ending

    @property
    def processes(self) -> dict[str, int]:
        """Each process's id by name, the gateway's too; it leads a session of its own."""
        return {name: slot.child.pid for name, slot in self.slots.items()}

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """Where each gateway process answers /metrics; none before they are ready."""
        url = self.slots[GATEWAY].url if GATEWAY in self.slots else None
        if url is None or self._sockets is None:
            return ()
        return self._sockets.metrics_urls(url)

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop, or has to."""
        return self._stop_requested.is_set()

    def request_stop(self) -> None:
        """The first time: drain. The second time: kill."""
        self._num_stop_requests += 1
        self._stop_requested.set()
        if self._num_stop_requests == 1:
            self._display.print_line("draining; press Ctrl-C again to kill")
            return
        for slot in self.slots.values():
            slot.child.kill()

    async def _run_until_stopped(
        self, sockets: GatewaySockets, on_ready: Callable[[Service], None]
    ) -> None:
        started = self.context.clock.now()
        async with showing(self._display, self._unready):
            url = await self._start_all(sockets)
            model = await self._until_serving()
        self._display.print_line(f"ready after {self.context.clock.now() - started:.1f} s")
        self._service = Service(url, model, self.metrics_urls)
        on_ready(self._service)
        for slot in self.slots.values():
            self.restart_when_ended(slot)
        try:
            await self._failed
        finally:
            for slot in list(self.slots.values()):  # one whose machine is taken leaves them
                await slot.stop_restarting()

    # Operations on a launch that serves (`baton.launch.operations`)

    def begin(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run an operation, one at a time; it is cancelled when the launch is to stop.

        Raises:
            FleetError: the launch does not serve, or another operation is under way.
        """
        refusal = None
        if self._stop_requested.is_set():
            refusal = "the fleet is being stopped"
        elif self._service is None:
            refusal = "the fleet is still starting; `baton status` shows what it waits for"
        elif self._operation is not None and not self._operation.done():
            refusal = f"`{self._operation.get_name()}` is under way; try again when it has ended"
        if refusal is not None:
            work.close()
            raise FleetError(refusal)
        self._operation = asyncio.create_task(work, name=name)
        return self._operation

    async def add(self, plan: WorkerPlan) -> ProcessSlot:
        """Start a worker. It is not restarted before `restart_when_ended` is called for it.

        Raises:
            FleetError: it cannot be started.
        """
        return await self._fill(plan.name, partial(plan.command, self.plan.file), plan)

    async def start_again(self, slot: ProcessSlot) -> None:
        """Start the next process of a slot, at the same addresses.

        Raises:
            FleetError: it cannot be started.
        """
        slot.child = await self.spawn_next(slot)
        slot.started_at = self.context.clock.now()

    async def spawn_next(self, slot: ProcessSlot) -> Child:
        """Start a process as that of a slot, which keeps its own.

        Raises:
            FleetError: it cannot be started.
        """
        fds = self._inherited if slot.plan is None else ()
        return await self._spawn(slot.name, slot.command(slot.ports), fds)

    async def end(self, slot: ProcessSlot) -> str:
        """Have a slot's process drain and end, for good: how it ended, in words."""
        await slot.stop_restarting()
        config = self.plan.config
        section = config.gateway if slot.plan is None else config.worker
        await self._drain([slot], section.drain_timeout_s)
        return await slot.child.wait_until_stopped()

    async def remove(self, slot: ProcessSlot) -> None:
        """Forget a slot; its process is killed, if it has not ended. Twice is as once."""
        await slot.stop_restarting()
        slot.child.kill()
        await slot.child.wait_until_exited()
        self.slots.pop(slot.name, None)
        try:
            self.publish_members()
        except FleetError as exc:  # the gateways find out by themselves that it has ended
            self._display.print_line(str(exc))

    def publish_members(self) -> None:
        """Let the gateways know which workers there are.

        Raises:
            FleetError: the file cannot be written.
        """
        if self.context.members is None:
            return
        try:
            write_members(self.context.members, self.slots.values())
        except OSError as exc:
            raise FleetError(
                f"cannot write {self.context.members}: {exc.strerror}; the gateways keep the "
                "workers that they have"
            ) from exc

    def restart_when_ended(self, slot: ProcessSlot) -> None:
        """It serves: from now on another process follows when it ends.

        A gateway that ends too often ends the launch; a worker is tried again, after ever longer
        pauses, while the others serve.
        """
        slot.restarter = asyncio.create_task(Restarter(self, slot).run())
        slot.restarter.add_done_callback(self._note_restarter)

    async def _cancel_operation(self) -> None:
        if self._operation is not None:
            self._operation.cancel()
            await asyncio.gather(self._operation, return_exceptions=True)

    # Starting

    async def _start_all(self, sockets: GatewaySockets) -> str:
        for worker in self.plan.workers:
            await self.add(worker)
        found = await asyncio.gather(*(self._url_of(slot) for slot in self.slots.values()))
        urls = dict(zip(self.slots, found, strict=True))
        self.publish_members()
        workers = urls if self.context.members is None else self.context.members

        def command(_: Ports) -> tuple[str, ...]:
            return (*self.plan.gateway_command(workers, sockets.port), *sockets.arguments())

        # Workers may still be loading: the gateway finds them when they answer.
        gateway = await self._fill(GATEWAY, command)
        await asyncio.gather(*(slot.until_ready() for slot in self.slots.values()))
        return gateway.url or ""

    async def _until_serving(self) -> str:
        num_workers = len(self.plan.workers)
        try:
            async with asyncio.timeout(SERVING_TIMEOUT_S):
                return await until_all_up(self.metrics_urls, num_workers)
        except TimeoutError as exc:
            raise ChildFailedError(
                f"all processes are ready, but the gateway does not use all {num_workers} workers "
                f"after {SERVING_TIMEOUT_S:g} s; its lines above give the reason"
            ) from exc

    async def _fill(
        self,
        name: str,
        command: Callable[[Ports], tuple[str, ...]],
        plan: WorkerPlan | None = None,
    ) -> ProcessSlot:
        child = await self._spawn(name, command(Ports()), () if plan else self._inherited)
        history = RestartHistory(self.context.restarts or RestartPolicy())
        now = self.context.clock.now()
        slot = self.slots[name] = ProcessSlot(name, command, child, history, now, plan)
        return slot

    @property
    def _inherited(self) -> tuple[int, ...]:
        return () if self._sockets is None else self._sockets.fds

    async def _spawn(self, name: str, command: Sequence[str], fds: Sequence[int] = ()) -> Child:
        def on_line(line: str) -> None:
            self._display.child_line(name, line)

        try:
            return await spawn(name, command, self.context.environment, on_line, inherited=fds)
        except (OSError, RuntimeError, subprocess.SubprocessError) as exc:
            # A RuntimeError: asyncio watches each process from a thread, and there may be no more.
            reason = getattr(exc, "strerror", None) or exc
            raise FleetError(f"{name} cannot be started: {reason}") from exc

    async def _url_of(self, slot: ProcessSlot) -> str:
        url = await slot.child.wait_for_url()
        if isinstance(url, ChildExited):
            raise slot.failure(url, "ended while starting")
        slot.url = url
        return url

    # Keeping

    def _note_restarter(self, restarter: asyncio.Task[None]) -> None:
        if not restarter.cancelled() and (exc := restarter.exception()) and not self._failed.done():
            self._failed.set_exception(exc)

    # Stopping

    async def _stop_all(self) -> Ending:
        """The gateway first: workers then finish what it still streams."""
        config = self.plan.config
        workers = [slot for slot in self.slots.values() if slot.plan is not None]
        gateways = [slot for slot in self.slots.values() if slot.plan is None]
        async with showing(self._display, self._unended):
            in_time = await self._drain(gateways, config.gateway.drain_timeout_s)
            in_time &= await self._drain(workers, config.worker.drain_timeout_s)
        if self._num_stop_requests > 1:
            return Ending.KILLED
        return Ending.DRAINED if in_time else Ending.OVERDUE

    async def _drain(self, slots: Sequence[ProcessSlot], timeout_s: float) -> bool:
        return await drain(slots, timeout_s, is_urgent=self._num_stop_requests > 1)

    async def _describe_ends(self) -> list[str]:
        return [
            f"{slot.name} ({await slot.child.wait_until_stopped()})" for slot in self.slots.values()
        ]

    # Showing

    def _unready(self) -> list[str]:
        names = [*(worker.name for worker in self.plan.workers), GATEWAY]
        ready = {name for name, slot in self.slots.items() if slot.child.is_ready}
        waiting = [self._with_phase(name) for name in names if name not in ready]
        return waiting or ["the gateway to find its workers"]

    def _with_phase(self, name: str) -> str:
        phase = self.slots[name].child.phase if name in self.slots else None
        return name if phase is None else f"{name} ({phase})"

    def _unended(self) -> list[str]:
        return [name for name, slot in self.slots.items() if not slot.child.is_ended]

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
