"""Where the server is, what it is asked for, and who asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.workloads.asking import Endpoint

PATHS: Final[dict[Endpoint, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `base_url` has no slash at its end and no `/v1`; the key is never shown."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)

    def url(self, endpoint: Endpoint) -> str:
        """Where requests of this kind go."""
        return self.base_url + PATHS[endpoint]

    @property
    def models_url(self) -> str:
        """Where the server lists its models."""
        return f"{self.base_url}/v1/models"

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


def open_target(url: str, api_key: str | None) -> Target:
    """A target, from what a person writes.

    Raises:
        ConfigError: no URL of a server, or one with a password in it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ConfigError(f"--url {url}: {exc}") from exc
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ConfigError(f"--url {url}: no address of a server, such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ConfigError("--url: no password in it, please: results keep the address")
    if parts.query or parts.fragment:
        raise ConfigError(f"--url {url}: the server's address only, without ? and #")
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    for suffix in (*PATHS.values(), "/v1"):
        base = base.removesuffix(suffix)
    return Target(base, api_key)
