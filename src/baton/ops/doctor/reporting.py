"""Which probes there are; a host → a report, a gateway → a report."""

from __future__ import annotations

import platform
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton import __version__
from baton.ops.doctor.alerts import check_alerts
from baton.ops.doctor.devices import check_dax, check_gpus, check_rdma
from baton.ops.doctor.finding import Area, Finding, Level, Probe, Report, make_printable
from baton.ops.doctor.fleet import UNREACHABLE, check_counters, check_handoffs, check_readiness
from baton.ops.doctor.isolation import run_probes
from baton.ops.doctor.kernel_checks import check_cma, check_huge_regions, check_memfd, check_pidfd
from baton.ops.doctor.machine import (
    check_bfloat16,
    check_container,
    check_kernel,
    check_numa,
    check_processors,
)
from baton.ops.doctor.memory import (
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_open_files,
    check_overcommit,
    check_shm,
)
from baton.ops.doctor.network import check_interfaces, check_socket_buffers
from baton.ops.doctor.store import check_tier
from baton.ops.doctor.transports import ChosenTransports, check_path, check_transport, failure_level
from baton.ops.doctor.versions import check_engine, check_libraries, check_packages, check_python
from baton.ops.gateway_pages import Gateway
from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.clock import Clock
    from baton.config.sections import Config, StoreSection
    from baton.ops.doctor.host import Host

TRANSPORT_TIMEOUT_S: Final = 15.0
GPU_TIMEOUT_S: Final = 9.0
STORE_TIMEOUT_S: Final = 10.0
FLEET_TIMEOUT_S: Final = 8.0
TRANSPORT_KINDS: Final[Registry[object]] = Registry("baton.transports")
"""Only for the names: the real registry imports numpy."""

RECORDED: Final = (
    Probe(Area.MACHINE, "kernel", check_kernel, Level.NOTE),
    Probe(Area.MACHINE, "processors", check_processors, Level.NOTE),
    Probe(Area.MACHINE, "bfloat16", check_bfloat16, Level.NOTE),
    Probe(Area.MACHINE, "numa", check_numa, Level.NOTE),
    Probe(Area.MACHINE, "container", check_container, Level.NOTE),
    Probe(Area.DEVICES, "GPU", check_gpus, Level.WARNING, GPU_TIMEOUT_S),
    Probe(Area.DEVICES, "RDMA", check_rdma, Level.NOTE),
    Probe(Area.DEVICES, "DAX", check_dax, Level.NOTE),
    Probe(Area.NETWORK, "NIC", check_interfaces, Level.NOTE),
    Probe(Area.NETWORK, "socket buffers", check_socket_buffers, Level.NOTE),
    Probe(Area.MEMORY, "memory", check_memory, Level.NOTE),
    Probe(Area.MEMORY, "/dev/shm", check_shm, Level.WARNING),  # noqa: S108
    Probe(Area.MEMORY, "huge pages", check_huge_pages, Level.NOTE),
    Probe(Area.MEMORY, "overcommit", check_overcommit, Level.NOTE),
    Probe(Area.LIMITS, "open files", check_open_files, Level.NOTE),
    Probe(Area.LIMITS, "locked memory", check_locked_memory, Level.NOTE),
    Probe(Area.VERSIONS, "python", check_python, Level.NOTE),
    Probe(Area.VERSIONS, "packages", check_packages, Level.NOTE),
    Probe(Area.VERSIONS, "libraries", check_libraries, Level.NOTE),
)
"""What is read from files, programs and package metadata: works on a recorded tree too."""

RUN_HERE: Final = (
    Probe(Area.KERNEL, "memfd", check_memfd, Level.WARNING),
    Probe(Area.KERNEL, "huge pages in regions", check_huge_regions, Level.NOTE),
    Probe(Area.KERNEL, "pidfd", check_pidfd, Level.WARNING),
    Probe(Area.KERNEL, "CMA", check_cma, Level.NOTE),
)
"""What is tried on the machine that this process runs on."""


def check_host(host: Host, config: Config, clock: Clock) -> Report:
    """Look at everything here. Takes as long as the slowest probe; starts processes, no thread."""
    started = clock.now()
    engine = config.worker.engine
    chosen = ChosenTransports(config.transfer.transports, config.transfer.options)
    engine_probe = Probe(Area.VERSIONS, "engine", partial(check_engine, engine), Level.NOTE)
    tiers = _tier_probes(config.store)
    probes = (*_transport_probes(chosen), *tiers, *RECORDED, engine_probe, *RUN_HERE)
    findings = run_probes(probes, host, clock)
    return make_report(
        platform.node(), [check_path(findings, chosen), *findings], clock.now() - started
    )


