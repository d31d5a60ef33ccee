"""`baton` whose doctor gives its probes more time: other tests take the cores.

To try a transport starts two processes: with the variable `TRIED_TRANSPORTS` no others are tried
than it names, by forked processes that import nothing. (What hangs is cut: test_isolation.py.)
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from baton.cli.main import main
from baton.ops.doctor import reporting
from baton.ops.doctor.finding import Area
from tests.forking_launcher import ForkingPopen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Clock
    from baton.ops.doctor.finding import Finding, Probe
    from baton.ops.doctor.host import Host

TRIED_TRANSPORTS: Final = "TRIED_TRANSPORTS"
TIMEOUT_S: Final = 120.0
LOADED: Final = (
    "baton.ops.doctor.transport_check",
    "baton.rig.node",
    "baton.transfer.transports.shared",
    "baton.transfer.transports.tcp",
)

_run_probes = reporting.run_probes


def run_probes(probes: Sequence[Probe], host: Host, clock: Clock) -> list[Finding]:
    """As the doctor's, of those that are wanted."""
    tried = os.environ.get(TRIED_TRANSPORTS)
    wanted = [
        replace(probe, timeout_s=TIMEOUT_S)
        for probe in probes
        if tried is None or probe.area is not Area.TRANSPORTS or probe.name in tried.split()
    ]
    return _run_probes(wanted, host, clock)


if __name__ == "__main__":
    reporting.run_probes = run_probes
    if TRIED_TRANSPORTS in os.environ:
        for name in LOADED:
            import_module(name)
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
    main()
