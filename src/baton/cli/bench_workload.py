"""The workload of a benchmark or a replay: its flags, and the requests that they describe."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from baton.cli.bench import read_share
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.workloads.requests import Workload

WORKLOAD = Group("Workload", sort_key=1)
GENERATED = ("input_len", "output_len", "prefixes", "prefix_len", "turns", "pause")
RECORDED = ("trace_format", "speed", "divide_lengths", "max_broken")


@Parameter(name="*", group=WORKLOAD)
@dataclass(frozen=True, kw_only=True)
class ShapeFlags:
    """The shape of what is asked."""

    workload: Annotated[
        str,
        Parameter(
            help="prefill-heavy (2048 tokens in, 32 out), balanced (512, 128), decode-heavy "
            "(128, 512), fixed, shared-prefix or multi-turn."
        ),
    ] = "balanced"
    input_len: Annotated[int | None, Parameter(help="Tokens of a prompt (its own part).")] = None
    output_len: Annotated[int | None, Parameter(help="Tokens of an answer.")] = None
    prefixes: Annotated[int | None, Parameter(help="shared-prefix: how many [default: 8].")] = None
    prefix_len: Annotated[
        int | None,
        Parameter(
            help="Tokens of a shared prefix [default: 1024], or of a conversation's beginning "
            "[default: 256]."
        ),
    ] = None
    turns: Annotated[int | None, Parameter(help="multi-turn: how many [default: 4].")] = None
    pause: Annotated[
        float | None, Parameter(help="multi-turn: seconds between turns [default: 0].")
    ] = None
    trace_format: Annotated[
        Literal["mooncake", "azure", "openai"] | None,
        Parameter(help="The file's format, where its first line does not show it."),
    ] = None
    speed: Annotated[float, Parameter(help="Plays a trace faster: 2 in half the time.")] = 1.0
    divide_lengths: Annotated[
        int, Parameter(help="Makes a trace's prompts and answers N times shorter.")
    ] = 1
    max_broken: Annotated[str, Parameter(help="Share of a trace's lines that may be broken.")] = (
        "1%"
    )


def make_workload(flags: ShapeFlags, trace: Path | None) -> "Workload":
    """A trace file, or what is generated.

    Raises:
        ConfigError: the file cannot be read, or a flag is out of bounds, or of no use.
    """
    from baton.bench.workloads.synthetic import WorkloadOptions, choose_workload  # noqa: PLC0415 - too heavy
    from baton.bench.workloads.traces import TraceFile, read_trace  # noqa: PLC0415

    _refuse_unused(flags, trace)
    if trace is not None:
        if not 0 < flags.speed < float("inf"):
            raise ConfigError("--speed: above 0")
        if flags.divide_lengths < 1:
            raise ConfigError("--divide-lengths: 1 or more")
        share = read_share(flags.max_broken, "--max-broken")
        file = TraceFile(trace, flags.trace_format, flags.speed, share, flags.divide_lengths)
        return read_trace(file)
    options = WorkloadOptions(
        num_input_tokens=flags.input_len,
        num_output_tokens=flags.output_len,
        num_prefixes=flags.prefixes,
        num_prefix_tokens=flags.prefix_len,
        num_turns=flags.turns,
        pause_s=flags.pause,
    )
    return choose_workload(flags.workload, options)


def _refuse_unused(flags: ShapeFlags, trace: Path | None) -> None:
    """Check that what is generated has no flags of a trace, nor the reverse."""
    unused = RECORDED if trace is None else GENERATED
    given = [
        each.name
        for each in fields(flags)
        if each.name in unused and getattr(flags, each.name) != each.default
    ]
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        what = "without a trace" if unused is GENERATED else "for a trace"
        raise ConfigError(f"{named}: only {what}")