def check_gateway(url: str, host: Host, clock: Clock) -> Report:
    """Look at the fleet behind a gateway.

    Raises:
        ConfigError: this is no gateway's URL.
    """
    started = clock.now()
    gateway = Gateway.at(url, "--gateway")
    findings = run_probes([_fleet_probe(UNREACHABLE, check_readiness, gateway)], host, clock)
    if all(finding.name != UNREACHABLE for finding in findings):
        checks = (
            ("metrics", check_counters),
            ("transports used", partial(check_handoffs, clock=clock)),
            ("alerts", check_alerts),
        )
        probes = [_fleet_probe(name, check, gateway) for name, check in checks]
        findings += run_probes(probes, host, clock)
    return make_report(gateway.url, findings, clock.now() - started)


def _fleet_probe(name: str, check: Callable[[Gateway], list[Finding]], gateway: Gateway) -> Probe:
    level = Level.PROBLEM if name == UNREACHABLE else Level.WARNING
    return Probe(Area.FLEET, name, lambda _host: check(gateway), level, FLEET_TIMEOUT_S)


def make_report(subject: str, findings: Sequence[Finding], duration_s: float) -> Report:
    """Findings in the order of their areas, within an area as they came; each text one line."""
    order = {area: place for place, area in enumerate(Area)}
    ordered = sorted(map(make_printable, findings), key=lambda finding: order[finding.area])
    return Report(
        baton=__version__,
        subject=subject,
        duration_s=round(duration_s, 3),
        findings=tuple(ordered),
    )


def _tier_probes(store: StoreSection) -> list[Probe]:
    return [
        Probe(
            Area.STORE,
            kind,
            partial(check_tier, kind, store.options.get(kind, {})),
            Level.WARNING,
            STORE_TIMEOUT_S,
        )
        for kind in store.tiers
    ]


def _transport_probes(chosen: ChosenTransports) -> list[Probe]:
    installed = TRANSPORT_KINDS.kinds()
    unknown = [kind for kind in chosen.kinds if kind not in installed]
    others = [kind for kind in installed if kind not in chosen.kinds]
    return [
        Probe(
            Area.TRANSPORTS,
            kind,
            partial(check_transport, kind, chosen),
            failure_level(kind, chosen),
            TRANSPORT_TIMEOUT_S,
        )
        for kind in (*(k for k in chosen.kinds if k not in unknown), *unknown, *others)
    ]


MAX_COLUMNS: Final = 100
STYLES: Final = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.WARNING: "yellow",
    Level.PROBLEM: "bold red",
}


def print_report(report: Report, file: TextIO) -> None:
    """One block for each area; the reason and the fix only where there is one."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    console = Console(file=file, highlight=False, markup=False, emoji=False, width=width)
    console.print(Text(f"baton {report.baton} on {report.subject}", style="bold"))
    # One width for all blocks, so that the columns of the whole report are aligned.
    name_width = max((len(finding.name) for finding in report.findings), default=0)
    for area, findings in groupby(report.findings, key=lambda finding: finding.area):
        console.print()
        console.print(Text(str(area), style="bold"))
        console.print(_block(findings, name_width))
    console.print()
    console.print(_summary(report))


def _block(findings: Iterable[Finding], name_width: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=max(map(len, Level)) + 2, no_wrap=True)
    table.add_column(width=name_width, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        table.add_row(
            Text(f"  {finding.level}", style=STYLES[finding.level]),
            finding.name,
            _describe(finding),
        )
    return table


def _describe(finding: Finding) -> Text:
    text = Text(finding.found)
    if finding.level is not Level.OK:
        text.append(f"\n{finding.why}", style="dim")
    if finding.fix is not None:
        text.append("\nfix: ").append(finding.fix, style="bold")
    return text


def _summary(report: Report) -> Text:
    parts = [
        f"{number} {level}{'s' if number != 1 and level is not Level.OK else ''}"
        for level in reversed(Level)
        if (number := report.count(level))
    ]
    worst = next(level for level in reversed(Level) if report.count(level) or level is Level.OK)
    return Text(f"{', '.join(parts)} in {report.duration_s:.1f} s", style=STYLES[worst])
