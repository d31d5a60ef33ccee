"""Finds what this process proves itself with, as it is configured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from baton.auth.certificates import derive_identity
from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.config.cluster_key import find_cluster_key, find_configured_key, read_key_file
from baton.errors import ConfigError
from baton.net.tls import contexts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.config.cluster_key import ClusterKeyText
    from baton.config.sections import ClusterSection, SecuritySection

MAX_KEYS: Final = 4


@dataclass(frozen=True, slots=True)
class FoundCredentials:
    """They, and whether an operator configured them or they were made up for this host alone."""

    credentials: Credentials
    origin: Literal["configured", "generated"]


def find_credentials(
    cluster: ClusterSection,
    security: SecuritySection,
    environment: Mapping[str, str],
    hosts: Sequence[str],
) -> FoundCredentials:
    """The identity of `security.identity`, else one that is derived from the cluster key.

    Both follow their files while the process runs. `hosts` are the addresses that will be
    listened on: without an identity or a configured key, all must be loopback.

    Raises:
        ConfigError: none is configured, and one is needed; or it cannot be used.
    """
    if security.identity is None:
        found = find_cluster_key(cluster, environment, hosts)
        return FoundCredentials(_derive(found), found.origin)
    configured = find_configured_key(cluster, environment)
    # Without one, this process shares no store with others; all else is the identity's.
    key = parse_keys(configured.text)[0] if configured else ClusterKey.generate()
    directory = Path(security.identity).expanduser()
    credentials = Credentials.from_directory(directory, key, check=contexts_of)
    return FoundCredentials(credentials, "configured")


def parse_keys(text: str) -> list[ClusterKey]:
    """Cluster keys, one in each line: the first is one's own, the others are accepted too.

    Raises:
        ConfigError: there is none, there are too many, or one is no key.
    """
    lines = text.split()
    if not 1 <= len(lines) <= MAX_KEYS:
        raise ConfigError(
            f"{len(lines)} cluster keys were given: from 1 to {MAX_KEYS} are possible"
        )
    return [ClusterKey.from_hex(line) for line in lines]


def _derive(found: ClusterKeyText) -> Credentials:
    keys, path = parse_keys(found.text), found.path
    if path is None:
        return Credentials.of(*keys)
    return Credentials(
        keys[0], lambda: derive_identity(parse_keys(read_key_file(path))), files=(path,)
    )
