"""Which cluster and namespace: a kubeconfig's, as kubectl finds it, or those of this pod."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError
from baton.launch.kubernetes.kubeconfig import read_kubeconfig
from baton.net.kubernetes.access import ApiAccess, ServiceAccount

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_FILE: Final = Path(".kube/config")
"""In the user's home."""
VARIABLE: Final = "KUBECONFIG"


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """`namespace`: where a release is looked for, unless another one is named.

    `name`: for messages, such as "context prod".
    """

    access: ApiAccess
    namespace: str
    name: str


def find_cluster(environment: Mapping[str, str], context: str | None) -> ClusterAccess:
    """The files of KUBECONFIG, else ~/.kube/config, else this pod's service account.

    Raises:
        ConfigError: there is none of these, or it cannot be used.
        KubernetesApiError: this pod's namespace cannot be read.
    """
    named = [Path(each) for each in environment.get(VARIABLE, "").split(":") if each]
    default = Path.home() / DEFAULT_FILE
    if named or context is not None or default.exists():
        found = read_kubeconfig(named or [default], context)
        return ClusterAccess(found, found.namespace, f"context {found.context}")
    if not environment.get("KUBERNETES_SERVICE_HOST"):
        raise ConfigError(
            f"no cluster is known: there is no {default}, and {VARIABLE} names no other kubeconfig"
        )
    account = ServiceAccount.of_pod(environment)
    return ClusterAccess(account, account.read_namespace(), "this pod's cluster")
