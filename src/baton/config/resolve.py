"""Every key, flat; one layer of values for each source; and the layers, merged and checked.

A *closed* key is a field of a section. An *open table* (`engine`, `transfer.options`, …) has keys
that belong to a plug-in; below it any TOML value is accepted here and checked there.

Sources are a file, the environment and the flags. A layer maps key names to `Setting`s. Names are
checked here, values where layers are merged.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never, get_origin, get_type_hints

import msgspec

from baton.config import sections, topology
from baton.config.sections import Config
from baton.errors import UNDECODABLE, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class FromDefault:
    """No source sets the value."""


@dataclass(frozen=True, slots=True)
class FromFile:
    """A key of the configuration file; `line` is None where it could not be found cheaply."""

    path: Path
    line: int | None


@dataclass(frozen=True, slots=True)
class FromEnvironment:
    """An environment variable."""

    variable: str


@dataclass(frozen=True, slots=True)
class FromFlag:
    """A command-line flag."""

    flag: str


Origin: TypeAlias = FromDefault | FromFile | FromEnvironment | FromFlag


def describe(origin: Origin) -> str:
    """One short phrase for messages and tables, e.g. `file baton.toml:12`."""
    match origin:
        case FromDefault():
            return "default"
        case FromFile(path, None):
            return f"file {path}"
        case FromFile(path, line):
            return f"file {path}:{line}"
        case FromEnvironment(variable):
            return f"environment {variable}"
        case FromFlag(flag):
            return f"flag {flag}"
        case _:
            assert_never(origin)


ENVIRONMENT_PREFIX: Final = "BATON_"
PATH_KEYS: Final = frozenset({
    "cluster.key_file",
    "security.identity",
    "worker.model",
    "preemption.file",
    "router.costs_file",
    "gateway.tls_certificate",
    "gateway.tls_key",
    "gateway.client_keys_file",
    "gateway.management_key_file",
    "gateway.audit_log",
})
"""Keys that name files: a relative one in a file is relative to that file."""


@dataclass(frozen=True, slots=True)
class Key:
    """One closed key. `type` is what msgspec converts to."""

    name: str
    type: object
    default: object

    def convert(self, value: object) -> object:
        """Check a value that has a type of its own already (TOML, a parsed flag).

        Raises:
            msgspec.ValidationError: the type or a bound does not fit.
        """
        return msgspec.convert(value, self.type)

    def parse(self, text: str) -> object:
        """Check a value that was written as text (environment, `--set`).

        A list is a TOML array, or words with commas between them; `null` is None, where that is
        the default.

        Raises:
            msgspec.ValidationError: the text is not of this key's type.
        """
        if self.default is None and text == "null":
            return None
        if isinstance(self.default, tuple):
            array = parse_open_value(text)
            words = [word.strip() for word in text.split(",") if word.strip()]
            return msgspec.convert(
                array if isinstance(array, list) else words, self.type, strict=False
            )
        return msgspec.convert(text, self.type, strict=False)


@cache
def closed_keys() -> Mapping[str, Key]:
    """All closed keys by name, in the order of the sections."""
    found: dict[str, Key] = {}
    for section, struct in _sections().items():
        hints = get_type_hints(struct, vars(sections), include_extras=True)
        for info in msgspec.structs.fields(struct):
            if get_origin(hints[info.name]) is not dict:
                name = f"{section}.{info.name}"
                found[name] = Key(name, hints[info.name], info.default)
    return found


@cache
def open_tables() -> frozenset[str]:
    """Names of the open tables."""
    inner = {
        f"{section}.{field.name}"
        for section, struct in _sections().items()
        for field in msgspec.structs.fields(struct)
        if f"{section}.{field.name}" not in closed_keys()
    }
    return frozenset(inner | {f.name for f in msgspec.structs.fields(Config)} - set(_sections()))


def open_table_of(name: str) -> str | None:
    """The open table that `name` lies in, if any."""
    return next((table for table in open_tables() if name.startswith(f"{table}.")), None)


def environment_name(key: str) -> str:
    """The variable that sets a key: `gateway.port` → `BATON_GATEWAY__PORT`."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "__")


