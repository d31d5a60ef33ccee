"""The backend `kubernetes` of `baton status` and the other commands: finds a release of the chart.

`--fleet [NAMESPACE/]RELEASE`; without it the only release in the namespace.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from baton.config.environment import read_environment
from baton.config.resolve import CommandLine, resolve
from baton.errors import ConfigError
from baton.launch.errors import FleetError
from baton.launch.fleet import DEFAULT_FLEET, FleetControl
from baton.launch.kubernetes.api import FleetApi
from baton.launch.kubernetes.cluster import find_cluster
from baton.launch.kubernetes.fleet import KubernetesFleet
from baton.net.kubernetes.connection import open_session

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_NAME = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_FLEET: Final = re.compile(rf"(?:({_NAME})/)?({_NAME})")


class KubernetesBackend:
    """See `FleetBackend`."""

    @asynccontextmanager
    async def connect(self, fleet: str) -> AsyncGenerator[FleetControl]:
        """See `FleetBackend`.

        Raises:
            ConfigError: `fleet` is no release's name, or no cluster is known.
            FleetError: the API server cannot be reached, or has no such release.
        """
        found = _FLEET.fullmatch(fleet)
        if found is None:
            raise ConfigError(f"--fleet {fleet!r}: on Kubernetes it is [NAMESPACE/]RELEASE")
        environment = read_environment()
        section = resolve(CommandLine(), environment).to_config().kubernetes
        cluster = find_cluster(environment, section.context)
        namespace, release = found[1] or cluster.namespace, found[2]
        async with open_session() as session:
            api = FleetApi(cluster, namespace, session)
            releases = await _list_releases(api)
            named = fleet != DEFAULT_FLEET
            if not named and release not in releases and len(releases) == 1:
                release = releases[0]
            if release not in releases:
                raise FleetError(
                    f"{cluster.name} has no release {release!r} of Baton's chart with pods of its "
                    f"own in the namespace {namespace}; there: {', '.join(releases) or 'none'}. "
                    "Name one with --fleet [NAMESPACE/]RELEASE (of a RayCluster: --on ray), or "
                    "start one: helm install"
                )
            yield KubernetesFleet(api, release, named=named)


BACKEND: Final = KubernetesBackend()


async def _list_releases(api: FleetApi) -> list[str]:
    sets = await api.list_workloads("StatefulSet")
    return sorted({each.release for each in sets} - {""})
