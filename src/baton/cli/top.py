"""`baton top`."""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.ops.gateway_pages import Gateway
    from baton.ops.top.snapshot import FleetSnapshot

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 3600.0


def top(
    *,
    gateway: Annotated[
        str, Parameter(help="The gateway's URL, or its management port's.")
    ] = "http://127.0.0.1:8000",
    interval_s: Annotated[float, Parameter(help="Time between two looks.")] = 1.0,
    once: Annotated[bool, Parameter(help="Print one look as text.")] = False,
    json: Annotated[bool, Parameter(help="Print one look as JSON.")] = False,
    debug: Annotated[bool, Parameter(help="Show where an error arose.")] = False,
) -> int:
    """Show a fleet's workers, latencies, links, alerts and latest requests, until q.

    Keys: q quit, p pause, r look now, s sort workers, Tab or 1 to 6 choose a table, arrows move.
    """
    del debug  # the caller looks at the command line itself
    import asyncio  # noqa: PLC0415 - these are too heavy for --help

    from baton.clock import MachineClock  # noqa: PLC0415
    from baton.ops.gateway_pages import Gateway  # noqa: PLC0415

    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigError(
            f"--interval-s {interval_s:g}: give seconds from {MIN_INTERVAL_S:g} to "
            f"{MAX_INTERVAL_S:g}"
        )
    shown, clock = Gateway.at(gateway, "--gateway"), MachineClock()
    if once or json:
        return _print(asyncio.run(_take(shown, clock)), as_json=json)
    from baton.ops.top.screen import show_fleet  # noqa: PLC0415 - needs textual

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("baton top needs a terminal; `--once` and `--json` print to files")
    return asyncio.run(show_fleet(shown, clock, interval_s))


async def _take(gateway: "Gateway", clock: "Clock") -> "FleetSnapshot":
    from baton.ops.page_reader import open_pages  # noqa: PLC0415
    from baton.ops.top.snapshot import FleetReader  # noqa: PLC0415

    async with open_pages() as pages:
        return await FleetReader(gateway, pages, clock).take()


def _print(snapshot: "FleetSnapshot", *, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(snapshot)).decode())
    else:
        from baton.ops.top.printing import print_snapshot  # noqa: PLC0415

        print_snapshot(snapshot, sys.stdout)
    return 0 if snapshot.is_answered else 1
