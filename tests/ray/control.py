"""One call of a fleet on Ray: `control.py FLEET status|scale|drain|upgrade|down|logs [ARGUMENT]`.

Run on a host of the cluster. Prints JSON for status, lines for all else.
"""

import asyncio
import sys

import msgspec

from baton.errors import BatonError
from baton.launch.fleet import FleetSize
from baton.launch.ray.fleet import BACKEND

NUM_LOG_LINES = 50


async def main(fleet, verb, *arguments):
    async with BACKEND.connect(fleet) as control:
        match verb:
            case "status":
                print(msgspec.json.encode(await control.status()).decode())
                return
            case "scale":
                lines = control.scale(FleetSize(decode=int(arguments[0])))
            case "drain":
                lines = control.drain(arguments[0])
            case "logs":
                lines = first_lines(control.logs(arguments[0], NUM_LOG_LINES))
            case _:
                lines = getattr(control, verb)()
        async for line in lines:
            print(line, flush=True)


async def first_lines(lines):
    """Those that are there already."""
    while True:
        try:
            yield await asyncio.wait_for(anext(lines), 2.0)
        except (TimeoutError, StopAsyncIteration):
            return


try:
    asyncio.run(main(*sys.argv[1:]))
except BatonError as exc:
    sys.exit(f"{type(exc).__name__}: {exc}")
