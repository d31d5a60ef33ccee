"""`baton bench serve`."""

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Group, Parameter

from baton.cli.bench_workload import WORKLOAD, ShapeFlags, make_workload
from baton.cli.exit_codes import FAILED, INTERRUPTED
from baton.cli.flags import read_api_key
from baton.clock import MachineClock
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.load.job import Job, Report
    from baton.bench.load.plan import Load, LoadPlan
    from baton.bench.load.server_check import RequestOptions
    from baton.bench.workloads.requests import Workload

DEFAULT_REQUESTS = 100
LOAD = Group("Load", sort_key=2)
RESULTS = Group("Results", sort_key=3)
MOST_AT_ONCE = 10_000


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """Which server, and how it is asked."""

    url: Annotated[str, Parameter(help="The server, such as http://127.0.0.1:8000.")]
    model: Annotated[
        str | None, Parameter(help="The model's name, where the server has several.")
    ] = None
    endpoint: Annotated[Literal["completions", "chat"], Parameter(help="Which API.")] = (
        "completions"
    )
    prompts: Annotated[
        Literal["auto", "tokens", "words"],
        Parameter(help="Token ids, or words (calibrated with the server's own counts)."),
    ] = "auto"
    token_ids: Annotated[
        str | None,
        Parameter(help="Prompts' token ids, as FIRST-LAST [default: 256-2047]."),
    ] = None
    api_key_env: Annotated[
        str, Parameter(help="The environment variable that holds the server's key.")
    ] = "OPENAI_API_KEY"


@Parameter(name="*", group=WORKLOAD)
@dataclass(frozen=True, kw_only=True)
class WorkloadFlags(ShapeFlags):
    """What is asked."""

    trace: Annotated[
        Path | None, Parameter(help="A file: Mooncake JSONL, Azure CSV or OpenAI batch JSONL.")
    ] = None
    seed: Annotated[
        str | None, Parameter(help="Any text; the same one, the same prompts [default: new].")
    ] = None


