"""What other threads ask of the engine's thread, and how it sleeps until somebody does."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.engines.interface import GenerationRequest
    from baton.ids import RequestId


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer this request."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget this request."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Stop:
    """Fail what is unfinished and end."""


Command: TypeAlias = Submit | Cancel | Stop


class CommandQueue:
    """A queue of commands with one reader. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: list[Command] = []
        self._is_woken = False

    @property
    def num_submissions(self) -> int:
        """Requests that the reader has not seen yet."""
        with self._condition:
            return sum(isinstance(command, Submit) for command in self._commands)

    def put(self, command: Command) -> None:
        """Append a command and wake the reader."""
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def wake(self) -> None:
        """Wake the reader for another reason than a command."""
        with self._condition:
            self._is_woken = True
            self._condition.notify()

    def take(self) -> list[Command]:
        """All commands, in order; does not wait."""
        with self._condition:
            commands, self._commands = self._commands, []
            self._is_woken = False
            return commands

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is a command, somebody wakes the reader, or the time is over."""
        limit_s = threading.TIMEOUT_MAX if timeout_s is None else timeout_s
        with self._condition:
            self._condition.wait_for(
                lambda: self._commands or self._is_woken, min(limit_s, threading.TIMEOUT_MAX)
            )
