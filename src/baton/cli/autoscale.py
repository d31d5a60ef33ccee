"""`baton autoscale`: its flags."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from baton.cli.flags import LOCAL, ConfigFlags, Fleet, On, Sets
from baton.errors import ConfigError
from baton.launch.fleet import DEFAULT_FLEET, FleetControl

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from baton.config.sections import ScalingSection

LOOPBACK = "127.0.0.1"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AutoscaleFlags(ConfigFlags):
    """Whose traffic is read, and which fleet is resized."""

    gateway: Annotated[
        tuple[str, ...] | None,
        Sets("scaling.gateways"),
        Parameter(
            help="A gateway's URL, or its management port's; may be repeated "
            "[default: http://127.0.0.1:8000]."
        ),
    ] = None
    fleet: Fleet = DEFAULT_FLEET
    on: On = LOCAL
    dry_run: Annotated[bool, Parameter(help="Print decisions, change nothing.")] = False


def autoscale(flags: AutoscaleFlags | None = None) -> int:
    """Size a fleet's pools by what its gateways are asked for, until Ctrl-C.

    Bounds, limits and prices are the settings `scaling.*`: --set scaling.max_decode=8.
    """
    import asyncio  # noqa: PLC0415 - these are too heavy for --help

    from baton.launch.fleet import find_backend  # noqa: PLC0415

    flags = flags or AutoscaleFlags()
    config = flags.resolve().to_config()
    backend = find_backend(flags.on)

    async def run() -> None:
        async with backend.connect(flags.fleet) as control:
            await _run(config.scaling, control, applies=not flags.dry_run)

    from baton.config.logs import configure_logging  # noqa: PLC0415

    configure_logging(config.log)
    asyncio.run(run())
    return 0


async def _run(settings: "ScalingSection", control: "FleetControl", *, applies: bool) -> None:
    from baton.clock import MachineClock  # noqa: PLC0415
    from baton.launch.autoscaler import Autoscaler, DemandReader, make_options  # noqa: PLC0415

    autoscaler = Autoscaler(
        control,
        DemandReader(settings.gateways, settings.model),
        make_options(settings),
        MachineClock(),
        on_line=partial(print, flush=True),
        applies=applies,
    )
    if settings.metrics_port is not None:
        _serve_metrics(settings.metrics_port, autoscaler.changes.metrics.registry)
    await autoscaler.run(settings.interval_s)


def _serve_metrics(port: int, registry: "CollectorRegistry") -> None:
    from prometheus_client import start_http_server  # noqa: PLC0415

    try:
        server, _ = start_http_server(port, addr=LOOPBACK, registry=registry)
        print(f"metrics at http://{LOOPBACK}:{server.server_port}/metrics", flush=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {LOOPBACK}:{port}: {exc.strerror}; choose another "
            "scaling.metrics_port"
        ) from exc
