"""`baton route`."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Group, Parameter

from baton.cli.bench_serve import LOAD
from baton.cli.bench_workload import WORKLOAD, ShapeFlags, make_workload
from baton.cli.exit_codes import INTERRUPTED
from baton.cli.flags import ConfigFlags, read_api_key
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.replay.plan import Arrivals, ReplayPlan
    from baton.bench.workloads.requests import Workload

STDIN = "-"
FLEET = Group("Fleet", sort_key=3)
DEFAULT_POLICIES = ("round_robin", "prefix", "cost")
DEFAULT_REQUESTS = 1000
DEFAULT_CONCURRENCY = 16

app = App(
    name="route",
    help="Explain where requests go, replay traffic under other policies, and fit costs.",
)


@app.command
def explain(  # noqa: PLR0913 - one for each flag
    request: Annotated[
        str | None,
        Parameter(
            help="A file with the body of a completion request; - is standard input.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    *,
    gateway: Annotated[
        str, Parameter(help="The gateway, or its management port.")
    ] = "http://127.0.0.1:8000",
    request_id: Annotated[
        str | None, Parameter(help="Show where this request went, instead.")
    ] = None,
    ttft_ms: Annotated[
        float | None, Parameter(help="The request's target of the time to first token.")
    ] = None,
    tpot_ms: Annotated[
        float | None, Parameter(help="The same of the mean time per output token.")
    ] = None,
    itl_ms: Annotated[
        float | None, Parameter(help="The same of the gaps between tokens, all but 1 %.")
    ] = None,
    api_key_env: Annotated[
        str, Parameter(help="The environment variable that holds the client's key, if any.")
    ] = "OPENAI_API_KEY",
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, Parameter(help="Write a figure to this file (.png, .svg, .pdf).")
    ] = None,
    debug: Annotated[bool, Parameter(help="Show where an error arose.")] = False,
) -> int:
    """Print every candidate for a request with its predicted parts; the request is not served.

    The gateway tokenizes the prompt, finds what its workers have cached of it, and asks its policy.
    """
    del debug  # the caller looks at the command line itself
    if (request is None) == (request_id is None):
        raise ConfigError(
            "give a file with a request's body (- is standard input), or --request-id"
        )
    if plot is not None and request is None:
        raise ConfigError("--plot shows the candidates for a request's body, not a past request")
    if request is None and {ttft_ms, tpot_ms, itl_ms} != {None}:
        raise ConfigError("targets go with a request's body; a past request had its own")
    # Here, so that --help imports nothing heavy.
    from baton.bench.charts import check_plot, plot_route  # noqa: PLC0415
    from baton.gateway.targets import ITL_HEADER, TPOT_HEADER, TTFT_HEADER  # noqa: PLC0415
    from baton.ops.gateway_pages import Gateway  # noqa: PLC0415
    from baton.ops.route import (  # noqa: PLC0415
        explain_request,
        find_request,
        print_explanation,
        print_request,
    )

    if plot is not None:
        check_plot(plot)
    shown = Gateway.at(gateway, "--gateway")
    if request_id is not None:
        placed = find_request(shown, request_id)
        if json:
            _print_json(placed)
        else:
            print_request(placed, sys.stdout)
    elif request is not None:
        targets_ms = {TTFT_HEADER: ttft_ms, TPOT_HEADER: tpot_ms, ITL_HEADER: itl_ms}
        explained = explain_request(
            shown, _read_body(request), targets_ms, read_api_key(api_key_env)
        )
        if json:
            _print_json(explained)
        else:
            print_explanation(explained, sys.stdout)
        if plot is not None:
            plot_route(explained, plot)
    return 0


def _read_body(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read the request {name}: {exc.strerror}") from exc


def _print_json(found: msgspec.Struct) -> None:
    print(msgspec.json.format(msgspec.json.encode(found)).decode())


@Parameter(name="*", group=WORKLOAD)
@dataclass(frozen=True, kw_only=True)
class ReplayFlags(ShapeFlags):
    """What is replayed without a trace, and how it arrives."""

    workload: Annotated[
        str,
        Parameter(
            help="Without a trace: multi-turn, shared-prefix, prefill-heavy (2048 tokens in, 32 "
            "out), balanced (512, 128), decode-heavy (128, 512) or fixed."
        ),
    ] = "multi-turn"
    rate: Annotated[
        float | None, Parameter(help="Sessions that begin in a second.", group=LOAD)
    ] = None
    concurrency: Annotated[
        int | None,
        Parameter(help="Clients at once [default: 16 without arrival times].", group=LOAD),
    ] = None
    requests: Annotated[
        int | None,
        Parameter(help="How many [default: a trace's, else 1000].", group=LOAD),
    ] = None
    ttft_s: Annotated[
        float | None,
        Parameter(
            help="A good request's first token is there by then [default: that of "
            "router.options.cost, 2].",
            group=LOAD,
        ),
    ] = None
    tpot_s: Annotated[
        float | None,
        Parameter(
            help="A good request's tokens take no longer [default: that of router.options.cost, "
            "0.1].",
            group=LOAD,
        ),
    ] = None
    itl_s: Annotated[
        float | None,
        Parameter(
            help="Target of each request: all but 1 % of the gaps are no longer.", group=LOAD
        ),
    ] = None
    seed: Annotated[
        int, Parameter(help="Of arrivals and prompts: the same one, the same result.", group=LOAD)
    ] = 0


@Parameter(name="*", group=FLEET)
@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """The simulated workers."""

    workers: Annotated[int | None, Parameter(help="How many [default: 4].")] = None
    roles: Annotated[str, Parameter(help="both, or prefill and decode workers such as 2p2d.")] = (
        "both"
    )
    gateways: Annotated[int, Parameter(help="Gateways, which clients use in turns.")] = 1
    policy: Annotated[
        list[str], Parameter(help="A policy; may be repeated [default: round_robin, prefix, cost].")
    ] = field(default_factory=list)
    costs: Annotated[
        Path | None,
        Parameter(
            help="Costs of a worker: a TOML or JSON file, one of `baton route costs` or "
            "router.costs_file, or a gateway's saved /debug/workers."
        ),
    ] = None
    cost: Annotated[
        list[str], Parameter(help="One of them, such as prefill_token_s=1e-4; may be repeated.")
    ] = field(default_factory=list)


@app.command
def replay(
    trace: Annotated[
        Path | None,
        Parameter(help="A file: Mooncake JSONL, Azure CSV or OpenAI batch JSONL."),
    ] = None,
    *,
    load: ReplayFlags | None = None,
    fleet: FleetFlags | None = None,
    config: ConfigFlags | None = None,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
) -> int:
    """Replay a trace, or a generated load, under several policies, in virtual time.

    Workers are simulated; policies, load, prefixes and learned costs are the router's own code.
    Options of policies are those of the configuration: --set router.options.cost.ttft_s=1.0
    """
    # Here, so that --help imports nothing heavy.
    from baton.bench.replay.printing import print_replay  # noqa: PLC0415
    from baton.bench.replay.runner import run_replay  # noqa: PLC0415

    plan = _plan(trace, load or ReplayFlags(), fleet or FleetFlags(), config or ConfigFlags())
    report = run_replay(plan)
    if json:
        _print_json(report)
    else:
        print_replay(report, sys.stdout)
    return INTERRUPTED if report.is_partial else 0


@app.command
def costs(
    *results: Path,
    out: Annotated[Path, Parameter(help="Write the costs to this file.")],
    workers: Annotated[int, Parameter(help="Workers that shared the load of each result.")] = 1,
    link: Annotated[
        list[str] | None,
        Parameter(
            help="A result of `baton bench link` between workers at this distance, as "
            "DISTANCE=FILE (same_rack=rack.json); may be repeated."
        ),
    ] = None,
    kv_of: Annotated[
        str | None,
        Parameter(help="With --link, whose KV: a config.json, a folder with one, or a name."),
    ] = None,
) -> int:
    """Fit the costs that a gateway begins with (router.costs_file) to results of benchmarks.

    RESULTS are reports of `baton bench serve --output`, or folders of them: of several lengths of
    prompts, at --concurrency 1 and at others.
    """
    # Here, so that --help imports nothing heavy.
    from baton.bench.files import check_writable, save_result  # noqa: PLC0415
    from baton.bench.printing import print_fitted_costs  # noqa: PLC0415
    from baton.bench.route_costs import (  # noqa: PLC0415
        fit_costs,
        read_measured_links,
        read_reports,
    )
    from baton.gateway.learned_costs import KeptFile  # noqa: PLC0415

    if not results:
        raise ConfigError("name results of `baton bench serve --output`")
    if workers < 1:
        raise ConfigError("--workers: a number above 0")
    check_writable(out)
    links = read_measured_links(link or [], kv_of)
    fitted = {
        model: fit_costs(reports, workers, links)
        for model, reports in read_reports(results).items()
    }
    save_result(out, KeptFile({model: each.kept for model, each in fitted.items()}))
    print_fitted_costs(fitted, sys.stdout)
    return 0


def _plan(
    trace: Path | None, load: ReplayFlags, fleet: FleetFlags, flags: ConfigFlags
) -> "ReplayPlan":
    from baton.bench.replay.costs import read_costs  # noqa: PLC0415 - too heavy for --help
    from baton.bench.replay.plan import (  # noqa: PLC0415
        PolicyChoice,
        ReplayPlan,
        check_gateways,
        make_workers,
    )
    from baton.router.cost_parts import CostOptions  # noqa: PLC0415

    _check(load)
    config = flags.resolve().to_config()
    configured = config.router.options
    given = {"ttft_s": load.ttft_s, "tpot_s": load.tpot_s}
    cost = configured.get("cost", {}) | {key: s for key, s in given.items() if s is not None}
    try:
        limits = msgspec.convert(cost, CostOptions)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"router.options.cost: {exc}") from exc
    options = configured | {"cost": cost | {"ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s}}
    workload = make_workload(load, trace)
    return ReplayPlan(
        workload=workload,
        arrivals=_arrivals(load, workload),
        num_requests=load.requests or workload.num_requests or DEFAULT_REQUESTS,
        workers=make_workers(fleet.roles, fleet.workers),
        num_gateways=check_gateways(fleet.gateways),
        policies=tuple(
            PolicyChoice(name, options.get(name, {})) for name in fleet.policy or DEFAULT_POLICIES
        ),
        mode=config.gateway.mode,
        costs=read_costs(fleet.costs, fleet.cost, workload.block_tokens),
        ttft_s=limits.ttft_s,
        tpot_s=limits.tpot_s,
        itl_s=load.itl_s,
        seed=load.seed,
    )


def _arrivals(load: ReplayFlags, workload: "Workload") -> "Arrivals":
    from baton.bench.replay.plan import Clients, Rate, Recorded  # noqa: PLC0415 - too heavy

    if load.rate is not None:
        if load.concurrency is not None:
            raise ConfigError("--rate is an open loop and --concurrency a closed one: give one")
        return Rate(load.rate)
    if load.concurrency is None and workload.has_arrivals:
        return Recorded()
    return Clients(load.concurrency or DEFAULT_CONCURRENCY)


def _check(load: ReplayFlags) -> None:
    above_zero = {
        "--rate": load.rate,
        "--ttft-s": load.ttft_s,
        "--tpot-s": load.tpot_s,
        "--itl-s": load.itl_s,
        "--concurrency": load.concurrency,
        "--requests": load.requests,
    }
    for flag, value in above_zero.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag}: a number above 0")
    if not -(2**63) <= load.seed < 2**63:
        raise ConfigError("--seed: a number of 64 bits")
