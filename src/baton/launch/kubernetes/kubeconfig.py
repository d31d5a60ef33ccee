"""Credentials of an operator: a kubeconfig's current context, as kubectl uses it."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, ConfigError
from baton.launch.kubernetes.exec_plugin import ExecPlugin, ExecPluginRunner
from baton.net.kubernetes.access import ApiCredentials, KubernetesApiError
from baton.net.tls import shown_as_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_FILE_BYTES: Final = 1 << 20
USE_PROXY: Final = "run `kubectl proxy`, and use a kubeconfig whose server is http://127.0.0.1:8001"

T = TypeVar("T", bound="_Named")


class Cluster(msgspec.Struct, frozen=True, rename="kebab"):
    """Where an API server is, and the authority of its certificate (none: the system's)."""

    server: str = ""
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    tls_server_name: str | None = None
    insecure_skip_tls_verify: bool = False
    proxy_url: str | None = None


class User(msgspec.Struct, frozen=True, rename="kebab"):
    """Who asks."""

    token: str | None = None
    token_file: str | None = msgspec.field(name="tokenFile", default=None)
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    exec: ExecPlugin | None = None
    username: str | None = None
    auth_provider: object = None
    impersonated: str | None = msgspec.field(name="as", default=None)


class Context(msgspec.Struct, frozen=True):
    """A cluster, a user of it, and a namespace."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _Named(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(max_length=1024)]


class NamedCluster(_Named, frozen=True):
    """A cluster by name."""

    cluster: Cluster


class NamedUser(_Named, frozen=True):
    """A user by name."""

    user: User


class NamedContext(_Named, frozen=True):
    """A context by name."""

    context: Context


class Kubeconfig(msgspec.Struct, frozen=True, rename="kebab"):
    """One file."""

    current_context: str = ""
    clusters: tuple[NamedCluster, ...] | None = None
    users: tuple[NamedUser, ...] | None = None
    contexts: tuple[NamedContext, ...] | None = None


@dataclass(frozen=True, slots=True)
class KubeconfigAccess:
    """See `ApiAccess`. Files that the kubeconfig names are relative to `directory`, its own."""

    context: str
    namespace: str
    cluster: Cluster
    cluster_directory: Path
    user_name: str
    user: User
    user_directory: Path
    plugin: ExecPluginRunner | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """See `ApiAccess`."""
        return self.cluster.server.rstrip("/")

    @property
    def credentials_name(self) -> str:
        """See `ApiAccess`."""
        return f"the kubeconfig's user {self.user_name}"

    async def find_credentials(self) -> ApiCredentials:
        """See `ApiAccess`."""
        user, where = self.user, self.user_directory
        token = user.token or None
        if token is None and user.token_file:
            token = _read(where / user.token_file).decode(errors="replace").strip()
        certificate = _pem(user.client_certificate_data, user.client_certificate, where)
        key = _pem(user.client_key_data, user.client_key, where)
        if token is None and certificate is None and self.plugin is not None:
            made = await self.plugin.find_credential()
            token = made.token
            certificate = (made.client_certificate_data or "").encode()
            key = (made.client_key_data or "").encode()
        if self.url.startswith("http://"):
            return ApiCredentials(token, None)
        return ApiCredentials(token, self._make_tls(certificate, key), self.cluster.tls_server_name)

    def _make_tls(self, certificate: bytes | None, key: bytes | None) -> ssl.SSLContext:
        cluster = self.cluster
        authority = _pem(
            cluster.certificate_authority_data,
            cluster.certificate_authority,
            self.cluster_directory,
        )
        if authority is not None and not authority.strip():
            # Python would trust the system's authorities.
            raise KubernetesApiError(f"context {self.context}: its certificate-authority is empty")
        try:
            if authority is None:
                context = ssl.create_default_context()
            else:
                context = ssl.create_default_context(cadata=authority.decode("ascii"))
            if certificate and key:
                with shown_as_file(certificate + b"\n" + key) as own:
                    context.load_cert_chain(own, password=lambda: "")
        except (ssl.SSLError, UnicodeDecodeError) as exc:
            raise KubernetesApiError(
                f"context {self.context}: a certificate or key of the kubeconfig cannot be used: "
                f"{exc}"
            ) from exc
        return context


def read_kubeconfig(paths: Sequence[Path], context: str | None) -> KubeconfigAccess:
    """The credentials of `context`; None: of the current one. Of several files the first has it.

    Raises:
        ConfigError: a file cannot be read, or asks for what is not supported.
    """
    files = [(path, _read_file(path)) for path in paths if path.exists()]
    if not files:
        raise ConfigError(f"there is no kubeconfig at {', '.join(map(str, paths))}")
    shown = ", ".join(str(path) for path, _ in files)
    wanted = context or next(
        (file.current_context for _, file in files if file.current_context), ""
    )
    if not wanted:
        raise ConfigError(
            f"{shown} has no current context: `kubectl config use-context NAME`, or set "
            "kubernetes.context"
        )
    named = _find("context", wanted, [(path, file.contexts) for path, file in files])[1].context
    cluster_file, cluster = _find(
        "cluster", named.cluster, [(path, file.clusters) for path, file in files]
    )
    user_file, user = _find("user", named.user, [(path, file.users) for path, file in files])
    _check_supported(wanted, cluster.cluster, user.user)
    return KubeconfigAccess(
        wanted,
        named.namespace or "default",
        cluster.cluster,
        cluster_file.parent,
        user.name,
        user.user,
        user_file.parent,
        _make_runner(user.user.exec, user_file.parent, cluster.cluster, cluster_file.parent),
    )


def _make_runner(
    plugin: ExecPlugin | None, directory: Path, cluster: Cluster, cluster_directory: Path
) -> ExecPluginRunner | None:
    if plugin is None:
        return None
    info = {"server": cluster.server}
    if cluster.tls_server_name:
        info["tls-server-name"] = cluster.tls_server_name
    authority = _pem(
        cluster.certificate_authority_data, cluster.certificate_authority, cluster_directory
    )
    if authority is not None:
        info["certificate-authority-data"] = base64.b64encode(authority).decode()
    return ExecPluginRunner(plugin, directory, info)


def _check_supported(context: str, cluster: Cluster, user: User) -> None:
    """Pass, or raise."""
    problem = None
    parts = urlsplit(cluster.server)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        problem = f"its server {cluster.server!r} is no URL"
    elif parts.scheme == "http" and not _is_loopback(parts.hostname):
        problem = f"its server {cluster.server} is reached without TLS, over a network"
    elif cluster.insecure_skip_tls_verify:
        problem = (
            "insecure-skip-tls-verify would send credentials to whoever answers: give the "
            "cluster's certificate-authority"
        )
    elif cluster.proxy_url:
        problem = f"proxy-url is not supported: {USE_PROXY}"
    elif user.username or user.auth_provider is not None:
        problem = (
            "username and auth-provider are not supported, as Kubernetes itself has removed them: "
            f"use a token, a client certificate or an exec plugin; or {USE_PROXY}"
        )
    elif user.impersonated:
        problem = f"impersonation (as) is not supported: {USE_PROXY}"
    if problem is not None:
        raise ConfigError(f"the kubeconfig's context {context} cannot be used: {problem}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _find(
    kind: str, name: str, files: Sequence[tuple[Path, tuple[T, ...] | None]]
) -> tuple[Path, T]:
    for path, found in files:
        for each in found or ():
            if each.name == name:
                return path, each
    known = sorted({each.name for _, found in files for each in found or ()})
    raise ConfigError(f"the kubeconfig has no {kind} {name!r}; it has {', '.join(known) or 'none'}")


def _read_file(path: Path) -> Kubeconfig:
    try:
        import yaml  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError(
            "a kubeconfig is YAML, and PyYAML is not installed: pip install 'baton-kv[kubernetes]'"
        ) from exc
    try:
        return msgspec.convert(yaml.safe_load(_read(path)) or {}, Kubeconfig)
    except (KubernetesApiError, yaml.YAMLError, *UNDECODABLE) as exc:
        raise ConfigError(f"the kubeconfig {path} cannot be used: {exc}") from exc


def _pem(data: str | None, file: str | None, directory: Path) -> bytes | None:
    """From base64, or else a file; None: neither is given, or both are empty."""
    if data:
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise KubernetesApiError(f"the kubeconfig has data that is no base64: {exc}") from exc
    return _read(directory / file) if file else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise KubernetesApiError(f"cannot read {path}: {exc.strerror}") from exc
    if len(content) > MAX_FILE_BYTES:
        raise KubernetesApiError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return content
