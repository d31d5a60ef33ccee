"""`baton worker` with an engine that brings a server of its own: the process around it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cli.engine_options import engine_options
from baton.clock import MachineClock
from baton.config.environment import read_environment, run_directory
from baton.config.numa import bind_worker
from baton.config.topology import find_worker_topology
from baton.engines.interface import ENGINE_SERVERS, ServerContext
from baton.models import DEMO_MODEL_PATH
from baton.net.http_server import bind, url_of
from baton.telemetry.process_status import StatusReporter, claim_standard_output
from baton.worker.server_membership import AnnouncedServer

if TYPE_CHECKING:
    from baton.auth.credentials import Credentials
    from baton.config.sections import Config


def run_engine_server(config: Config, credentials: Credentials, status_fd: int) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; belongs on the main thread.

    Raises:
        ConfigError: the port is taken, a core does not exist, the model cannot be served, or no
            gateway could reach what is to be announced.
        EngineError: the engine ended by itself.
    """
    worker = config.worker
    serve = ENGINE_SERVERS.build(worker.engine, engine_options(worker.engine, config.engine))
    membership: AnnouncedServer | None = None
    if worker.announce_to:
        topology = find_worker_topology(worker)
        membership = AnnouncedServer(worker, credentials, MachineClock(), topology)
    bind_worker(worker)
    with closing(bind(worker.host, worker.port)) as listener:
        port = listener.getsockname()[1]
        serve(
            ServerContext(
                config=config,
                model=Path(worker.model).resolve() if worker.model else DEMO_MODEL_PATH,
                credentials=credentials,
                listener=listener,
                url=url_of(listener, worker.host, is_tls=config.security.tls != "off"),
                status_reporter=StatusReporter(claim_standard_output(status_fd)),
                # By port, which no other process here has: what a killed life left is found again.
                run_directory=run_directory(read_environment()) / f"worker-{port}",
                membership=membership,
            )
        )
