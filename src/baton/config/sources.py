"""One layer of values for each source: a file, the environment, the flags.

A layer maps key names to `Setting`s. Names are checked here, values where layers are merged.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.config.keys import (
    ENVIRONMENT_PREFIX,
    PATH_KEYS,
    closed_keys,
    closest,
    environment_name,
    open_table_of,
    open_tables,
)
from baton.config.origin import FromEnvironment, FromFile, FromFlag, Origin
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NOT_SETTINGS: Final = frozenset({"BATON_CLUSTER_KEY", "BATON_CONFIG"})


@dataclass(frozen=True, slots=True)
class Typed:
    """A value that has a type already."""

    value: object


@dataclass(frozen=True, slots=True)
class Text:
    """A value written as text."""

    text: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One source's value for one key."""

    value: Typed | Text
    origin: Origin


Layer: TypeAlias = "dict[str, Setting]"


def read_file(path: Path) -> Layer:
    """The settings of a TOML file.

    Raises:
        ConfigError: unreadable, not TOML, or it names a key that does not exist.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as exc:
        raise ConfigError(
            f"cannot read the configuration file {path}: {exc.strerror}; "
            "check the path given by --config or BATON_CONFIG"
        ) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    layer: Layer = {}
    for name, value in _flatten(document, ""):
        line = find_line(text, name)
        _check_name(name, f"{path}:{line}" if line else str(path))
        layer[name] = Setting(Typed(_resolve_path(name, value, path.parent)), FromFile(path, line))
    return layer


def read_variables(environment: Mapping[str, str]) -> Layer:
    """The settings among the environment's variables.

    Raises:
        ConfigError: a variable looks like a setting and names no key.
    """
    layer: Layer = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        if name in closed_keys() or open_table_of(name) is not None:
            layer[name] = Setting(Text(text), FromEnvironment(variable))
        elif "." in name or name in _misspelt_variables():
            # Others may be somebody else's; these were meant for us and would be lost silently.
            meant = _misspelt_variables().get(name) or closest(name, closed_keys())
            hint = f"; did you mean {environment_name(meant)!r}?" if meant else ""
            raise ConfigError(f"the environment variable {variable} sets nothing{hint}")
    return layer


def read_assignments(assignments: Sequence[str]) -> Layer:
    """The settings given as `--set section.key=value`.

    Raises:
        ConfigError: without `=`, or naming a key that does not exist.
    """
    layer: Layer = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set {assignment}: write it as section.key=value")
        _check_name(name, "--set")
        layer[name] = Setting(Text(text), FromFlag("--set"))
    return layer


def find_line(text: str, name: str) -> int | None:
    """The line that sets `name`, counted from 1; None where the file's style hides it."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.\-\"]+)\s*\]", line):
            table = header[1].replace('"', "") + "."
        elif (key := re.match(r"\s*([\w.\-\"]+)\s*=", line)) and (
            table + key[1].replace('"', "") == name
        ):
            return number
    return None


def _flatten(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and name not in closed_keys():
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _check_name(name: str, where: str) -> None:
    if name in closed_keys() or open_table_of(name) is not None:
        return
    if name in open_tables() or any(key.startswith(f"{name}.") for key in closed_keys()):
        raise ConfigError(f"{where}: {name!r} is a table, not a value")
    meant = closest(name, [*closed_keys(), *open_tables()])
    hint = f"; did you mean {meant!r}?" if meant else ""
    raise ConfigError(f"{where}: unknown key {name!r}{hint}")


@cache
def _misspelt_variables() -> Mapping[str, str]:
    """Keys by what is left of their variable's name with one underscore instead of two."""
    return {name.replace(".", "_"): name for name in closed_keys()}


def _resolve_path(name: str, value: object, directory: Path) -> object:
    if name in PATH_KEYS and isinstance(value, str):
        return str(directory / Path(value).expanduser())
    return value
