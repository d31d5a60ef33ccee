"""Every key, flat: `gateway.port` → its type and default.

A *closed* key is a field of a section. An *open table* (`engine`, `transfer.options`, …) has keys
that belong to a plug-in; below it any TOML value is accepted here and checked there.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, get_origin, get_type_hints

import msgspec

from baton.config import sections
from baton.config.sections import Config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ENVIRONMENT_PREFIX: Final = "BATON_"
PATH_KEYS: Final = frozenset({"cluster.key_file", "worker.model"})
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

        A list is a TOML array, or words with commas between them.

        Raises:
            msgspec.ValidationError: the text is not of this key's type.
        """
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
        for field in msgspec.structs.fields(struct):
            if get_origin(hints[field.name]) is not dict:
                name = f"{section}.{field.name}"
                found[name] = Key(name, hints[field.name], field.default)
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
    """A value below an open table, written as text: TOML if it reads as TOML, else a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


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