def parse_open_value(text: str) -> object:
    """A value below an open table, as text: TOML or JSON if it reads as such, else a string.

    Raises:
        ConfigError: it begins like a table and is none.
    """
    stripped = text.strip()
    try:
        return tomllib.loads(f"value = {stripped}")["value"]
    except (ValueError, RecursionError) as exc:
        if not stripped.startswith("{"):
            return text
        reason = exc
    try:
        return msgspec.json.decode(text)
    except UNDECODABLE:
        raise ConfigError(
            f'{text!r} is no inline table: {reason}; write {{key = "value", other = 1}}'
        ) from reason


def quote_key(key: str) -> str:
    """One key as a part of a name: in double quotes if it has a dot, as a model's name may."""
    return f'"{key}"' if "." in key else key


def split_name(name: str) -> list[str]:
    """The keys of which a name consists."""
    parts = re.findall(r'"[^"]*"(?=\.|$)|[^.]+', name)
    return [part[1:-1] if re.fullmatch(r'"[^"]*"', part) else part for part in parts]


def closest(wrong: str, known: Iterable[str]) -> str | None:
    """What was probably meant, if anything is close."""
    return next(iter(difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.7)), None)


@cache
def _sections() -> Mapping[str, type[msgspec.Struct]]:
    """The closed sections: name → its Struct."""
    hints = get_type_hints(Config, vars(sections))
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct)
    }


NOT_SETTINGS: Final = frozenset({
    "BATON_CLUSTER_KEY",
    "BATON_CONFIG",
    "BATON_MANAGEMENT_KEY",
    *chain.from_iterable(topology.VARIABLES),
})


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
    except (ValueError, RecursionError) as exc:  # TOML, UTF-8, a number of thousands of digits
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    layer: Layer = {}
    for name, value in _flatten(document, ""):
        line = find_line(text, name)
        _check_name(name, f"{path}:{line}" if line else str(path))
        layer[name] = Setting(Typed(_resolve_path(name, value, path.parent)), FromFile(path, line))
    return layer


def read_variables(environment: Mapping[str, str]) -> Layer:
    """The settings among the environment's variables; below a table, a value may be an inline one.

    Names are lower-cased, but for those within an inline table.

    Raises:
        ConfigError: a variable looks like a setting and names no key.
    """
    layer: Layer = {}
    for variable, text in sorted(environment.items()):  # a table's before those of its keys
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NOT_SETTINGS:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        is_table = name in open_tables() and text.lstrip().startswith("{")
        if is_table or name in closed_keys() or open_table_of(name) is not None:
            for inner, value in _read_text(name, text):
                layer[inner] = Setting(value, FromEnvironment(variable))
        elif "." in name or (name in _misspelt_variables() and not _is_service_link(name, text)):
            # Others may be somebody else's; these were meant for us and would be lost silently.
            meant = _misspelt_variables().get(name) or closest(name, closed_keys())
            hint = f"; did you mean {environment_name(meant)!r}?" if meant else ""
            raise ConfigError(f"the environment variable {variable} sets nothing{hint}")
    return layer


def read_assignments(assignments: Sequence[str]) -> Layer:
    """The settings given as `--set section.key=value`; a value may be an inline table.

    Raises:
        ConfigError: without `=`, or naming a key that does not exist.
    """
    layer: Layer = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--set {assignment}: write it as section.key=value")
        for inner, value in _read_text(name, text):
            _check_name(inner, "--set")
            layer[inner] = Setting(value, FromFlag("--set"))
    return layer


def _read_text(name: str, text: str) -> Iterator[tuple[str, Typed | Text]]:
    """What a text sets: of an inline table each value by its own name, as of a table in a file."""
    table = None if name in closed_keys() else parse_open_value(text)
    if isinstance(table, dict):
        for inner, value in _flatten(table, f"{name}."):
            yield inner, Typed(value)
    else:
        yield name, Text(text)


