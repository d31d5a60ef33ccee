"""Workers from a Kubernetes Service: `kubernetes:ROLE=[NAMESPACE/]SERVICE[:PORT]`.

    list ──► watch ──end of its time──► watch from the last version
     ▲         │410, or anything else that fails
     └─ wait ──┘

The Service's EndpointSlices tell which pods there are. While the API server is away, or refuses,
what was listed last stays.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from baton.errors import ConfigError, ProtocolError
from baton.gateway.members.endpoint_slices import ServiceWorkers
from baton.gateway.members.kubernetes_api import (
    Bookmark,
    EndpointSliceApi,
    KubernetesApiError,
    ResourceVersionExpiredError,
    SlicePut,
    SliceRemoved,
    open_session,
)
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from baton.gateway.members.kubernetes_api import ApiServer, Change
    from baton.gateway.options import WorkerAddress

FIRST_DELAY_S: Final = 0.5
MAX_DELAY_S: Final = 30.0
WATCH_AGAIN_S: Final = 1.0

_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_TARGET: Final = re.compile(
    rf"(?P<role>[a-z]+)=(?:(?P<namespace>{_NAME})/)?(?P<service>{_NAME})(?::(?P<port>{_NAME}))?"
)
_random = random.SystemRandom()

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """The Service whose pods are workers. `namespace` None: this pod's own.

    `port`: a port's number or name; None: see `ServiceWorkers`.
    """

    role: Role
    service: str
    namespace: str | None = None
    port: str | None = None

    @classmethod
    def parse(cls, text: str) -> ServiceTarget:
        """Read `ROLE=[NAMESPACE/]SERVICE[:PORT]`.

        Raises:
            ConfigError: it is not written so, or there is no such role.
        """
        found = _TARGET.fullmatch(text)
        if found is None or found["role"] not in set(Role):
            roles = ", ".join(Role)
            raise ConfigError(
                f"gateway.members: 'kubernetes:{text[:300]}' is not understood; write "
                f"kubernetes:ROLE=[NAMESPACE/]SERVICE[:PORT], with a role of {roles}"
            )
        return cls(Role(found["role"]), found["service"], found["namespace"], found["port"])


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long to wait after failures: twice as long each time, by a random factor of 0.5 to 1.5.

    `watch_again_s`: between two watches, so that a server that ends each at once gets no flood.
    """

    first_s: float = FIRST_DELAY_S
    max_s: float = MAX_DELAY_S
    watch_again_s: float = WATCH_AGAIN_S

    def delay_s(self, num_failures: int, spread: float) -> float:
        """After so many failures in a row, at least 1; `spread` from 0 to 1 is the random part."""
        longest = min(self.max_s, self.first_s * 2 ** min(num_failures - 1, 16))
        return longest * (0.5 + spread)


class KubernetesSource:
    """A `WorkerSource`. Constructing it asks nothing.

    Raises:
        ConfigError: no namespace is given, and that of this pod cannot be read.
    """

    def __init__(
        self, target: ServiceTarget, server: ApiServer, pauses: Pauses | None = None
    ) -> None:
        self._namespace = target.namespace or server.find_namespace()
        self._target, self._server = target, server
        self._pauses = pauses or Pauses()
        self._workers = ServiceWorkers(target.role, target.port)
        self._num_failures = 0
        self._cause: str | None = None

    def __str__(self) -> str:
        """For logs."""
        return f"kubernetes:{self._target.role}={self._namespace}/{self._target.service}"

    async def watch(self) -> AsyncGenerator[frozenset[WorkerAddress]]:
        """See `WorkerSource`."""
        latest: frozenset[WorkerAddress] | None = None
        async with open_session() as session:
            api = EndpointSliceApi(self._server, self._namespace, self._target.service, session)
            while True:
                try:
                    async with aclosing(self._follow(api)) as following:
                        async for workers in following:
                            if workers != latest:
                                latest = workers
                                self._warn_if_none(workers)
                                yield workers
                except (KubernetesApiError, ProtocolError) as exc:
                    self._note_failure(exc, is_listed=latest is not None)
                await asyncio.sleep(self._pauses.delay_s(self._num_failures, _random.random()))

    async def _follow(self, api: EndpointSliceApi) -> AsyncGenerator[frozenset[WorkerAddress]]:
        """The workers after a list, and after each change, until something fails."""
        listed = await api.list_slices()
        self._workers.replace(listed.slices)
        yield self._workers.workers
        version = listed.version
        while True:
            async with aclosing(api.watch_slices(version)) as changes:
                async for change in changes:
                    self._apply(change)
                    self._note_success()
                    version = change.version or version
                    yield self._workers.workers
            self._note_success()
            await asyncio.sleep(self._pauses.watch_again_s)

    def _apply(self, change: Change) -> None:
        match change:
            case SlicePut(found=found):
                self._workers.put(found)
            case SliceRemoved(name=name):
                self._workers.remove(name)
            case Bookmark():
                pass
            case _:
                assert_never(change)

    def _warn_if_none(self, workers: frozenset[WorkerAddress]) -> None:
        if not workers:
            log.warning(
                "%s: no pod of this Service is ready; if that stays so: does the Service exist, "
                "and does its selector match pods?",
                self,
            )

    def _note_failure(self, error: KubernetesApiError | ProtocolError, *, is_listed: bool) -> None:
        self._num_failures += 1
        if isinstance(error, ResourceVersionExpiredError):
            log.info("%s: %s; listing again", self, error)
            return
        cause = error.cause if isinstance(error, KubernetesApiError) else "endpoints"
        if cause != self._cause:
            self._cause = cause
            kept = "the workers that were listed last stay" if is_listed else "no workers yet"
            log.warning("%s: %s; %s, and it is tried again", self, error, kept)

    def _note_success(self) -> None:
        if self._cause is not None:
            log.info("%s: the API server answers again", self)
        self._cause, self._num_failures = None, 0
