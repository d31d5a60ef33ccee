"""`baton bench link` and `baton bench compare`."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter

from baton.cli.exit_codes import FAILED, INTERRUPTED
from baton.cli.flags import ConfigFlags
from baton.clock import Clock, MachineClock
from baton.config.environment import read_environment
from baton.config.sections import Config
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials
    from baton.bench.link.report import Report
    from baton.bench.link.runner import Plan
    from baton.rig.nodes import Address, Nodes

app = App(name="bench", help="Measure links between workers, and servers under load.")
app.command("baton.cli.bench_serve:serve", name="serve", help="Load a server, measure its answers.")
app.command("baton.cli.bench:compare", name="compare", help="Is one result really better?")
app.command(
    "baton.cli.bench_architectures:architectures",
    name="architectures",
    help="Is disaggregation worth it here? A fair answer on equal hardware.",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LinkFlags(ConfigFlags):
    """What is measured, and where the report is written."""

    listen: Annotated[
        str | None, Parameter(help="Listen at HOST:PORT for a run that another host starts.")
    ] = None
    transport: Annotated[
        tuple[str, ...], Parameter(help="Only this transport; may be repeated.")
    ] = ()
    sizes: Annotated[
        str | None, Parameter(help="Message sizes [default: 32KiB,1MiB,16MiB,100MB].")
    ] = None
    rounds: Annotated[
        int | None, Parameter(help="Rounds, with fresh processes in each [default: 3].")
    ] = None
    quick: Annotated[bool, Parameter(help="Small and short: does it work?")] = False
    peers: Annotated[
        bool, Parameter(help="Also measure NIXL, Mooncake, gloo, plain sockets and iperf3.")
    ] = False
    json: Annotated[bool, Parameter(help="Print JSON.")] = False
    plot: Annotated[
        Path | None, Parameter(help="Write a figure to this file (.png, .svg, .pdf).")
    ] = None


@app.command
def link(
    a: Annotated[str | None, Parameter(help="HOST:PORT of the listener that drives.")] = None,
    b: Annotated[str | None, Parameter(help="HOST:PORT of the one that is driven.")] = None,
    /,
    flags: LinkFlags | None = None,
) -> int:
    """Measure every transport between two processes of this host, or between two hosts.

    Two hosts: run `baton bench link --listen HOST:PORT` on both, with one BATON_CLUSTER_KEY, then
    `baton bench link A B` anywhere.
    """
    # As Ctrl-C: with a report of what was measured, and with the processes of the measurement.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    flags = flags or LinkFlags()
    config = flags.resolve().to_config()
    clock = MachineClock()
    if flags.listen is not None:
        if a is not None:
            raise ConfigError("--listen takes no A and B: this process is one of them")
        return _listen(flags.listen, config, clock)
    if flags.plot is not None:
        from baton.bench.charts import check_plot  # noqa: PLC0415 - too heavy for --help

        check_plot(flags.plot)
    nodes = _open_nodes(a, b, config, clock)
    return _measure(_plan(flags, config), nodes, flags, clock)


def _listen(text: str, config: Config, clock: Clock) -> int:
    from baton.bench.link.listen import Listener, listen  # noqa: PLC0415 - too heavy for --help

    address = _address(text, "--listen")

    def log(line: str) -> None:
        print(f"baton: {line}", file=sys.stderr, flush=True)

    listen(address, Listener(_credentials(config, (address.host,)), clock, log))
    return 0


def _measure(plan: "Plan", nodes: "Nodes", flags: LinkFlags, clock: Clock) -> int:
    from baton.bench.link.runner import LinkRunner  # noqa: PLC0415 - too heavy for --help
    from baton.bench.printing import print_link_report  # noqa: PLC0415
    from baton.bench.progress import StepProgress  # noqa: PLC0415

    num_steps = plan.effort.num_rounds * len(plan.entries) * len(plan.workloads)
    report = LinkRunner(plan, nodes, StepProgress(num_steps), clock, sys.argv[1:]).run()
    try:  # before it is printed: a reader that leaves early (`| head`) ends the printing
        if flags.plot is not None and report.rows:
            from baton.bench.charts import plot_report  # noqa: PLC0415

            plot_report(report, flags.plot)
    finally:
        if flags.json:
            print(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            print_link_report(report, sys.stdout)
    return _exit_code(report, flags)


def _exit_code(report: "Report", flags: LinkFlags) -> int:
    if report.is_partial:
        return INTERRUPTED
    asked = {("transport", kind) for kind in flags.transport}
    is_bad = any(each.is_wrong or (each.kind, each.name) in asked for each in report.skipped)
    has_transport = any(row.kind == "transport" for row in report.rows)
    return FAILED if is_bad or not has_transport else 0


def _plan(flags: LinkFlags, config: Config) -> "Plan":
    from dataclasses import replace  # noqa: PLC0415

    from baton.bench.link import runner as planning  # noqa: PLC0415 - too heavy for --help
    from baton.rig.pages import parse_size  # noqa: PLC0415
    from baton.transfer.interface import TRANSPORTS  # noqa: PLC0415

    effort = planning.QUICK if flags.quick else planning.THOROUGH
    if flags.rounds is not None:
        if flags.rounds < 1:
            raise ConfigError("--rounds: at least 1")
        effort = replace(effort, num_rounds=flags.rounds)
    sizes: Sequence[int] = planning.QUICK_SIZES if flags.quick else planning.DEFAULT_SIZES
    if flags.sizes is not None:
        sizes = [parse_size(text) for text in flags.sizes.split(",")]
    options = config.transfer.options
    transports = planning.choose_transports(flags.transport, TRANSPORTS.kinds(), options)
    peers = (*planning.add_reused(transports), *planning.PEERS) if flags.peers else ()
    entries = (*planning.LIMITS, *transports, *peers)
    return planning.Plan(entries, planning.make_workloads(sizes, effort), effort)


def _open_nodes(a: str | None, b: str | None, config: Config, clock: Clock) -> "Nodes":
    from baton.bench.link.node import COMMAND  # noqa: PLC0415 - too heavy for --help
    from baton.rig.nodes import LocalNodes, RemoteNodes  # noqa: PLC0415

    if a is None:
        return LocalNodes(clock, COMMAND)
    if b is None:
        raise ConfigError("two ends are needed, A and B, or none for two processes of this host")
    driver, owner = _address(a, "A"), _address(b, "B")
    return RemoteNodes(driver, owner, _credentials(config, (driver.host, owner.host)), clock)


def _credentials(config: Config, hosts: Sequence[str]) -> "Credentials":
    from baton.net.credentials import find_credentials  # noqa: PLC0415 - too heavy for --help

    return find_credentials(config.cluster, config.security, read_environment(), hosts).credentials


def _address(text: str, what: str) -> "Address":
    from baton.rig.nodes import Address  # noqa: PLC0415 - too heavy for --help

    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:  # noqa: PLR2004
        raise ConfigError(f"{what}: {text!r} is no HOST:PORT, such as 127.0.0.1:7100")
    return Address(host.strip("[]"), int(port))


def compare(
    a: Annotated[Path, Parameter(help="A report of `baton bench serve`, or a folder of them.")],
    b: Annotated[Path, Parameter(help="Another, which is compared with it.")],
    /,
    *,
    fail_if_worse: Annotated[
        str | None,
        Parameter(help="Exit with 1 if B is certainly worse by more, such as 5%."),
    ] = None,
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
    debug: Annotated[bool, Parameter(help="Show where an error arose.")] = False,
) -> int:
    """Report whether B differs from A, and how certain that is.

    Folders hold several runs of the same; only they show how much runs differ by themselves.
    """
    del debug  # the caller looks at the command line itself
    share = None if fail_if_worse is None else read_share(fail_if_worse, "--fail-if-worse")
    from baton.bench import compare as comparing  # noqa: PLC0415 - too heavy for --help
    from baton.bench.printing import print_comparison  # noqa: PLC0415

    sides = comparing.read_side(a), comparing.read_side(b)
    found = comparing.compare(*sides, share)
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
