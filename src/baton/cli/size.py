"""`baton size`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter

from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.kv.sizing.sizes import Terms


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """Of what, how kept, and over which link."""

    model: Annotated[
        str | None,
        Parameter(help="A config.json, a folder with one, or a name (--list shows them)."),
    ] = None
    tokens: Annotated[int, Parameter(help="Tokens of one request.")] = 2048
    kv_dtype: Annotated[
        Literal[
            "float32",
            "float16",
            "bfloat16",
            "fp8",
            "fp8_token",
            "int8_token",
            "int4_token",
            "fp8_ds_mla",
        ]
        | None,
        Parameter(help="How KV is kept [default: as the model's own numbers]."),
    ] = None
    tp: Annotated[int, Parameter(help="Tensor-parallel workers.")] = 1
    block_size: Annotated[int, Parameter(help="Tokens of a block.")] = 16
    link: Annotated[
        Path | None,
        Parameter(help="What `baton bench link --json` printed: times on those links too."),
    ] = None
    list_: Annotated[bool, Parameter(name="--list", help="The names that ship.")] = False
    json: Annotated[bool, Parameter(help="Print JSON.")] = False
    debug: Annotated[bool, Parameter(help="Show where an error arose.")] = False

    def terms(self) -> "Terms":
        """What the size is asked for."""
        from baton.kv.sizing.sizes import Terms  # noqa: PLC0415 - too heavy for --help

        return Terms(self.tokens, self.kv_dtype, self.tp, self.block_size)


def size(*, flags: SizeFlags | None = None) -> int:
    """How large a request's KV is, and how long it takes to move, by any link.

    Any Hugging Face config.json: GQA, MLA, windows, hybrids with states, quantised KV.
    """
    flags = flags or SizeFlags()
    from baton.planner.links import read_links  # noqa: PLC0415 - too heavy for --help
    from baton.planner.printing import print_sizes  # noqa: PLC0415
    from baton.planner.sizing import (  # noqa: PLC0415
        make_report,
        shipped_names,
    )

    if flags.list_:
        print("\n".join(shipped_names()))
        return 0
    if flags.model is None:
        raise ConfigError(f"--model: a config.json, or one of {', '.join(shipped_names())}")
    measured = () if flags.link is None else read_links(flags.link)
    report = make_report(flags.model, flags.terms(), measured)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_sizes(report, sys.stdout)
    return 0
