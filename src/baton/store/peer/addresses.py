"""Addresses of `host` tiers that peers reach, as operators write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from yarl import URL

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEME: Final = "tcp"
_MAX_PORT: Final = 65_535


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`.

    Raises:
        ConfigError: it is no such URL.
    """
    try:
        parsed = URL(url)
        host, port = parsed.host, parsed.explicit_port
    except ValueError:
        raise _no_url(url) from None
    rest = parsed.user, parsed.password, parsed.path.strip("/"), parsed.query_string
    if parsed.scheme != SCHEME or not host or not port or any(rest):
        raise _no_url(url)
    return host, port


def _no_url(url: str) -> ConfigError:
    return ConfigError(f"store.options.peer.urls: {url!r} is not tcp://HOST:PORT")


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; port 0 takes a free one.

    Raises:
        ConfigError: it is no such address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise ConfigError(f"store.options.host.listen is HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def find_listen_hosts(
    kinds: tuple[str, ...], options: Mapping[str, Mapping[str, object]]
) -> tuple[str, ...]:
    """The hosts at which a store of these tiers listens for peers.

    Raises:
        ConfigError: it is no address.
    """
    listen = options.get("host", {}).get("listen") if "host" in kinds else None
    return () if listen is None else (parse_listen(str(listen))[0],)
