"""The actor: one on Ray for each process of a fleet, on the process's host."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

import msgspec
import ray

from baton.clock import MachineClock
from baton.config.environment import read_environment
from baton.errors import ConfigError
from baton.launch.ray.actors import FleetActors
from baton.launch.ray.connection import uses_tokens
from baton.launch.ray.hosted_process import HostedProcess, RayHost
from baton.launch.ray.plan import read_plan
from baton.launch.ray.process import START_TIMEOUT_S
from baton.launch.slots import KILL_MARGIN_S

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

ANSWER_TIMEOUT_S = 10.0

T = TypeVar("T")


class Supervisor:
    """Starts one process of a fleet and keeps it running. Ray may call methods on many threads.

    All that it does is on one thread of its own, which lives as long as the actor: the process is
    tied to the thread that started it (PR_SET_PDEATHSIG), so it ends with the actor however that
    ends. Arguments and answers are text and bytes, JSON inside: nothing of ours is unpickled.

    Raises:
        ConfigError: Ray runs on this host without token authentication, and needs it.
    """

    def __init__(self, name: str, plan: bytes) -> None:
        environment, self._plan_text, self._plan = read_environment(), plan, read_plan(plan)
        host = RayHost(
            ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_labels() or {}
        )
        if not (self._plan.insecure or uses_tokens(environment)):
            raise ConfigError(
                f"Ray on the host {host.address} runs without token authentication; start it with "
                "RAY_AUTH_MODE=token"
            )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="supervisor", daemon=True).start()
        self._process = self._run(self._open(name, host, environment), ANSWER_TIMEOUT_S)
        # Kept, since the loop has weak references to tasks alone.
        self._life = asyncio.run_coroutine_threadsafe(self._process.run(), self._loop)

    def plan(self) -> bytes:
        """The fleet's plan (`RayPlan`)."""
        return self._plan_text

    def give_key(self, key: str) -> None:
        """Take the cluster key. Empty: each host has it in a file."""
        if key:
            self._loop.call_soon_threadsafe(self._process.give_key, key)

    def key(self) -> str:
        """The cluster key, for a supervisor of the fleet that Ray started again; or nothing."""
        return self._process.key or ""

    def status(self) -> bytes:
        """The process's state (`FleetMember`)."""
        return msgspec.json.encode(self._run(self._process.report(), ANSWER_TIMEOUT_S))

    def list_used(self) -> bytes:
        """URLs of the workers to which a gateway gives requests, as JSON."""
        used = self._run(self._process.list_used(), ANSWER_TIMEOUT_S)
        return msgspec.json.encode(sorted(used))

    def lines(self, since: int) -> bytes:
        """Lines of the process (`LogLines`); see `HostedProcess.lines`."""
        return msgspec.json.encode(self._run(self._lines(since), ANSWER_TIMEOUT_S))

    def mark_draining(self) -> None:
        """From now on gateways place nothing new on this worker."""
        self._loop.call_soon_threadsafe(self._process.mark_draining)

    def replace(self) -> None:
        """Start another process, with the code that is installed; then drain and end this one."""
        self._run(self._process.replace(), START_TIMEOUT_S + self._stop_timeout_s)

    def stop(self) -> str:
        """Drain and end the process, and start none again: how it ended."""
        return self._run(self._process.stop(), self._stop_timeout_s)

    @property
    def _stop_timeout_s(self) -> float:
        return self._plan.drain_s(self._process.role) + 2 * KILL_MARGIN_S

    def _run(self, work: Coroutine[object, object, T], timeout_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def _open(
        self, name: str, host: RayHost, environment: Mapping[str, str]
    ) -> HostedProcess:
        # Here, since what it makes belongs to the loop.
        return HostedProcess(
            name,
            self._plan,
            host,
            supervisors=FleetActors(self._plan.fleet),
            environment=environment,
            clock=MachineClock(),
        )

    async def _lines(self, since: int) -> msgspec.Struct:
        return self._process.lines(since)
