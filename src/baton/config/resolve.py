"""The layers, merged and checked."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton.config.keys import Key, closed_keys, parse_open_value
from baton.config.origin import FromDefault, FromFlag, Origin, describe
from baton.config.sections import Config
from baton.config.sources import (
    Layer,
    Setting,
    Text,
    Typed,
    read_assignments,
    read_file,
    read_variables,
)
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Value:
    """A checked value and where it came from."""

    value: object
    origin: Origin


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every key's value: all closed keys, and what was set below open tables."""

    values: Mapping[str, Value]
    file: Path | None

    def is_default(self, name: str) -> bool:
        """Whether no source sets this key."""
        return name not in self.values or isinstance(self.values[name].origin, FromDefault)

    def to_config(self) -> Config:
        """The same as a tree of sections.

        Raises:
            ConfigError: a name below an open table is used for a value and for a table.
        """
        tree: dict[str, object] = {}
        for name, value in self.values.items():
            _set_path(tree, name.split("."), value.value)
        try:
            return msgspec.convert(tree, Config)
        except msgspec.ValidationError as exc:
            raise ConfigError(str(exc)) from exc


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The command line's configuration.

    `flags` maps key names to (the flag, its value); `assignments` are `--set`'s `key=value`.
    """

    file: Path | None = None
    flags: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    assignments: Sequence[str] = ()


def resolve(command_line: CommandLine, environment: Mapping[str, str]) -> Resolved:
    """Merge all sources and check each value.

    Raises:
        ConfigError: a source is unreadable, a key unknown or a value of the wrong type.
    """
    file = command_line.file
    if file is None and environment.get("BATON_CONFIG"):
        file = Path(environment["BATON_CONFIG"])
    flags: Layer = {
        name: Setting(Typed(value), FromFlag(flag))
        for name, (flag, value) in command_line.flags.items()
    }
    defaults: Layer = {
        key.name: Setting(Typed(key.default), FromDefault()) for key in closed_keys().values()
    }
    merged = ChainMap(
        flags,
        read_assignments(command_line.assignments),
        read_variables(environment),
        read_file(file) if file else {},
        defaults,
    )
    return Resolved({name: _checked(name, merged[name]) for name in sorted(merged)}, file)


def _checked(name: str, setting: Setting) -> Value:
    key = closed_keys().get(name)
    try:
        return Value(_convert(key, setting.value), setting.origin)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{name}: {exc} ({describe(setting.origin)})") from exc


def _convert(key: Key | None, value: Typed | Text) -> object:
    match value:
        case Text(text):
            return key.parse(text) if key else parse_open_value(text)
        case Typed(typed):
            return key.convert(typed) if key else typed


def _set_path(tree: dict[str, object], path: Sequence[str], value: object) -> None:
    for part in path[:-1]:
        branch = tree.setdefault(part, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{'.'.join(path)}: {part!r} is set to a value and to a table")
        tree = branch
    tree[path[-1]] = value
