"""Options of transports and tiers, checked before a process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from baton.errors import ConfigError, UnknownPluginError
from baton.store.interface import TIERS
from baton.transfer.interface import TRANSPORTS

if TYPE_CHECKING:
    from baton.config.sections import Config
    from baton.registry import Registry

PEERS: Final = "peer"
LAUNCHED_PEERS: Final = {"urls": ("tcp://127.0.0.1:1",)}
"""Stand for the peers that a launcher gives each worker."""


def check_worker_options(
    config: Config, *, is_launcher: bool = False, is_remote: bool = False
) -> None:
    """Refuse options that a worker would refuse. Transports are not built: some use CUDA.

    `is_launcher`: whether peers of the store that are not configured are found later. `is_remote`:
    whether workers run on other hosts, which may have packages that this one lacks; options of
    plug-ins that need one of them are not checked.

    Raises:
        ConfigError: a plug-in is not installed, or does not take its options.
    """
    TRANSPORTS.check_tables(config.transfer.options)
    for kind in config.transfer.transports:
        if is_remote and not _can_import(TRANSPORTS, kind):
            continue
        TRANSPORTS.check(kind, config.transfer.options.get(kind, {}))
    TIERS.check_tables(config.store.options)
    for kind in config.store.tiers:
        if is_remote and not _can_import(TIERS, kind):
            continue
        given = LAUNCHED_PEERS if is_launcher and kind == PEERS else {}
        TIERS.build(kind, given | config.store.options.get(kind, {}))


def _can_import(registry: Registry[Any], kind: str) -> bool:
    """Whether this host has the packages that a plug-in imports."""
    try:
        registry.plugin(kind)
    except UnknownPluginError:
        raise
    except (ConfigError, ImportError):
        return False
    return True
