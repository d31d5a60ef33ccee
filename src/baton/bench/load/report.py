"""What a run leaves: what `--json` prints. `docs/bench-serve.md` describes the fields."""

from __future__ import annotations

from typing import Final

import msgspec

from baton.bench.load.figures import Figures
from baton.bench.load.record import Record
from baton.bench.load.surveying import Server
from baton.bench.load.watching import ClientLoad
from baton.bench.manifest import RunManifest

SCHEMA: Final = "baton-bench-serve/1"


class WorkloadSaid(msgspec.Struct, frozen=True):
    """What was asked. The same name, lengths and seed are the same prompts."""

    name: str
    description: str
    seed: str


class LoadSaid(msgspec.Struct, frozen=True):
    """How it was asked: a description, and the numbers; None: not of this kind of load."""

    description: str
    concurrency: int | None
    requests_per_s: float | None
    max_in_flight: int | None
    num_warm_up: int
    num_requests: int | None
    duration_s: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `is_partial`: it was interrupted, or stopped itself (`stopped` says why).

    `records`: every request, the warm-up's too.
    """

    schema: str = SCHEMA
    is_partial: bool
    stopped: str | None
    manifest: RunManifest
    server: Server
    workload: WorkloadSaid
    load: LoadSaid
    figures: Figures
    client: ClientLoad
    warnings: tuple[str, ...]
    records: tuple[Record, ...]
