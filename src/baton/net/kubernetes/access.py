"""Where a Kubernetes API server is, and what a process shows to it: here, a pod's service account.

Its token and the authority's certificate are read again for each request, since both are replaced
while the pod runs.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from baton.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's service account: `token`, `ca.crt`, `namespace`."""
MAX_ACCOUNT_FILE_BYTES: Final = 64 << 10


class KubernetesApiError(BatonError):
    """The API server did not give what was asked for. The same failure has the same message."""


@dataclass(frozen=True, slots=True)
class ApiCredentials:
    """What one request shows. `tls` None: plain HTTP, to this host alone."""

    token: str | None = field(repr=False)
    tls: ssl.SSLContext | None
    server_name: str | None = None
    """The name in the server's certificate, if it is not the URL's host."""


class ApiAccess(Protocol):
    """An API server, and whose credentials are shown to it."""

    @property
    def url(self) -> str:
        """`https://HOST:PORT`, perhaps with a path; `http` on this host alone."""
        ...

    @property
    def credentials_name(self) -> str:
        """For messages: where the credentials are from."""
        ...

    async def find_credentials(self) -> ApiCredentials:
        """What the next request is to show.

        Raises:
            KubernetesApiError: they cannot be read, or made.
        """
        ...


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """See `ApiAccess`; `directory` has the account's files."""

    url: str
    directory: Path

    @classmethod
    def of_pod(cls, environment: Mapping[str, str]) -> ServiceAccount:
        """The one of this pod, and its cluster's API server.

        Raises:
            ConfigError: this process is no pod, or it has no service account.
        """
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        port = environment.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host or not ACCOUNT.is_dir():
            raise ConfigError(
                "Kubernetes' API is reached from a pod with a service account alone: set "
                "automountServiceAccountToken for it (there must be the variable "
                f"KUBERNETES_SERVICE_HOST, and {ACCOUNT})"
            )
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", ACCOUNT)

    @property
    def credentials_name(self) -> str:
        """See `ApiAccess`."""
        return f"the token in {self.directory}"

    def read_namespace(self) -> str:
        """The namespace of this pod.

        Raises:
            KubernetesApiError: its file cannot be read.
        """
        return self._read("namespace").strip()

    async def find_credentials(self) -> ApiCredentials:
        """See `ApiAccess`."""
        return ApiCredentials(self._read("token").strip(), self._make_tls())

    def _make_tls(self) -> ssl.SSLContext:
        """Trusts the cluster's authority alone, as its file is now."""
        path, authority = self.directory / "ca.crt", self._read("ca.crt")
        if not authority.strip():  # Python would trust the system's authorities
            raise KubernetesApiError(f"{path} is empty")
        try:
            return ssl.create_default_context(cadata=authority)
        except ssl.SSLError as exc:
            raise KubernetesApiError(f"{path} is no certificate: {exc}") from exc

    def _read(self, name: str) -> str:
        path = self.directory / name
        try:
            with path.open("rb") as file:
                content = file.read(MAX_ACCOUNT_FILE_BYTES + 1)
            text = content.decode("ascii")
        except (OSError, UnicodeDecodeError) as exc:
            raise KubernetesApiError(f"cannot read {path}: {exc}") from exc
        if len(content) > MAX_ACCOUNT_FILE_BYTES:
            raise KubernetesApiError(f"{path} has more than {MAX_ACCOUNT_FILE_BYTES} bytes")
        return text