def find_line(text: str, name: str) -> int | None:
    """The line that sets `name`, counted from 1; None where the file's style hides it."""
    unquoted = name.replace('"', "")
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.\-\"]+)\s*\]", line):
            table = header[1].replace('"', "") + "."
        elif (key := re.match(r"\s*([\w.\-\"]+)\s*=", line)) and (
            table + key[1].replace('"', "") == unquoted
        ):
            return number
    return None


def _flatten(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = prefix + quote_key(key)
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


def _is_service_link(name: str, text: str) -> bool:
    """Whether Kubernetes set it, in a pod: for a Service NAME it sets NAME_PORT to an address.

    Of a Service called baton-gateway, BATON_GATEWAY_PORT.
    """
    return name.endswith("_port") and re.match(r"(tcp|udp|sctp)://", text) is not None


@cache
def _misspelt_variables() -> Mapping[str, str]:
    """Keys by what is left of their variable's name with one underscore instead of two."""
    return {name.replace(".", "_"): name for name in closed_keys()}


def is_path(name: str) -> bool:
    """Whether a key names a file or a folder."""
    return name in PATH_KEYS or name.startswith("router.tokenizers.")


def _resolve_path(name: str, value: object, directory: Path) -> object:
    if isinstance(value, str) and is_path(name):
        return str(directory / _expand(name, value))
    return value


def _expand(name: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(f"{name}: {path!r} begins with the home of no user: {exc}") from exc


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

    def to_config(self) -> Config:
        """The same as a tree of sections.

        Raises:
            ConfigError: a name below an open table is used for a value and for a table, or two
                settings exclude each other.
        """
        tree: dict[str, object] = {}
        for name, value in self.values.items():
            _set_path(tree, split_name(name), value.value)
        try:
            return msgspec.convert(tree, Config)
        except msgspec.ValidationError as exc:
            what, _, section = str(exc).partition(" - at `$.")
            raise ConfigError(f"{section.rstrip('`')}: {what}" if section else what) from exc


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
    merged = defaults | _merge(
        read_file(file) if file else {},
        read_variables(environment),
        read_assignments(command_line.assignments),
        flags,
    )
    return Resolved({name: _checked(name, merged[name]) for name in sorted(merged)}, file)


def _merge(*layers: Layer) -> Layer:
    """The settings of all layers, the strongest last: of each name the strongest one's.

    A value replaces the weaker layers' table of its name, and a table their value of its name.
    """
    merged: Layer = {}
    for layer in layers:
        tables = {table for name in layer for table in _tables_of(name)}
        kept = {
            name: setting
            for name, setting in merged.items()
            if name not in tables and layer.keys().isdisjoint(_tables_of(name))
        }
        merged = kept | layer
    return merged


def _tables_of(name: str) -> Iterator[str]:
    """The tables that a setting lies in: of `a.b.c`, `a` and `a.b`."""
    return accumulate(map(quote_key, split_name(name)[:-1]), "{}.{}".format)


def _checked(name: str, setting: Setting) -> Value:
    key = closed_keys().get(name)
    try:
        value = _convert(key, setting.value)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{name}: {exc} ({describe(setting.origin)})") from exc
    for number in _list_floats(msgspec.to_builtins(value)):
        if not isfinite(number):  # JSON, hence status and plans, has none
            raise ConfigError(f"{name}: {number} is no finite number ({describe(setting.origin)})")
    if is_path(name) and isinstance(value, str) and value.startswith("~"):
        value = str(_expand(name, value))
    return Value(value, setting.origin)


def _list_floats(value: object) -> Iterator[float]:
    """Those in a value, also within lists and tables."""
    match value:
        case float():
            yield value
        case list() | tuple():
            yield from chain.from_iterable(map(_list_floats, value))
        case dict():
            yield from _list_floats(list(value.values()))


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
