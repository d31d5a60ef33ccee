"""`baton bench compare`."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from baton.errors import ConfigError

FAILED = 1


def compare(
    a: Annotated[
        Path, Parameter(help="A report of `baton bench serve`, a folder of them, or results.json.")
    ],
    b: Annotated[Path, Parameter(help="Another, which is held against it.")],
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
    """Say whether B differs from A, and how sure that is.

    Folders hold several runs of the same; only they show how much runs differ by themselves. Of
    two results of `baton bench architectures`: whether they agree within their intervals.
    """
    del debug  # the caller looks at the command line itself
    from baton.bench.agreement.reading import is_architectures  # noqa: PLC0415 - too heavy

    if is_architectures(a) or is_architectures(b):
        if fail_if_worse is not None:
            raise ConfigError("--fail-if-worse: two architecture results agree or do not")
        return _agree(a, b, is_json=json)
    share = None if fail_if_worse is None else read_share(fail_if_worse, "--fail-if-worse")
    from baton.bench.comparing import comparing  # noqa: PLC0415 - too heavy for --help
    from baton.bench.comparing.printing import print_comparison  # noqa: PLC0415
    from baton.bench.comparing.reading import read_side  # noqa: PLC0415

    found = comparing.compare(read_side(a), read_side(b), comparing.Tolerance(share))
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print_comparison(found, sys.stdout)
    return FAILED if found.is_too_bad else 0


def _agree(a: Path, b: Path, *, is_json: bool) -> int:
    from baton.bench.agreement.agreeing import compare_findings  # noqa: PLC0415 - too heavy
    from baton.bench.agreement.printing import print_agreement  # noqa: PLC0415
    from baton.bench.agreement.reading import read_findings  # noqa: PLC0415

    findings = read_findings(a)
    found = compare_findings(findings, read_findings(b))
    if is_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print_agreement(found, findings, sys.stdout)
    return 0 if found.points else FAILED


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
