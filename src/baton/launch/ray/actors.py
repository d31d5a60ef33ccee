"""Calls of a fleet's supervisors, which are named actors in a Ray namespace of the fleet's own.

Locks of what commands change are named actors, too, in another namespace.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import ray
from ray.exceptions import RayError

from baton.launch.errors import FleetError
from baton.launch.ray.connection import NAMESPACE_BEGINNING, describe, namespace_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

MAX_HEAD_CALLS: Final = 4
"""At once: each blocks a thread for as long as Ray's head is away."""

CHANGES_BEGINNING: Final = "changes-of-"
"""Of the Ray namespace that has a fleet's locks."""

T = TypeVar("T")


class NoAnswerError(FleetError):
    """A supervisor does not answer in time: it has no host yet, or its host is away."""


class ChangeLock:
    """An actor whose name is a role of a fleet that a command changes. It does nothing."""


class FleetActors:
    """See `Supervisors`. Owned by one event loop; Ray is connected already."""

    def __init__(self, fleet: str) -> None:
        self._fleet, self._namespace = fleet, namespace_of(fleet)
        self._head_calls = asyncio.Semaphore(MAX_HEAD_CALLS)
        self._handles: dict[str, Any] = {}

    async def list_names(self, timeout_s: float) -> frozenset[str]:
        """See `Supervisors`."""
        found = await self._ask_head(_list_names, timeout_s)
        return frozenset(name for namespace, name in found if namespace == self._namespace)

    async def list_fleets(self, timeout_s: float) -> list[str]:
        """Names of all fleets on this Ray.

        Raises:
            FleetError: Ray's head does not answer in time.
        """
        namespaces = {namespace for namespace, _ in await self._ask_head(_list_names, timeout_s)}
        return sorted(
            name.removeprefix(NAMESPACE_BEGINNING)
            for name in namespaces
            if name.startswith(NAMESPACE_BEGINNING)
        )

    async def call(self, name: str, method: str, *arguments: object, timeout_s: float) -> object:
        """See `Supervisors`.

        Raises:
            NoAnswerError: it does not answer in time.
            FleetError: there is no such process, or it refuses.
        """
        try:
            async with asyncio.timeout(timeout_s):
                if name not in self._handles:
                    self._handles[name] = await self._ask_head(lambda: self._find(name), timeout_s)
                remote = getattr(self._handles[name], method).remote(*arguments)
                return await asyncio.wrap_future(remote.future())
        except TimeoutError as exc:
            raise NoAnswerError(
                f"the supervisor of {name} did not answer within {timeout_s:g} s: Ray has not "
                "placed it, or its host is away"
            ) from exc
        except RayError as exc:
            self._handles.pop(name, None)
            raise FleetError(f"the supervisor of {name}: {describe(exc)}") from exc

    async def remove(self, name: str, timeout_s: float) -> None:
        """End a supervisor, with its process if that still runs; Ray does not start it again.

        Raises:
            FleetError: Ray's head does not answer in time.
        """
        self._handles.pop(name, None)
        await self._ask_head(lambda: self._kill(name), timeout_s)

    @asynccontextmanager
    async def changing(self, roles: Iterable[str], timeout_s: float) -> AsyncGenerator[None]:
        """No other command changes the fleet's processes of these roles while the block runs.

        Ray ends the locks with the process that has them, however that ends.

        Raises:
            FleetError: another command changes them, or Ray's head does not answer in time.
        """
        async with AsyncExitStack() as locks:
            for role in roles:
                lock = await self._ask_head(partial(self._lock, role), timeout_s)
                locks.push_async_callback(self._unlock, lock, timeout_s)
            yield

    def _lock(self, role: str) -> object:
        options = {
            "name": role,
            "namespace": CHANGES_BEGINNING + self._namespace,
            "lifetime": "non_detached",
            "max_restarts": -1,  # where its host dies before this process does
            "num_cpus": 0,
        }
        try:
            return ray.remote(ChangeLock).options(**options).remote()
        except ValueError as exc:
            raise FleetError(
                f"another command (`baton scale`, `drain`, `upgrade` or `autoscale`) changes the "
                f"{role} processes of the fleet {self._fleet!r}: try again when it has ended"
            ) from exc

    async def _unlock(self, lock: object, timeout_s: float) -> None:
        if ray.is_initialized():  # else the lock has ended, and Ray would be started to end it
            with suppress(FleetError):  # it ends with this process at the latest
                await self._ask_head(lambda: ray.kill(lock), timeout_s)

    async def _ask_head(self, call: Callable[[], T], timeout_s: float) -> T:
        """Run a call of Ray's head, which blocks, in a thread that does not delay our exit.

        Raises:
            FleetError: it does not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._head_calls.acquire()
                return await asyncio.wrap_future(_run_in_thread(call, self._head_calls.release))
        except (TimeoutError, RayError, RuntimeError) as exc:
            raise FleetError(f"Ray's head does not answer: {describe(exc)}") from exc

    def _find(self, name: str) -> object:
        try:
            return ray.get_actor(name, namespace=self._namespace)
        except ValueError as exc:
            raise FleetError(f"the fleet {self._fleet!r} has no process {name!r}") from exc

    def _kill(self, name: str) -> None:
        try:
            actor = ray.get_actor(name, namespace=self._namespace)
        except ValueError:  # it is gone already
            return
        ray.kill(actor, no_restart=True)


def _list_names() -> list[tuple[str, str]]:
    """Namespace and name of every named actor."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [(each["namespace"], each["name"]) for each in actors]


def _run_in_thread(call: Callable[[], T], on_end: Callable[[], None]) -> Future[T]:
    """Start a call; `on_end` runs on this event loop when it has ended, however late."""
    loop, answer = asyncio.get_running_loop(), Future[T]()
    answer.set_running_or_notify_cancel()  # from here on it can be abandoned, but not cancelled

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - it is raised where the answer is awaited
            answer.set_exception(exc)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(on_end)

    threading.Thread(target=run, name="ray-head", daemon=True).start()
    return answer
