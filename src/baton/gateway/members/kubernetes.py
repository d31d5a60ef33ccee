"""Workers from a Kubernetes Service: `kubernetes:ROLE=[NAMESPACE/]SERVICE[:PORT]`.

    list ──► watch ──end of its time──► watch from the last version
     ▲         │410, or anything else that fails
     └─ wait ──┘

The Service's EndpointSlices list its pods. While the API server is away, or refuses,
what was listed last stays.
"""

from __future__ import annotations

import asyncio
import random
import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from baton.config.environment import read_environment
from baton.errors import ConfigError, ProtocolError
from baton.gateway.members.endpoint_slices import Bookmark, ServiceWorkers, SlicePut, SliceRemoved
from baton.gateway.members.interface import NoSourceOptions
from baton.gateway.members.kubernetes_api import EndpointSliceApi, ResourceVersionExpiredError
from baton.net.kubernetes.access import KubernetesApiError, ServiceAccount
from baton.net.kubernetes.connection import open_session
from baton.protocol.worker_http import Role
from baton.registry import Plugin

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from baton.gateway.members.endpoint_slices import Change
    from baton.gateway.members.interface import SourceFactory, SourceSetup, SourceStatus
    from baton.gateway.options import WorkerAddress

FIRST_DELAY_S: Final = 0.5
MAX_DELAY_S: Final = 30.0
WATCH_AGAIN_S: Final = 1.0
MAX_PORT: Final = 65_535

_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_TARGET: Final = re.compile(
    rf"(?P<role>[a-z]+)=(?:(?P<namespace>{_NAME})/)?(?P<service>{_NAME})(?::(?P<port>{_NAME}))?"
)
_random = random.SystemRandom()


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
        port = "" if found is None else found["port"] or ""
        is_port = not port.isdigit() or 0 < int(port) <= MAX_PORT
        if found is None or found["role"] not in set(Role) or not is_port:
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
        longest = min(self.max_s, self.first_s * 2.0 ** min(num_failures - 1, 16))
        return longest * (0.5 + spread)


class KubernetesSource:
    """A `WorkerSource`. Constructing it asks nothing.

    Raises:
        ConfigError: no namespace is given, and that of this pod cannot be read.
    """

    def __init__(
        self,
        target: ServiceTarget,
        account: ServiceAccount,
        status: SourceStatus,
        pauses: Pauses | None = None,
    ) -> None:
        self._namespace = target.namespace or _own_namespace(account)
        self._target, self._account, self._status = target, account, status
        self._pauses = pauses or Pauses()
        self._workers = ServiceWorkers(target.role, target.port)
        self._num_failures = 0
        self._is_watch_failing = False

    async def watch(self) -> AsyncGenerator[frozenset[WorkerAddress]]:
        """See `WorkerSource`."""
        latest: frozenset[WorkerAddress] | None = None
        async with open_session() as session:
            api = EndpointSliceApi(self._account, self._namespace, self._target.service, session)
            while True:
                try:
                    async with aclosing(self._follow(api)) as following:
                        async for workers in following:
                            if workers != latest:
                                latest = workers
                                yield workers
                except ResourceVersionExpiredError:
                    self._num_failures += 1  # no problem: it is listed again
                except (KubernetesApiError, ProtocolError) as exc:
                    self._num_failures += 1
                    self._status.note_error(str(exc))
                await asyncio.sleep(self._pauses.delay_s(self._num_failures, _random.random()))

    async def _follow(self, api: EndpointSliceApi) -> AsyncGenerator[frozenset[WorkerAddress]]:
        """The workers after a list, and after each change, until something fails."""
        listed = await api.list_slices()
        self._workers.replace(listed.objects)
        # A watch that fails each time is a problem, though each list before it is good.
        if not self._is_watch_failing:
            self._status.note_read()
        yield self._workers.workers
        version, self._is_watch_failing = listed.version, True
        while True:
            async with aclosing(api.watch_slices(version)) as changes:
                async for change in changes:
                    self._apply(change)
                    self._note_watched()
                    version = change.version or version
                    yield self._workers.workers
            self._note_watched()
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

    def _note_watched(self) -> None:
        self._num_failures, self._is_watch_failing = 0, False
        self._status.note_read()


def _own_namespace(account: ServiceAccount) -> str:
    try:
        return account.read_namespace()
    except KubernetesApiError as exc:
        raise ConfigError(f"{exc}; write kubernetes:ROLE=NAMESPACE/SERVICE") from exc


def _build(setup: SourceSetup) -> KubernetesSource:
    target = ServiceTarget.parse(setup.argument)
    return KubernetesSource(target, ServiceAccount.of_pod(read_environment()), setup.status)


PLUGIN: Plugin[NoSourceOptions, SourceFactory] = Plugin(NoSourceOptions, lambda _: _build)
