"""The store's configured tiers: is each server there, does it bound itself; how disks are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.clock import MachineClock
from baton.errors import BatonError, ConfigError
from baton.ops.doctor.finding import Area, Finding, Level, write_bytes, write_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.ops.doctor.host import Host
    from baton.store.folder.direct_files import DiskReport
    from baton.store.remote.client import ServerReport


def check_tier(kind: str, options: Mapping[str, object], _host: Host) -> list[Finding]:
    """Ask a tier's server about itself, try its disk; nothing to report of other tiers."""
    from baton.store.folder.direct_files import ReportsDisk  # noqa: PLC0415 - only where
    from baton.store.interface import TIERS  # noqa: PLC0415 - a store is configured
    from baton.store.remote.client import ReportsServer  # noqa: PLC0415

    clock = MachineClock()
    try:
        factory = TIERS.build(kind, options)
        if isinstance(factory, ReportsDisk):
            return [_judge_disk(kind, factory.report_disk())]
        if not isinstance(factory, ReportsServer):
            return []
        began_at = clock.now()
        report = factory.report()
    except ConfigError as exc:
        why = "Workers with this configuration do not start."
        return [_finding(kind, Level.WARNING, str(exc), why)]
    except BatonError as exc:
        why = "Workers start, and compute what they would load from it."
        return [_finding(kind, Level.WARNING, str(exc), why)]
    return [_judge(kind, report, clock.now() - began_at)]


def _judge(kind: str, report: ServerReport, answer_s: float) -> Finding:
    found = f"{report.product} {report.version}".rstrip() + f" answers in {write_seconds(answer_s)}"
    if report.eviction is None:
        return _finding(kind, Level.OK, found, "It bounds itself by rules of its own.")
    used = write_bytes(report.used_bytes)
    if report.capacity_bytes == 0:
        return _finding(
            kind,
            Level.WARNING,
            f"{found}; {used} used, no maxmemory",
            "It grows until entries expire or the kernel ends it.",
            fix="redis-cli CONFIG SET maxmemory 4gb maxmemory-policy allkeys-lru",
        )
    found += f"; {used} of {write_bytes(report.capacity_bytes)} used, {report.eviction}"
    if report.eviction == "noeviction":
        return _finding(
            kind,
            Level.WARNING,
            found,
            "Once it is full it takes nothing more until entries expire.",
            fix="redis-cli CONFIG SET maxmemory-policy allkeys-lru",
        )
    return _finding(kind, Level.OK, found, "The server evicts what was used least.")


def _judge_disk(kind: str, report: DiskReport) -> Finding:
    if not report.is_wanted:
        why = "Large entries go through the page cache, as is configured."
        return _finding(kind, Level.OK, f"{report.place}, direct_io = false", why)
    if report.is_possible:
        why = "Large entries are written past the page cache."
        return _finding(kind, Level.OK, f"{report.place} has O_DIRECT", why)
    return _finding(
        kind,
        Level.WARNING,
        f"{report.place} refuses O_DIRECT",
        "Large entries go through the page cache: that is slower, and takes memory.",
        fix="set store.options.file.directory to a local disk's filesystem (ext4, XFS)",
    )


def _finding(kind: str, level: Level, found: str, why: str, *, fix: str | None = None) -> Finding:
    return Finding(area=Area.STORE, name=kind, level=level, found=found, why=why, fix=fix)
