"""The contract of a source of workers, and how one is built.

A plug-in of the group `baton.worker_sources` builds a `SourceFactory`. The text of one entry of
`gateway.members` is `KIND:ARGUMENT`, or `KIND` alone; the factory gets the argument.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec

from baton.errors import ConfigError
from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from baton.clock import Clock, Instant
    from baton.config.sections import Tls
    from baton.gateway.options import WorkerAddress

log = logging.getLogger(__name__)


class WorkerSource(Protocol):
    """Something that knows the addresses of workers: a file, DNS, Kubernetes, announcements.

    A source that cannot be read keeps quiet: what it last yielded stays valid, for as long as that
    takes. Owner: the event loop's thread.
    """

    def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """Yield the whole set at first, and again whenever it changes.

        Never ends by itself. Errors of the source are reported to its `SourceStatus`, and retried.
        """
        ...


class SourceStatus:
    """How reading a source goes: what metrics and error messages show. Owner: the event loop.

    `name` is the source's text in `gateway.members`; `problem` why it cannot be read now, `refused`
    what of its list is not used.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self._clock = name, clock
        self.num_errors = 0
        self.problem: str | None = None
        self.refused: str | None = None
        self.read_at: Instant | None = None

    def note_read(self) -> None:
        """It was read without an error just now, whether or not anything has changed."""
        self.read_at = self._clock.now()
        if self.problem is not None:
            log.info("%s can be read again", self.name)
            self.problem = None

    def note_error(self, problem: str) -> None:
        """It could not be read; logged once for each problem."""
        self.num_errors += 1
        if problem != self.problem:
            stay = "" if self.read_at is None else "; the workers that it listed before stay"
            log.warning("%s: %s%s", self.name, problem, stay)
            self.problem = problem

    def note_list(self, refused: str | None) -> None:
        """What it lists was looked at: why some of it, or all, is not used; None: all is used."""
        if refused is not None:
            self.num_errors += 1
            if refused != self.refused:
                log.warning("%s: %s", self.name, refused)
        self.refused = refused

    @property
    def age_s(self) -> float | None:
        """Seconds since it was read; None: never."""
        return None if self.read_at is None else self._clock.now() - self.read_at


@dataclass(frozen=True, slots=True)
class SourceSetup:
    """What a source is built from.

    `interval_s` is how often a source that cannot be watched is asked. With `tls` other than "off"
    workers have `https` addresses, and prove that they are of this cluster.
    """

    argument: str
    status: SourceStatus
    interval_s: float
    tls: Tls


SourceFactory: TypeAlias = "Callable[[SourceSetup], WorkerSource]"
"""Builds a source; opens nothing yet. Raises ConfigError for an argument that it cannot use."""

WORKER_SOURCES: Final[Registry[SourceFactory]] = Registry("baton.worker_sources", "gateway.members")


class NoSourceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of sources that have no options but their argument."""


@dataclass(frozen=True, slots=True)
class NamedSource:
    """One entry of `gateway.members`."""

    status: SourceStatus
    source: WorkerSource

    @property
    def name(self) -> str:
        """Its text there."""
        return self.status.name


def build_source(text: str, clock: Clock, interval_s: float, tls: Tls) -> NamedSource:
    """The source that an entry of `gateway.members` names.

    Raises:
        ConfigError: no such kind is installed, or its argument cannot be used.
    """
    kind, _, argument = text.partition(":")
    if kind not in (kinds := WORKER_SOURCES.kinds()):
        raise ConfigError(
            f"gateway.members: {text!r} names no source; write it as KIND:ARGUMENT, with a KIND "
            f"of: {', '.join(kinds)}; or announced, with gateway.announce_port"
        )
    status = SourceStatus(text, clock)
    factory = WORKER_SOURCES.build(kind, {})
    return NamedSource(status, factory(SourceSetup(argument, status, interval_s, tls)))
