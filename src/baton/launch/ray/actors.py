"""Calls of a fleet's supervisors, which are named actors in a Ray namespace of the fleet's own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import ray
from ray.exceptions import RayError

from baton.launch.errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_HEAD_THREADS: Final = 4
"""Calls of Ray's head block a thread each: where it is away, these and no more."""
MAX_REASON_CHARS: Final = 1000


def namespace_of(fleet: str) -> str:
    """The Ray namespace in which a fleet's supervisors are."""
    return f"baton-{fleet}"


class FleetActors:
    """See `Supervisors`. Owned by one event loop; Ray is connected already."""

    def __init__(self, fleet: str) -> None:
        self._fleet, self._namespace = fleet, namespace_of(fleet)
        self._head_calls = ThreadPoolExecutor(NUM_HEAD_THREADS, thread_name_prefix="ray-head")
        self._handles: dict[str, object] = {}

    async def list_names(self, timeout_s: float) -> frozenset[str]:
        """See `Supervisors`."""
        try:
            found = await self._ask_head(self._list, timeout_s)
        except (TimeoutError, RayError, OSError, RuntimeError) as exc:
            raise FleetError(
                f"Ray's head does not list the processes of the fleet {self._fleet!r}: "
                f"{describe(exc)}"
            ) from exc
        return found if isinstance(found, frozenset) else frozenset()

    async def call(self, name: str, method: str, *arguments: object, timeout_s: float) -> object:
        """See `Supervisors`."""
        try:
            async with asyncio.timeout(timeout_s):
                if name not in self._handles:
                    self._handles[name] = await self._ask_head(lambda: self._find(name), timeout_s)
                remote = getattr(self._handles[name], method).remote(*arguments)
                return await asyncio.wrap_future(remote.future())
        except ValueError as exc:  # what `get_actor` raises
            raise FleetError(f"the fleet {self._fleet!r} has no process {name!r}") from exc
        except TimeoutError as exc:
            raise FleetError(
                f"the supervisor of {name} did not answer within {timeout_s:g} s: Ray has not "
                "placed it, or its host is away"
            ) from exc
        except RayError as exc:
            self._handles.pop(name, None)
            raise FleetError(f"the supervisor of {name} refuses: {describe(exc)}") from exc

    async def remove(self, name: str, timeout_s: float) -> None:
        """End a supervisor, with its process if that still runs; Ray does not start it again.

        Raises:
            FleetError: Ray's head does not answer in time.
        """
        self._handles.pop(name, None)
        try:
            await self._ask_head(lambda: self._kill(name), timeout_s)
        except ValueError:
            return  # it is gone already
        except (TimeoutError, RayError) as exc:
            raise FleetError(f"Ray did not remove {name}: {describe(exc)}") from exc

    async def _ask_head(self, call: Callable[[], object], timeout_s: float) -> object:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            return await loop.run_in_executor(self._head_calls, call)

    def _list(self) -> frozenset[str]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return frozenset(each["name"] for each in actors if each["namespace"] == self._namespace)

    def _find(self, name: str) -> object:
        return ray.get_actor(name, namespace=self._namespace)

    def _kill(self, name: str) -> None:
        ray.kill(self._find(name), no_restart=True)


def describe(exc: BaseException) -> str:
    """What went wrong, in a line: the last one of a remote traceback."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    text = lines[-1] if lines else "no answer in time"
    return text[:MAX_REASON_CHARS]
