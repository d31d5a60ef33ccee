"""An engine's own options, checked before a process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.engines.interface import ENGINES
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_engine_options(kind: str, options: Mapping[str, object]) -> None:
    """Refuse early what the engine would refuse after its process has started.

    Raises:
        ConfigError: the engine is not installed, or does not take these options.
    """
    try:
        msgspec.convert(options, ENGINES.plugin(kind).options)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"[engine] of {kind!r}: {exc}") from exc


def engine_defaults(kind: str) -> Mapping[str, object]:
    """Every option that the engine takes, with its default.

    Raises:
        ConfigError: the engine is not installed.
    """
    fields = msgspec.structs.fields(ENGINES.plugin(kind).options)
    return {field.name: field.default for field in fields}
