"""`python -m baton.transfer.devices.forget PATH`: begin a device's table of extents anew.

For a device whose table names a lock file that is gone. Extents that somebody
still maps are kept from reuse by nothing afterwards: run it only while no worker uses the device.
"""

from __future__ import annotations

import sys

from baton.errors import ConfigError
from baton.transfer.devices.backing import DeviceOptions
from baton.transfer.devices.extents import forget_table


def main() -> None:
    """Do it to the one path on the command line."""
    if len(sys.argv) != 2:  # noqa: PLR2004 - the program and its one argument
        sys.exit("usage: python -m baton.transfer.devices.forget PATH")
    try:
        forget_table(DeviceOptions(sys.argv[1]))
    except ConfigError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
