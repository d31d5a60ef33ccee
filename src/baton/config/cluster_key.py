"""Finds the cluster key, or makes one for this user. The key is hexadecimal text here."""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from baton.config.environment import state_directory
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.config.sections import ClusterSection

KEY_VARIABLE: Final = "BATON_CLUSTER_KEY"
KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ClusterKeyText:
    """The key as hexadecimal text, which is never printed, who chose it, and its file, if any.

    It may be several keys, one in each line (`baton.net.credentials.parse_keys`).
    """

    text: str = field(repr=False)
    origin: Literal["configured", "generated"]
    path: Path | None = None


def find_cluster_key(
    section: ClusterSection, environment: Mapping[str, str], hosts: Sequence[str]
) -> ClusterKeyText:
    """The key from the environment, else the key file, else this user's own file.

    `hosts` are the addresses that will be listened on: a key is made up only if all are loopback.

    Raises:
        ConfigError: the file is unreadable or readable by others, or a key is needed and absent.
    """
    if configured := find_configured_key(section, environment):
        return configured
    _require_loopback(hosts)
    path = state_directory(environment) / "cluster.key"
    _create_once(path)
    return ClusterKeyText(read_key_file(path), "generated", path)


def ephemeral_cluster_key(
    section: ClusterSection, environment: Mapping[str, str], hosts: Sequence[str]
) -> ClusterKeyText:
    """As `find_cluster_key`, but a key that is made up is kept nowhere.

    Raises:
        ConfigError: the file is unreadable or readable by others, or a key is needed and absent.
    """
    if configured := find_configured_key(section, environment):
        return configured
    _require_loopback(hosts)
    return ClusterKeyText(secrets.token_hex(KEY_BYTES), "generated")


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether it is every address of this machine, so that no peer can use it to reach it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def find_configured_key(
    section: ClusterSection, environment: Mapping[str, str]
) -> ClusterKeyText | None:
    """The key that an operator chose, if any.

    Raises:
        ConfigError: the file is unreadable, or readable by others.
    """
    if text := environment.get(KEY_VARIABLE):
        return ClusterKeyText(text, "configured")
    if section.key_file is not None:
        path = Path(section.key_file).expanduser()
        return ClusterKeyText(read_key_file(path), "configured", path)
    return None


def find_existing_key(section: ClusterSection, environment: Mapping[str, str]) -> ClusterKeyText:
    """The configured key, else this user's own file; none is made up.

    Raises:
        ConfigError: there is none, or a file is unreadable or readable by others.
    """
    if configured := find_configured_key(section, environment):
        return configured
    path = state_directory(environment) / "cluster.key"
    if not path.exists():
        raise ConfigError(
            f"this host has no cluster key: set {KEY_VARIABLE} or cluster.key_file as for its "
            "gateway or worker"
        )
    return ClusterKeyText(read_key_file(path), "generated", path)


def _require_loopback(hosts: Sequence[str]) -> None:
    if exposed := [host for host in hosts if not is_loopback(host)]:
        raise ConfigError(
            f"listening on {', '.join(exposed)} needs a cluster key, the same for gateway and "
            f"workers: set {KEY_VARIABLE} (make one with: openssl rand -hex 32) or "
            "cluster.key_file, or listen on 127.0.0.1"
        )


def read_key_file(path: Path) -> str:
    """What a file of keys holds.

    Raises:
        ConfigError: it is unreadable, or readable by others.
    """
    try:
        others = find_readers(path.stat())
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the cluster key {path}: {exc}") from exc
    if others:
        raise ConfigError(f"other users can read the cluster key: run `chmod 600 {path}`")
    return text.strip()


def find_readers(status: os.stat_result) -> int:
    """Permission bits that make a secret file readable by others; 0: it is private.

    A file that belongs to root may be readable by its group, as Kubernetes mounts a secret for a
    pod with `fsGroup`: a process that is not root could not read it otherwise.
    """
    is_mounted = status.st_uid == 0 and os.geteuid() != 0
    return status.st_mode & (0o037 if is_mounted else 0o077)


def _create_once(path: Path) -> None:
    """Make the file with a fresh key, unless it exists; two processes agree on one key."""
    if path.exists():
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
            _link_unless_exists(draft, path)
        finally:
            draft.unlink()
    except OSError as exc:
        raise ConfigError(
            f"cannot keep a cluster key in {path}: {exc}; set {KEY_VARIABLE} instead "
            "(make one with: openssl rand -hex 32)"
        ) from exc


def _link_unless_exists(draft: Path, path: Path) -> None:
    # A link, not a rename: whoever comes second must not replace the key that the first uses.
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        return
