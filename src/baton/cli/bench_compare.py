"""`baton bench compare`."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from baton.errors import ConfigError

FAILED = 1


def compare(
    a: Annotated[Path, Parameter(help="A report of `baton bench serve`, or a folder of them.")],
    b: Annotated[Path, Parameter(help="Another, which is compared with it.")],
    /,
    *,
    fail_if_worse: Annotated[
        str | None,
        Parameter(help="Exit with 1 if B is certainly worse by more, such as 5%."),
    ] = None,
    json: Annotated[bool, Parameter(help="Print JSON.", negative="", show_default=False)] = False,
    debug: Annotated[
        bool, Parameter(help="Show where an error arose.", negative="", show_default=False)
    ] = False,
) -> int:
    """Report whether B differs from A, and how certain that is.

    Folders hold several runs of the same; only they show how much runs differ by themselves.
    """
    del debug  # the caller looks at the command line itself
    share = None if fail_if_worse is None else read_share(fail_if_worse, "--fail-if-worse")
    from baton.bench import compare as comparing  # noqa: PLC0415 - too heavy for --help
    from baton.bench.printing import print_comparison  # noqa: PLC0415

    sides = comparing.read_side(a), comparing.read_side(b)
    found = comparing.compare(*sides, comparing.Tolerance(share))
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print_comparison(found, sys.stdout)
    return FAILED if found.is_too_bad else 0


def read_share(text: str, flag: str) -> float:
    """A share of 1, from `5%` or `0.05`.

    Raises:
        ConfigError: it is none.
    """
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{flag} {text}: a share, such as 5% or 0.05")
    return share
