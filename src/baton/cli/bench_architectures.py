"""`baton bench architectures`: its flags."""

import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from baton.cli.bench_workload import ShapeFlags, make_workload
from baton.cli.exit_codes import FAILED, INTERRUPTED
from baton.cli.flags import ConfigFlags, Engine, Model, Transport
from baton.clock import MachineClock
from baton.config.environment import read_environment
from baton.config.resolve import CommandLine, Resolved, resolve
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.bench.architectures.plan import Configuration, Effort, Peer, Plan
    from baton.bench.architectures.runner import BenchmarkJob
    from baton.bench.architectures.trial import ServerPlan
    from baton.bench.load.records import Slo
    from baton.bench.workloads.requests import Workload
    from baton.launch.plan import LaunchPlan


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerFlags(ConfigFlags):
    """The servers of every configuration."""

    model: Model = None
    engine: Engine = None
    transport: Transport = None
    workers: Annotated[int, Parameter(help="How many workers each configuration may use.")] = 2
    arm: Annotated[
        tuple[str, ...],
        Parameter(help="Only this configuration (single, replicated, 1P1D, …); may be repeated."),
    ] = ()
    peers: Annotated[
        bool, Parameter(help="With --engine vllm: NixlConnector and vllm-router too, if installed.")
    ] = False

    def plan_launch(self, configuration: "Configuration") -> "LaunchPlan":
        """How Baton's servers start: each worker on its share of the machine's cores.

        Raises:
            ConfigError: the settings ask for something that cannot be started.
        """
        from baton.cli.launching import plan_pinned  # noqa: PLC0415 - too heavy for --help

        return plan_pinned(self._resolve(configuration), self.workers)

    def find_peers(self) -> tuple[tuple["Peer", ...], tuple[str, ...]]:
        """The peers of `--peers` that are installed, and a note on each that is not.

        Raises:
            ConfigError: the engine is not vLLM.
        """
        from baton.bench.architectures.peers.plan import find_missing  # noqa: PLC0415 - heavy
        from baton.bench.architectures.plan import PEERS  # noqa: PLC0415

        if not self.peers:
            return (), ()
        if self.engine != "vllm":
            raise ConfigError("--peers: they are vLLM's; compare them with --engine vllm")
        missing = {peer: find_missing(peer) for peer in PEERS}
        notes = (f"peer {peer} left out: {hint}" for peer, hint in missing.items() if hint)
        return tuple(peer for peer in PEERS if missing[peer] is None), tuple(notes)

    def plan_servers(self, configuration: "Configuration") -> "ServerPlan":
        """How a configuration's servers start, Baton's or a peer's.

        Raises:
            ConfigError: the settings ask for something that cannot be started.
        """
        launch = self.plan_launch(configuration)
        if configuration.peer is None:
            return launch
        from baton.bench.architectures.peers.plan import find_missing, plan_peer  # noqa: PLC0415
        from baton.cli.engine_options import engine_options  # noqa: PLC0415
        from baton.engines.vllm.arguments import find_platform  # noqa: PLC0415

        missing = find_missing(configuration.peer)
        if missing is not None:
            raise ConfigError(f"--arm {configuration.name}: {missing}")
        options = engine_options("vllm", launch.config.engine)
        return plan_peer(configuration, launch, options, find_platform())

    def _resolve(self, configuration: "Configuration") -> Resolved:
        given: dict[str, tuple[str, object]] = {
            "up.prefill": ("--arm", configuration.num_prefill),
            "up.decode": ("--arm", configuration.num_decode or configuration.num_both),
            "gateway.port": ("--arm", 0),
            "router.policy": ("--arm", configuration.policy),
            "trace.ring_size": ("--arm", 8192),
        }
        if self.debug:
            given["log.level"] = ("--debug", "debug")
        assignments = list(self.assignments)
        if configuration.objective is not None:
            assignments.append(f"router.options.cost.objective={configuration.objective}")
        command_line = CommandLine(self.config, dict(self._given()) | given, assignments)
        return resolve(command_line, read_environment())


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkFlags:
    """The workload, its loads, and the number of repetitions."""

    workload: Annotated[
        str,
        Parameter(help="prefill-heavy, balanced, decode-heavy, fixed, shared-prefix, multi-turn."),
    ] = "balanced"
    input_len: Annotated[int | None, Parameter(help="Prompt tokens, other than usual.")] = None
    output_len: Annotated[int | None, Parameter(help="Output tokens, other than usual.")] = None
    trace: Annotated[
        Path | None, Parameter(help="Recorded traffic instead: see docs/bench-serve.md.")
    ] = None
    trace_format: Annotated[
        Literal["mooncake", "azure", "openai"] | None,
        Parameter(help="The trace's format, where its first line does not show it."),
    ] = None
    speed: Annotated[float, Parameter(help="Plays a recorded trace faster: 2 in half.")] = 1.0
    max_broken: Annotated[str, Parameter(help="Share of a trace's lines that may be broken.")] = (
        "1%"
    )
    concurrency: Annotated[
        str | None,
        Parameter(help="Closed loops [default: 1,2,4,8,16,32; with --rate none]."),
    ] = None
    rate: Annotated[
        str | None,
        Parameter(help="Open loops, Poisson: requests a second, as 1,2; of a trace: recorded."),
    ] = None
    duration: Annotated[float, Parameter(help="Seconds that each load lasts.")] = 30.0
    settle: Annotated[
        float,
        Parameter(
            help="Seconds that each closed loop runs before it is measured: adaptive workers need "
            "some."
        ),
    ] = 0.0
    requests: Annotated[
        int | None, Parameter(help="End a load after this many requests, if that is sooner.")
    ] = None
    repetitions: Annotated[int, Parameter(help="How often every configuration is measured.")] = 5
    timeout: Annotated[float, Parameter(help="Seconds that one request may take.")] = 600.0
    seed: Annotated[
        str | None, Parameter(help="Of prompts and order [default: a new one, in the result].")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class VerdictFlags:
    """The SLO, the price, and where results are written."""

    goodput: Annotated[
        tuple[str, ...],
        Parameter(
            help="SLO: ttft:500, tpot:50, e2e:9000 in ms; may be repeated [default: derived]."
        ),
    ] = ()
    cost_per_worker_hour: Annotated[
        float | None, Parameter(help="What one worker costs in an hour: shows cost per token.")
    ] = None
    output: Annotated[
        Path | None, Parameter(help="A new folder for all results [default: baton-arch-DATE].")
    ] = None
    json: Annotated[bool, Parameter(help="Print JSON.")] = False


def architectures(
    servers: ServerFlags | None = None,
    work: WorkFlags | None = None,
    results: VerdictFlags | None = None,
) -> int:
    """Is disaggregation worth it here? Every way to use the workers, on the same cores.

    Writes report.html, results.json, charts and every request's record; prints a verdict.
    """
    servers, work, results = (
        servers or ServerFlags(),
        work or WorkFlags(),
        results or VerdictFlags(),
    )
    job = prepare(servers, work, results)
    from baton.bench.architectures.folder import deliver  # noqa: PLC0415 - heavy
    from baton.bench.architectures.runner import run_benchmark  # noqa: PLC0415

    try:
        findings = run_benchmark(job)
    except KeyboardInterrupt:
        print(f"baton: killed; whole runs are in {job.results.folder}", file=sys.stderr)
        raise
    problem = deliver(findings, job.results, is_json=results.json)
    if problem is not None:
        print(f"baton: {problem}", file=sys.stderr)
    if findings.ended == "interrupted":
        return INTERRUPTED
    return FAILED if findings.is_partial or findings.troubles or problem else 0


def prepare(servers: ServerFlags, work: WorkFlags, results: VerdictFlags) -> "BenchmarkJob":
    """The benchmark that the flags describe.

    Raises:
        ConfigError: they are invalid, or nothing can be written.
    """
    from baton.bench.architectures.folder import create_result_folder  # noqa: PLC0415 - heavy
    from baton.bench.architectures.plan import plan_trials  # noqa: PLC0415
    from baton.bench.architectures.runner import BenchmarkJob  # noqa: PLC0415
    from baton.bench.charts import require_charts  # noqa: PLC0415
    from baton.bench.files import open_manifest  # noqa: PLC0415
    from baton.bench.statistics import require_statistics  # noqa: PLC0415
    from baton.cli.launching import find_launch_key, server_environment  # noqa: PLC0415

    require_charts()
    require_statistics()
    clock = MachineClock()
    manifest = open_manifest(sys.argv[1:], clock)
    plan = _plan(servers, work, results)
    servers = with_limits(servers, plan.slo)
    launches = {each.name: servers.plan_servers(each) for each in plan.configurations}
    config = servers.plan_launch(plan.configurations[0]).config
    plan = replace(plan, engine=config.worker.engine, model=config.worker.model or "demo")
    stamp = manifest.started_at.replace(":", "").replace("-", "")[:15]
    folder = results.output or Path(f"baton-arch-{stamp}")
    return BenchmarkJob(
        plan,
        launches,
        create_result_folder(folder, plan_trials(plan)),
        server_environment(find_launch_key(config)),
        manifest,
        clock,
        notes=servers.find_peers()[1],
    )


def with_limits(servers: ServerFlags, slo: "Slo | None") -> ServerFlags:
    """With the SLO's bounds as the limits of the policy `cost`; a `--set` still wins."""
    if slo is None:
        return servers
    bounds = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    limits = [f"router.options.cost.{key}={s}" for key, s in bounds.items() if s is not None]
    return replace(servers, assignments=[*limits, *servers.assignments])


def _plan(servers: ServerFlags, work: WorkFlags, results: VerdictFlags) -> "Plan":
    from baton.bench.architectures import plan as planning  # noqa: PLC0415 - heavy
    from baton.bench.load.records import parse_slo  # noqa: PLC0415
    from baton.bench.load.server_check import RequestOptions  # noqa: PLC0415

    concurrency = work.concurrency
    if concurrency is None and work.rate is None:
        concurrency = "1,2,4,8,16,32"
    if results.cost_per_worker_hour is not None and not results.cost_per_worker_hour > 0:
        raise ConfigError("--cost-per-worker-hour: a price above 0")
    levels, workload = planning.read_levels(concurrency, work.rate), _workload(work)
    if planning.RECORDED in {level.key for level in levels} and not workload.has_arrivals:
        raise ConfigError(
            "--rate recorded: only traces of Mooncake and Azure have arrival times (--trace)"
        )
    return planning.Plan(
        num_workers=servers.workers,
        engine=servers.engine or "transformers",
        model=servers.model or "demo",
        configurations=planning.choose_configurations(
            servers.workers, servers.arm, servers.find_peers()[0]
        ),
        levels=levels,
        workload=workload,
        request_options=RequestOptions(),
        effort=_effort(work),
        seed=work.seed or secrets.token_hex(4),
        slo=parse_slo(results.goodput) if results.goodput else None,
        cost_per_worker_hour=results.cost_per_worker_hour,
    )


def _workload(work: WorkFlags) -> "Workload":
    shape = ShapeFlags(
        workload=work.workload,
        input_len=work.input_len,
        output_len=work.output_len,
        trace_format=work.trace_format,
        speed=work.speed,
        max_broken=work.max_broken,
    )
    return make_workload(shape, work.trace)


def _effort(work: WorkFlags) -> "Effort":
    from baton.bench.architectures.plan import MOST_REPETITIONS, Effort  # noqa: PLC0415 - heavy

    if not 1 <= work.repetitions <= MOST_REPETITIONS:
        raise ConfigError(f"--repetitions {work.repetitions}: 1 to {MOST_REPETITIONS}")
    for flag, number in (
        ("--duration", work.duration),
        ("--timeout", work.timeout),
        ("--requests", work.requests),
    ):
        if number is not None and not 0 < number < float("inf"):
            raise ConfigError(f"{flag}: a number above 0")
    if not 0 <= work.settle < float("inf"):
        raise ConfigError("--settle: a number of seconds")
    if work.settle and work.concurrency is None and (work.rate or work.trace):
        raise ConfigError("--settle: closed loops settle; give --concurrency")
    return Effort(work.repetitions, work.duration, work.requests, work.timeout, work.settle)
