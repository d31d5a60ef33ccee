"""`baton up`: one machine, one command."""

import asyncio
import os
from typing import Annotated

from cyclopts import Parameter

from baton.authority.key import ClusterKey
from baton.cli.engine_options import check_engine_options, engine_defaults
from baton.cli.flags import ConfigFlags
from baton.clock import MachineClock
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import read_environment
from baton.config.logs import configure_logging
from baton.config.resolve import Resolved
from baton.config.sections import Config, TransferSection
from baton.errors import UnknownPluginError
from baton.launch.plan import plan_launch
from baton.launch.progress import Display, open_display
from baton.launch.supervisor import LaunchContext, Supervisor
from baton.transfer.interface import TRANSPORTS


def up(
    *,
    model: Annotated[str | None, Parameter(help="Model directory [default: the demo].")] = None,
    engine: Annotated[str | None, Parameter(help="Engine plug-in.")] = None,
    prefill: Annotated[int | None, Parameter(help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, Parameter(help="Number of decode workers.")] = None,
    transport: Annotated[
        str | None, Parameter(help="auto, or the one transport to use: shared, tcp.")
    ] = None,
    host: Annotated[str | None, Parameter(help="Where the gateway listens.")] = None,
    port: Annotated[int | None, Parameter(help="The gateway's port; 0 takes a free one.")] = None,
    pin: Annotated[bool, Parameter(help="Give each worker cores of its own.", negative="")] = False,
    flags: ConfigFlags = ConfigFlags(),  # noqa: B008, RUF100 - frozen
) -> int:
    """Start a gateway and its workers on this machine; Ctrl-C drains and stops them.

    With --prefill 0 or --decode 0 the remaining workers do both parts.
    """
    resolved = flags.resolve({
        "worker.model": ("--model", model),
        "worker.engine": ("--engine", engine),
        "up.prefill": ("--prefill", prefill),
        "up.decode": ("--decode", decode),
        "transfer.transports": ("--transport", _transports(transport)),
        "gateway.host": ("--host", host),
        "gateway.port": ("--port", port),
    })
    config = resolved.to_config()
    configure_logging(config.log)
    _check_plugins(config)
    return asyncio.run(_launch(resolved, config, pin))


async def _launch(resolved: Resolved, config: Config, pin: bool) -> int:
    plan = plan_launch(
        resolved,
        cores=sorted(os.sched_getaffinity(0)),
        engine_keys=frozenset(engine_defaults(config.worker.engine)),
        pinning="own_cores" if pin else "shared_cores",
    )
