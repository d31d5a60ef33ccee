"""Engines by name: their own options, checked before a process starts.

`[engine]` holds options for every engine of a fleet, and `[engine.NAME]` those of one, which win.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from baton.engines.interface import ENGINE_SERVERS, ENGINES, EngineFactory, EngineServer
from baton.errors import ConfigError, UnknownPluginError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.registry import Plugin


def engine_options(kind: str, table: Mapping[str, object]) -> dict[str, object]:
    """The options that `[engine]` holds for one engine.

    Raises:
        ConfigError: `engine.NAME` is a value, not a table.
    """
    kinds = _kinds()
    for name in kinds:
        if not isinstance(table.get(name, {}), dict):
            raise ConfigError(f"engine.{name} is a table, of options for the engine {name!r} alone")
    common = {key: value for key, value in table.items() if key not in kinds}
    return common | msgspec.convert(table.get(kind, {}), dict[str, object])


def check_engine(kind: str, options: Mapping[str, object]) -> None:
    """Refuse early what the engine would refuse after its process has started.

    Raises:
        ConfigError: the engine is not installed, or does not take these options.
    """
    plugin = find_engine(kind)
    try:
        parsed = msgspec.convert(options, plugin.options)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"[engine] of {kind!r}: {exc}") from exc
    plugin.build(parsed)


def engine_defaults(kind: str) -> Mapping[str, object]:
    """Every option that the engine takes, with its default.

    Raises:
        ConfigError: the engine is not installed.
    """
    return {
        field.name: field.default for field in msgspec.structs.fields(find_engine(kind).options)
    }


def find_engine(kind: str) -> Plugin[Any, EngineFactory] | Plugin[Any, EngineServer]:
    """An engine's plug-in, whichever of the two kinds it is.

    Raises:
        UnknownPluginError: no installed distribution declares it.
    """
    if kind in ENGINE_SERVERS.kinds():
        return ENGINE_SERVERS.plugin(kind)
    if kind in ENGINES.kinds():
        return ENGINES.plugin(kind)
    raise UnknownPluginError(ENGINES.group, kind, tuple(sorted(_kinds())))


def _kinds() -> frozenset[str]:
    return frozenset({*ENGINES.kinds(), *ENGINE_SERVERS.kinds()})
