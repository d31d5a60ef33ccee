"""`baton worker`."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from msgspec import structs

from baton.cli.flags import ConfigFlags, Engine, Model, Sets, StatusFd, Store, Transport
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import TOKENIZER_VARIABLES, change_environment, read_environment
from baton.config.logs import configure_logging
from baton.config.sections import Config, Role
from baton.config.topology import find_worker_topology

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials
    from baton.worker.options import ProcessOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkerFlags(ConfigFlags):
    """One worker's part, model and addresses."""

    role: Annotated[
        Role | None, Sets("worker.role"), Parameter(help="Which part it plays [default: both].")
    ] = None
    name: Annotated[
        str | None, Sets("worker.name"), Parameter(help="Its name, unique in the cluster.")
    ] = None
    model: Model = None
    engine: Engine = None
    host: Annotated[
        str | None, Sets("worker.host"), Parameter(help="Where it listens for HTTP.")
    ] = None
    port: Annotated[
        int | None, Sets("worker.port"), Parameter(help="The HTTP port; 0 takes a free one.")
    ] = None
    handoff_host: Annotated[
        str | None, Sets("worker.handoff_host"), Parameter(help="Where peers hand over KV.")
    ] = None
    handoff_port: Annotated[
        int | None, Sets("worker.handoff_port"), Parameter(help="That port; 0 takes a free one.")
    ] = None
    topology: Annotated[
        str | None,
        Sets("worker.topology"),
        Parameter(help="Where it is: ZONE/RACK/HOST [default: found out]."),
    ] = None
    announce_to: Annotated[
        list[str] | None,
        Sets("worker.announce_to"),
        Parameter(help="Where a gateway takes announcements; may be repeated."),
    ] = None
    transport: Transport = None
    store: Store = None
    status_fd: StatusFd = 1


def worker(flags: WorkerFlags | None = None) -> int:
    """Start one worker: a model, an engine and its part of every handoff."""
    from baton.cli.plugin_options import check_worker_options  # noqa: PLC0415 - too heavy for --help
    from baton.engines.interface import ENGINE_SERVERS  # noqa: PLC0415

    flags = flags or WorkerFlags()
    config = flags.resolve().to_config()
    configure_logging(config.log)
    check_worker_options(config)  # before a model loads
    if config.worker.engine in ENGINE_SERVERS.kinds():
        from baton.cli.serving import run_engine_server  # noqa: PLC0415

        run_engine_server(config, _credentials(config), flags.status_fd)
    else:
        from baton.worker.announcer import SUPERSEDED, SupersededError  # noqa: PLC0415
        from baton.worker.process import run_worker  # noqa: PLC0415

        _check_transports(config)
        options = _options(config, flags.status_fd)
        # What a worker starts needs no key.
        change_environment(TOKENIZER_VARIABLES, (KEY_VARIABLE,))
        try:
            run_worker(options)
        except SupersededError as exc:
            print(f"baton: {exc}", file=sys.stderr)
            return SUPERSEDED
    return 0


def _check_transports(config: Config) -> None:
    """Whether they work here; not where an engine may be forked from here: some use CUDA."""
    from baton.transfer.interface import TRANSPORTS  # noqa: PLC0415 - too heavy for --help

    for kind in config.transfer.transports:
        TRANSPORTS.build(kind, config.transfer.options.get(kind, {}))


def _credentials(config: Config) -> "Credentials":
    from baton.auth.certificates import IdentityRole  # noqa: PLC0415 - too heavy for --help
    from baton.net.credentials import find_credentials  # noqa: PLC0415
    from baton.store.peer.addresses import find_listen_hosts  # noqa: PLC0415

    peers = find_listen_hosts(config.store.tiers, config.store.options)
    hosts = (config.worker.host, config.worker.handoff_host, *peers)
    found = find_credentials(config.cluster, config.security, read_environment(), hosts)
    found.credentials.require(IdentityRole.WORKER, config.worker.name)
    return found.credentials


def _options(config: Config, status_fd: int) -> "ProcessOptions":
    # Here, so that --help imports nothing heavy.
    from baton.cli.engine_options import engine_options  # noqa: PLC0415
    from baton.worker.options import ProcessOptions  # noqa: PLC0415

    section = config.worker
    return ProcessOptions(
        **structs.asdict(section),
        credentials=_credentials(config),
        tls=config.security.tls,
        engine_options=engine_options(section.engine, config.engine),
        at=find_worker_topology(section),
        handoff=config.handoff,
        transfer=config.transfer,
        store=config.store,
        preemption=config.preemption,
        num_traces=config.trace.ring_size,
        status_fd=status_fd,
    )