@Parameter(name="*", group=LOAD)
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How much, and until when."""

    concurrency: Annotated[
        int | None, Parameter(help="Closed loop: this many at once [default: 1].")
    ] = None
    rate: Annotated[
        float | None,
        Parameter(help="Open loop: this many requests (multi-turn: conversations) a second."),
    ] = None
    arrival: Annotated[
        Literal["poisson", "constant", "burst"], Parameter(help="Open loop: how.")
    ] = "poisson"
    burst: Annotated[
        int | None, Parameter(help="--arrival burst: this many together [default: 8].")
    ] = None
    max_in_flight: Annotated[
        int | None, Parameter(help="Open loop and traces: no more at once.")
    ] = None
    requests: Annotated[
        int | None, Parameter(help="Send this many [default: 100, all of a trace].")
    ] = None
    duration: Annotated[float | None, Parameter(help="Send for this many seconds.")] = None
    warm_up: Annotated[
        int | None, Parameter(help="Requests before, not counted [default: as many as at once].")
    ] = None
    timeout: Annotated[float, Parameter(help="Seconds that a request may take.")] = 300.0
    drain: Annotated[
        float | None,
        Parameter(help="--duration: seconds for what runs when it is over [default: 30]."),
    ] = None


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """What comes of it."""

    goodput: Annotated[
        tuple[str, ...],
        Parameter(help="A bound in ms, as ttft:500, tpot:50 or e2e:10000; may be repeated."),
    ] = ()
    output: Annotated[Path | None, Parameter(help="Write the report to this file, as JSON.")] = None
    records: Annotated[
        Path | None, Parameter(help="Write each request to this file, as it ends (JSON lines).")
    ] = None
    json: Annotated[bool, Parameter(help="Print the report as JSON.")] = False


def serve(
    *,
    target: TargetFlags,
    workload: WorkloadFlags | None = None,
    load: LoadFlags | None = None,
    results: ResultFlags | None = None,
    debug: Annotated[bool, Parameter(help="Show where an error arose.")] = False,
) -> int:
    """Load any server that speaks OpenAI's API, and measure its answers.

    docs/bench-serve.md defines each figure.
    """
    del debug  # the caller looks at the command line itself
    results = results or ResultFlags()
    job = make_job(target, workload or WorkloadFlags(), load or LoadFlags(), results)
    from baton.bench.files import open_manifest  # noqa: PLC0415
    from baton.bench.load.job import run_job  # noqa: PLC0415 - too heavy for --help

    clock = MachineClock()
    report = run_job(job, open_manifest(sys.argv[1:], clock), clock)
    _deliver(report, results)
    if job.lines is not None and job.lines.problem is not None:
        print(f"baton: {job.lines.problem}", file=sys.stderr)
        return FAILED
    if report.is_partial and report.stopped is None:
        return INTERRUPTED
    figures = report.figures
    is_whole = not (report.is_partial or figures.num_failed or figures.num_cut)
    return 0 if is_whole and figures.num_complete else FAILED


def make_job(
    target: TargetFlags, workload: WorkloadFlags, load: LoadFlags, results: ResultFlags
) -> "Job":
    """The run that the flags describe.

    Raises:
        ConfigError: they are invalid.
    """
    from baton.bench.files import LineFile, check_writable  # noqa: PLC0415
    from baton.bench.load.client import open_target  # noqa: PLC0415
    from baton.bench.load.job import Job  # noqa: PLC0415
    from baton.bench.load.records import parse_slo  # noqa: PLC0415 - too heavy for --help

    if results.output is not None:
        check_writable(results.output)
    opened = open_target(target.url, read_api_key(target.api_key_env))
    asked = make_workload(workload, workload.trace)
    return Job(
        opened,
        _request_options(target),
        asked,
        workload.seed or secrets.token_hex(4),
        _plan(load, asked),
        parse_slo(results.goodput),
        None if results.records is None else LineFile(results.records),
    )


def _deliver(report: "Report", results: ResultFlags) -> None:
    from baton.bench.files import save_result  # noqa: PLC0415
    from baton.bench.printing import print_load_report  # noqa: PLC0415 - too heavy for --help

    try:  # before it is printed: a reader that leaves early (`| head`) ends the printing
        if results.output is not None:
            save_result(results.output, report)
            print(f"baton: the report is in {results.output}", file=sys.stderr)
    finally:
        if results.json:
            print(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            print_load_report(report, sys.stdout)


def _request_options(flags: TargetFlags) -> "RequestOptions":
    from baton.bench.load.server_check import RequestOptions  # noqa: PLC0415 - too heavy for --help
    from baton.bench.workloads.synthetic import TokenIds  # noqa: PLC0415

    ids = TokenIds()
    if flags.token_ids is not None:
        first, _, last = flags.token_ids.partition("-")
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < 2**31):
            raise ConfigError(f"--token-ids {flags.token_ids}: write FIRST-LAST, such as 256-2047")
        ids = TokenIds(int(first), int(last) + 1)
    return RequestOptions(flags.model, flags.endpoint, flags.prompts, ids)


def _plan(flags: LoadFlags, workload: "Workload") -> "LoadPlan":
    from baton.bench.load.plan import Limits, LoadPlan  # noqa: PLC0415 - too heavy for --help

    _check(flags)
    load = _load(flags, workload)
    num_requests = flags.requests
    if num_requests is None and flags.duration is None:
        num_requests = workload.num_requests or DEFAULT_REQUESTS
    drain_s = flags.drain
    if drain_s is None:
        drain_s = flags.timeout if flags.duration is None else 30.0
    warm_up = flags.concurrency or 1 if flags.warm_up is None else flags.warm_up
    return LoadPlan(load, Limits(num_requests, flags.duration, drain_s, flags.timeout), warm_up)


def _load(flags: LoadFlags, workload: "Workload") -> "Load":
    from baton.bench.load.plan import Closed, Open, Replay  # noqa: PLC0415 - too heavy for --help

    if flags.rate is not None:
        if flags.concurrency is not None:
            raise ConfigError(
                "--rate is an open loop and --concurrency a closed one: give one of them "
                "(--max-in-flight bounds an open loop)"
            )
        burst = flags.burst or 8 if flags.arrival == "burst" else 1
        return Open(flags.rate, flags.arrival, burst, flags.max_in_flight)
    if flags.concurrency is None and workload.has_arrivals:
        return Replay(flags.max_in_flight)
    if flags.max_in_flight is not None:
        raise ConfigError("--max-in-flight is for an open loop: give --rate too")
    return Closed(flags.concurrency or 1)


def _check(flags: LoadFlags) -> None:
    counts = {
        "--concurrency": flags.concurrency,
        "--max-in-flight": flags.max_in_flight,
        "--burst": flags.burst,
    }
    for flag, number in counts.items():
        if number is not None and not 1 <= number <= MOST_AT_ONCE:
            raise ConfigError(f"{flag}: {number} is not in [1, {MOST_AT_ONCE}]")
    above_zero = {
        "--rate": flags.rate,
        "--requests": flags.requests,
        "--duration": flags.duration,
        "--timeout": flags.timeout,
    }
    for flag, value in above_zero.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag}: a number above 0")
    for flag, value in {"--warm-up": flags.warm_up, "--drain": flags.drain}.items():
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{flag}: a number, not below 0")
    if flags.arrival != "poisson" and flags.rate is None:
        raise ConfigError(f"--arrival {flags.arrival} is for an open loop: give --rate too")
    if flags.drain is not None and flags.duration is None:
        raise ConfigError("--drain is for what runs when --duration is over: give that too")
    if flags.burst is not None and flags.arrival != "burst":
        raise ConfigError("--burst is for --arrival burst")
