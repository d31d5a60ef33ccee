"""`baton status`, `logs`, `scale`, `drain`, `upgrade`, `down`: control of a fleet that runs."""

# Annotations are read at run time here: cyclopts parses by them.
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from baton.cli.flags import LOCAL, Fleet, On
from baton.launch.fleet import DEFAULT_FLEET, FleetControl, FleetMember, FleetStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

NUM_LINES = 100
WIDE_COLUMNS = 160
"""Of a table that is written to a file or another program."""
T = TypeVar("T")


def status(
    *,
    fleet: Fleet = DEFAULT_FLEET,
    on: On = LOCAL,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
) -> int:
    """Show each process of a fleet: its state, its address, for how long it has run."""

    async def ask(control: "FleetControl") -> "FleetStatus":
        return await control.status()

    found = _run(fleet, on, ask)
    if json:
        import msgspec  # noqa: PLC0415 - too heavy for --help

        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _print_status(found)
    is_well = all(member.state in {"ready", "draining"} for member in found.members)
    return 0 if is_well else 1


def logs(
    name: Annotated[str, Parameter(help="A process (baton status), or launcher.")],
    *,
    lines: Annotated[
        int, Parameter(name=["--lines", "-n"], help="How many of the last lines.")
    ] = NUM_LINES,
    follow: Annotated[
        bool,
        Parameter(name=["--follow", "-f"], help="Go on with the lines that come, until Ctrl-C."),
    ] = False,
    fleet: Fleet = DEFAULT_FLEET,
    on: On = LOCAL,
) -> int:
    """Print what a process of a fleet wrote; on this machine of a fleet that has ended, too."""
    return _print_lines(fleet, on, lambda control: control.logs(name, max(0, lines), follow=follow))


def scale(
    *,
    prefill: Annotated[int | None, Parameter(help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, Parameter(help="Number of decode workers.")] = None,
    workers: Annotated[int | None, Parameter(help="Number of workers that do both parts.")] = None,
    fleet: Fleet = DEFAULT_FLEET,
    on: On = LOCAL,
) -> int:
    """Start or drain workers until there are so many; no request fails."""
    from baton.errors import ConfigError  # noqa: PLC0415
    from baton.launch.fleet import MAX_COUNT, FleetSize  # noqa: PLC0415

    for flag, count in (("--prefill", prefill), ("--decode", decode), ("--workers", workers)):
        if count is not None and not 0 <= count <= MAX_COUNT:
            raise ConfigError(f"{flag} {count}: give a number from 0 to {MAX_COUNT}")
    size = FleetSize(prefill=prefill, decode=decode, both=workers)
    if size == FleetSize():
        raise ConfigError("how many workers? Give --prefill, --decode or --workers a number")
    return _print_lines(fleet, on, lambda control: control.scale(size))


def drain(
    worker: Annotated[str, Parameter(help="A worker's name (baton status).")],
    *,
    fleet: Fleet = DEFAULT_FLEET,
    on: On = LOCAL,
) -> int:
    """Take a worker out: its streams move to others, it ends, and is not started again."""
    return _print_lines(fleet, on, lambda control: control.drain(worker))


def upgrade(*, fleet: Fleet = DEFAULT_FLEET, on: On = LOCAL) -> int:
    """Replace each process by one with the installed code and the present configuration file.

    One after the other; no request fails. What does not start stops the upgrade, and the processes
    that were not replaced serve on.
    """
    return _print_lines(fleet, on, lambda control: control.upgrade())


def down(*, fleet: Fleet = DEFAULT_FLEET, on: On = LOCAL) -> int:
    """Drain and end a fleet."""
    return _print_lines(fleet, on, lambda control: control.down())


def _print_lines(fleet: str, on: str, begin: "Callable[[FleetControl], AsyncIterator[str]]") -> int:
    async def run(control: "FleetControl") -> int:
        async for line in begin(control):
            print(line, flush=True)
        return 0

    return _run(fleet, on, run)


def _run(fleet: str, on: str, ask: "Callable[[FleetControl], Coroutine[Any, Any, T]]") -> T:
    import asyncio  # noqa: PLC0415 - too heavy for --help

    from baton.launch.fleet import find_backend  # noqa: PLC0415

    async def run() -> T:
        async with find_backend(on).connect(fleet) as control:
            return await ask(control)

    return asyncio.run(run())


def _print_status(found: "FleetStatus") -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from baton.ops.doctor.finding import one_line  # noqa: PLC0415

    table = Table(title=f"fleet {found.fleet} ({found.backend}, baton {found.version})")
    for column in ("process", "role", "state", "address", "pid", "up", "restarts", "reason"):
        table.add_column(column)
    for member in found.members:
        table.add_row(*map(one_line, _cells(member)))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDE_COLUMNS
    console.print(table)


def _cells(member: "FleetMember") -> tuple[str, ...]:
    return (
        member.name,
        member.role,
        member.state,
        member.url or member.host,
        "" if member.pid is None else str(member.pid),
        "" if member.up_s is None else _duration(member.up_s),
        str(member.num_restarts),
        member.reason,
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
