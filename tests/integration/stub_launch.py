"""A launch whose processes load no model (`stub_child`), and what it showed."""

import asyncio
import functools
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from baton.clock import MachineClock
from baton.config.sections import Config, GatewaySection, WorkerSection
from baton.launch.restarts import RestartPolicy
from baton.launch.supervisor import LaunchContext, Supervisor

STUB = str(Path(__file__).with_name("stub_child.py"))
QUICK = RestartPolicy(max_restarts=2, first_delay_s=0.01)


@dataclass(frozen=True)
class StubWorker:
    """What `WorkerPlan` is to the supervisor. `behaviour` may name a file that has it."""

    name: str
    behaviour: str
    role: str = "decode"
    settings: dict = field(default_factory=dict)

    def command(self, file, ports):
        behaviour = self.behaviour
        if behaviour.startswith("/"):
            behaviour = Path(behaviour).read_text()
        return (sys.executable, "-S", STUB, behaviour, str(ports.http))


@dataclass
class StubPlan:
    """What `LaunchPlan` is to the supervisor."""

    workers: tuple
    gateway: str
    config: Config
    file: Path | None = None

    def gateway_command(self, workers, port):
        command = (sys.executable, "-S", STUB, self.gateway, str(port))
        if isinstance(workers, Path):
            return (*command, "--members", str(workers))
        assert set(workers) == {worker.name for worker in self.workers}
        return command


class RecordingDisplay:
    def __init__(self):
        self.said, self.child_lines, self.waited_for = [], [], []

    def print_line(self, line):
        self.said.append(line)

    def child_line(self, child, line):
        self.child_lines.append((child, line))

    def waiting_for(self, names):
        self.waited_for.append(tuple(names))

    def announce(self, text):
        pass


@dataclass
class Launch:
    """A supervisor under test, and what it showed."""

    supervisor: Supervisor
    display: RecordingDisplay
    services: list = field(default_factory=list)

    def run(self):
        return self.supervisor.run(self.services.append)

    async def until_said(self, part):
        async with asyncio.timeout(60):
            while not any(part in line for line in self.display.said):
                await asyncio.sleep(0.01)

    def pids(self):
        return self.supervisor.processes


def launch(*behaviours, gateway="gateway", environment=None, port=0, members=None, restarts=QUICK):
    workers = tuple(StubWorker(f"w-{i}", behaviour) for i, behaviour in enumerate(behaviours))
    display = RecordingDisplay()
    config = Config(
        gateway=GatewaySection(port=port, drain_timeout_s=0.1),
        worker=WorkerSection(drain_timeout_s=0.1),
    )
    context = LaunchContext(
        {**os.environ, **(environment or {})},
        MachineClock(),
        display,
        restarts=restarts,
        members=members,
    )
    return Launch(Supervisor(StubPlan(workers, gateway, config), context), display)


def in_event_loop(test):
    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(test(**fixtures))

    return run


def lives(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def run_until_ready(under_test, then):
    """Run a launch; when it is ready do `then`, a coroutine function; its ending.

    Where `then` fails, the processes end here: else the next test fails, too, by what they leave.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(under_test.run())
            await under_test.until_said("ready after")
            await then()
    except BaseException:
        children = [slot.child for slot in under_test.supervisor.slots.values()]
        for child in children:
            child.kill()
        await asyncio.gather(*(child.wait_until_exited() for child in children))
        raise
    return ending.result()
