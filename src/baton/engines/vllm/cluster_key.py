"""The cluster key of a process that vLLM started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.auth.key import ClusterKey
from baton.config.cluster_key import find_cluster_key
from baton.config.environment import read_environment
from baton.config.sections import ClusterSection

if TYPE_CHECKING:
    from baton.engines.vllm.options import ConnectorOptions


def load_cluster_key(options: ConnectorOptions) -> ClusterKey:
    """The cluster's key, as every process of Baton finds it.

    Raises:
        ConfigError: none is configured, and one is needed; or it is no key.
    """
    found = find_cluster_key(
        ClusterSection(key_file=options.key_file), read_environment(), (options.handoff_host,)
    )
    return ClusterKey.from_hex(found.text)
