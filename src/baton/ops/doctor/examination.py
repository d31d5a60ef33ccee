"""Which probes there are; a host → a report, a gateway → a report."""

from __future__ import annotations

import platform
from functools import partial
from typing import TYPE_CHECKING, Final

from baton import __version__
from baton.ops.doctor.devices import look_at_dax, look_at_gpus, look_at_rdma
from baton.ops.doctor.finding import Area, Finding, Level, Report, make_printable
from baton.ops.doctor.fleet import (
    UNREACHABLE,
    Gateway,
    look_at_counters,
    look_at_handoffs,
    look_at_readiness,
)
from baton.ops.doctor.isolation import run_probes
from baton.ops.doctor.kernel_trials import try_memfd, try_proof_of_death, try_reading_memory
from baton.ops.doctor.limits import look_at_locked_memory, look_at_open_files
from baton.ops.doctor.machine import (
    look_at_container,
    look_at_kernel,
    look_at_numa,
    look_at_processors,
)
from baton.ops.doctor.memory import (
    look_at_huge_pages,
    look_at_memory,
    look_at_overcommit,
    look_at_shm,
)
from baton.ops.doctor.network import look_at_interfaces, look_at_socket_buffers
from baton.ops.doctor.probe import Probe
from baton.ops.doctor.transports import (
    ChosenTransports,
    failure_level,
    look_at_path,
    look_at_transport,
)
from baton.ops.doctor.versions import (
    look_at_engine,
    look_at_libraries,
    look_at_packages,
    look_at_python,
)
from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.clock import Clock
    from baton.ops.doctor.host import Host

TRANSPORT_TIMEOUT_S: Final = 15.0
GPU_TIMEOUT_S: Final = 9.0
FLEET_TIMEOUT_S: Final = 8.0
TRANSPORT_KINDS: Final[Registry[object]] = Registry("baton.transports")
"""Only for the names: the real registry imports numpy."""

RECORDED: Final = (
    Probe(Area.MACHINE, "kernel", look_at_kernel, Level.NOTE),
    Probe(Area.MACHINE, "processors", look_at_processors, Level.NOTE),
    Probe(Area.MACHINE, "numa", look_at_numa, Level.NOTE),
    Probe(Area.MACHINE, "container", look_at_container, Level.NOTE),
    Probe(Area.DEVICES, "GPU", look_at_gpus, Level.WARNING, GPU_TIMEOUT_S),
    Probe(Area.DEVICES, "RDMA", look_at_rdma, Level.NOTE),
    Probe(Area.DEVICES, "DAX", look_at_dax, Level.NOTE),
    Probe(Area.NETWORK, "NIC", look_at_interfaces, Level.NOTE),
    Probe(Area.NETWORK, "socket buffers", look_at_socket_buffers, Level.NOTE),
    Probe(Area.MEMORY, "memory", look_at_memory, Level.NOTE),
    Probe(Area.MEMORY, "/dev/shm", look_at_shm, Level.WARNING),  # noqa: S108
    Probe(Area.MEMORY, "huge pages", look_at_huge_pages, Level.NOTE),
    Probe(Area.MEMORY, "overcommit", look_at_overcommit, Level.NOTE),
    Probe(Area.LIMITS, "open files", look_at_open_files, Level.NOTE),
    Probe(Area.LIMITS, "locked memory", look_at_locked_memory, Level.NOTE),
    Probe(Area.VERSIONS, "python", look_at_python, Level.NOTE),
    Probe(Area.VERSIONS, "packages", look_at_packages, Level.NOTE),
    Probe(Area.VERSIONS, "libraries", look_at_libraries, Level.NOTE),
)
"""What is read from files, programs and package metadata: works on a recorded tree too."""

TRIED: Final = (
    Probe(Area.KERNEL, "memfd", try_memfd, Level.WARNING),
    Probe(Area.KERNEL, "pidfd", try_proof_of_death, Level.WARNING),
    Probe(Area.KERNEL, "CMA", try_reading_memory, Level.NOTE),
)
"""What is tried on the machine that this process runs on."""

FLEET: Final = (
    ("metrics", look_at_counters),
    ("transports used", look_at_handoffs),
)
"""What is asked of a gateway that answers."""


def examine_host(host: Host, engine: str, chosen: ChosenTransports, clock: Clock) -> Report:
    """Look at everything here. Takes as long as the slowest probe; starts processes, no thread."""
    started = clock.now()
    engine_probe = Probe(Area.VERSIONS, "engine", partial(look_at_engine, engine), Level.NOTE)
    probes = (*_transport_probes(chosen), *RECORDED, engine_probe, *TRIED)
    findings = run_probes(probes, host, clock)
    return make_report(
        platform.node(), [look_at_path(findings, chosen), *findings], clock.now() - started
    )


def examine_gateway(url: str, host: Host, clock: Clock) -> Report:
    """Look at the fleet behind a gateway.

    Raises:
        ConfigError: this is no gateway's URL.
    """
    started = clock.now()
    gateway = Gateway.at(url)
    findings = run_probes([_fleet_probe(UNREACHABLE, look_at_readiness, gateway)], host, clock)
    if all(finding.name != UNREACHABLE for finding in findings):
        probes = [_fleet_probe(name, look, gateway) for name, look in FLEET]
        findings += run_probes(probes, host, clock)
    return make_report(gateway.url, findings, clock.now() - started)


def _fleet_probe(name: str, look: Callable[[Gateway], list[Finding]], gateway: Gateway) -> Probe:
    level = Level.PROBLEM if name == UNREACHABLE else Level.WARNING
    return Probe(Area.FLEET, name, partial(_ask, look, gateway), level, FLEET_TIMEOUT_S)


def _ask(look: Callable[[Gateway], list[Finding]], gateway: Gateway, _host: Host) -> list[Finding]:
    return look(gateway)


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


def _transport_probes(chosen: ChosenTransports) -> list[Probe]:
    installed = TRANSPORT_KINDS.kinds()
    unknown = [kind for kind in chosen.kinds if kind not in installed]
    others = [kind for kind in installed if kind not in chosen.kinds]
    return [
        Probe(
            Area.TRANSPORTS,
            kind,
            partial(look_at_transport, kind, chosen),
            failure_level(kind, chosen),
            TRANSPORT_TIMEOUT_S,
        )
        for kind in (*(k for k in chosen.kinds if k not in unknown), *unknown, *others)
    ]
