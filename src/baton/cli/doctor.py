"""`baton doctor`."""

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from baton.cli.flags import ConfigFlags


def doctor(
    flags: ConfigFlags | None = None,
    *,
    gateway: Annotated[
        str | None,
        Parameter(help="Look at the fleet behind this gateway (its URL), not at this host."),
    ] = None,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
) -> int:
    """Report what works on this host, what does not and why, and what fixes it."""
    # Here, so that --help imports nothing heavy.
    from baton.clock import MachineClock  # noqa: PLC0415
    from baton.ops.doctor.host import this_host  # noqa: PLC0415
    from baton.ops.doctor.reporting import check_gateway, check_host  # noqa: PLC0415

    config = (flags or ConfigFlags()).resolve().to_config()
    host, clock = this_host(), MachineClock()
    if gateway is not None:
        report = check_gateway(gateway, host, clock)
    else:
        report = check_host(host, config, clock)
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        from baton.ops.doctor.reporting import print_report  # noqa: PLC0415

        print_report(report, sys.stdout)
    return report.exit_code
