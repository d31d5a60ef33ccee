"""Credentials that another program makes: kubeconfig's exec plugins, as of cloud providers.

The plugin gets KUBERNETES_EXEC_INFO and no terminal, prints an ExecCredential, and is run again
when that expires.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from baton.clock import MachineClock
from baton.config.environment import read_environment
from baton.errors import UNDECODABLE
from baton.net.kubernetes.access import KubernetesApiError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TIMEOUT_S: Final = 60.0
RENEW_BEFORE_S: Final = 60.0
MAX_OUTPUT_BYTES: Final = 1 << 20


class Variable(msgspec.Struct, frozen=True):
    """Of the plugin's environment."""

    name: Annotated[str, Meta(min_length=1)]
    value: str = ""


class ExecPlugin(msgspec.Struct, frozen=True, rename="camel"):
    """What a kubeconfig has of a plugin."""

    api_version: str
    command: Annotated[str, Meta(min_length=1)]
    args: tuple[str, ...] | None = None
    env: tuple[Variable, ...] | None = None
    install_hint: str = ""
    provide_cluster_info: bool = False


class MadeCredential(msgspec.Struct, frozen=True, rename="camel"):
    """A token, a client certificate with its key (PEM), or both."""

    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: dt.datetime | None = None


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    """What a plugin prints."""

    kind: str
    status: MadeCredential


class ExecPluginRunner:
    """Runs one plugin when a credential is needed. Owner: one event loop.

    `directory` is the kubeconfig's; `cluster` is what a plugin gets that wants to know the cluster.
    """

    def __init__(self, plugin: ExecPlugin, directory: Path, cluster: Mapping[str, str]) -> None:
        self._plugin, self._directory, self._cluster = plugin, directory, cluster
        self._made: MadeCredential | None = None

    async def find_credential(self) -> MadeCredential:
        """The one at hand, or a new one.

        Raises:
            KubernetesApiError: the plugin cannot be run, failed, or printed none.
        """
        if self._made is None or _expires_soon(self._made):
            self._made = self._read(await self._run())
        return self._made

    async def _run(self) -> bytes:
        plugin = self._plugin
        info = {
            "apiVersion": plugin.api_version,
            "kind": "ExecCredential",
            "spec": {
                "interactive": False,
                **({"cluster": self._cluster} if plugin.provide_cluster_info else {}),
            },
        }
        environment = {
            **read_environment(),
            **{each.name: each.value for each in plugin.env or ()},
            "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode(),
        }
        # A name without a slash is looked for in PATH; else it is relative to the kubeconfig.
        command = plugin.command
        if "/" in command:
            command = str(self._directory / command)
        try:
            process = await asyncio.create_subprocess_exec(
                command,
                *(plugin.args or ()),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as exc:
            hint = plugin.install_hint or "install it, or add its folder to PATH"
            raise KubernetesApiError(
                f"the kubeconfig's exec plugin {plugin.command} cannot be run: {exc.strerror}; "
                f"{hint}"
            ) from exc
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
        except TimeoutError as exc:
            raise KubernetesApiError(
                f"the exec plugin {plugin.command} has not ended after {TIMEOUT_S:g} s; does it "
                "ask for something on a terminal? Log in first"
            ) from exc
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise KubernetesApiError(
                f"the exec plugin {plugin.command} failed with exit code {process.returncode}; its "
                "own message is above. Log in again?"
            )
        return output

    def _read(self, output: bytes) -> MadeCredential:
        try:
            found = msgspec.json.decode(output[:MAX_OUTPUT_BYTES], type=ExecCredential)
        except UNDECODABLE as exc:  # without what it printed: that may be a secret
            raise KubernetesApiError(
                f"the exec plugin {self._plugin.command} printed no ExecCredential: {exc}"
            ) from exc
        made = found.status
        if not made.token and not (made.client_certificate_data and made.client_key_data):
            raise KubernetesApiError(
                f"the exec plugin {self._plugin.command} made neither a token nor a certificate"
            )
        return made


def _expires_soon(made: MadeCredential) -> bool:
    expires = made.expiration_timestamp
    if expires is None:
        return False
    return expires.timestamp() - RENEW_BEFORE_S < MachineClock().unix_now()
