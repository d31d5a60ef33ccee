"""Where, when and how something was measured: the same for every benchmark that loads servers."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from baton import __version__
from baton.bench.machine import Machine, describe_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Clock


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One run's circumstances. `machine` is the client's; its load is that before the run.

    `command` has the command line's arguments: no secret may ever be one.
    """

    baton: str
    started_at: str
    command: tuple[str, ...]
    machine: Machine
    load_after: tuple[float, float, float]


def open_manifest(command: Sequence[str], clock: Clock) -> RunManifest:
    """As it is now, before anything runs."""
    machine = describe_machine()
    started_at = datetime.fromtimestamp(clock.unix_now(), UTC).isoformat(timespec="seconds")
    return RunManifest(
        baton=__version__,
        started_at=started_at,
        command=tuple(command),
        machine=machine,
        load_after=machine.load,
    )


def close_manifest(manifest: RunManifest) -> RunManifest:
    """The same, after the run."""
    return msgspec.structs.replace(manifest, load_after=os.getloadavg())
