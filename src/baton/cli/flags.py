"""The flags that every command shares, and how flags become settings."""

# Annotations are read at run time here and in the commands' modules: cyclopts parses by them.
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from baton.config.environment import read_environment
from baton.config.resolve import CommandLine, Resolved, resolve

Flags = Mapping[str, tuple[str, object]]
"""Key names → (the flag, its value); None means that the flag was not given."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ConfigFlags:
    """Where configuration comes from, besides a command's own flags."""

    config: Annotated[Path | None, Parameter(help="A TOML file; see docs/configuration.md.")] = None
    assignments: Annotated[
        list[str],
        Parameter(name="--set", help="Any setting, as section.key=value.", negative=""),
    ] = field(default_factory=list)
    debug: Annotated[
        bool, Parameter(help="Log everything; show where an error arose.", negative="")
    ] = False

    def resolve(self, flags: Flags) -> Resolved:
        """All settings, from every source.

        Raises:
            ConfigError: a source is unreadable, or says something that makes no sense.
        """
        given = {name: pair for name, pair in flags.items() if pair[1] is not None}
        if self.debug:
            given["log.level"] = ("--debug", "debug")
        command_line = CommandLine(self.config, given, self.assignments)
        return resolve(command_line, read_environment())


AnnounceFd = Annotated[
    int | None,
    Parameter(help="File descriptor that gets JSON lines for a launcher.", show=False),
]
