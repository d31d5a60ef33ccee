"""Calls of a fleet's supervisors, which are named actors in a Ray namespace of the fleet's own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

import ray
from ray.exceptions import RayError

from baton.launch.errors import FleetError
from baton.launch.ray.connection import NAMESPACE_BEGINNING, describe, namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_HEAD_THREADS: Final = 4
"""Calls of Ray's head block a thread each: where it is away, these and no more."""

T = TypeVar("T")


class NoAnswerError(FleetError):
    """A supervisor does not answer in time: it has no host yet, or its host is away."""


class FleetActors:
    """See `Supervisors`. Owned by one event loop; Ray is connected already."""

    def __init__(self, fleet: str) -> None:
        self._fleet, self._namespace = fleet, namespace_of(fleet)
        self._head_calls = ThreadPoolExecutor(NUM_HEAD_THREADS, thread_name_prefix="ray-head")
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

    async def _ask_head(self, call: Callable[[], T], timeout_s: float) -> T:
        """Run a call of Ray's head, which blocks, in a thread.

        Raises:
            FleetError: it does not answer in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                return await loop.run_in_executor(self._head_calls, call)
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
