"""`baton up`: its flags."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from baton.cli.flags import (
    ClientKeys,
    ConfigFlags,
    Engine,
    Fleet,
    Gateways,
    Insecure,
    ManagementPort,
    Mode,
    Model,
    Policy,
    RayAddress,
    Sets,
    Store,
    Transport,
)
from baton.config.sections import FleetSection
from baton.errors import ConfigError
from baton.launch.fleet import DEFAULT_FLEET


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class UpFlags(ConfigFlags):
    """What to start."""

    model: Model = None
    engine: Engine = None
    prefill_engine: Annotated[
        str | None,
        Sets("up.prefill_engine_name"),
        Parameter(help="Another engine for the prefill workers."),
    ] = None
    decode_engine: Annotated[
        str | None,
        Sets("up.decode_engine_name"),
        Parameter(help="Another engine for the decode workers."),
    ] = None
    prefill: Annotated[
        int | None, Sets("up.prefill"), Parameter(help="Number of prefill workers [default: 1].")
    ] = None
    decode: Annotated[
        int | None, Sets("up.decode"), Parameter(help="Number of decode workers [default: 1].")
    ] = None
    transport: Transport = None
    store: Store = None
    host: Annotated[
        str | None, Sets("gateway.host"), Parameter(help="Where the gateway listens.")
    ] = None
    port: Annotated[
        int | None,
        Sets("gateway.port"),
        Parameter(help="The gateway's port [default: 8000]; 0 takes a free one."),
    ] = None
    gateways: Gateways = None
    management_port: ManagementPort = None
    client_keys: ClientKeys = None
    insecure: Insecure = None
    mode: Mode = None
    policy: Policy = None
    on: Annotated[
        Literal["local", "ray"], Parameter(help="Where: this machine, or a Ray cluster.")
    ] = "local"
    ray_address: RayAddress = None
    timeout: Annotated[
        float | None,
        Sets("ray.timeout_s"),
        Parameter(help="On Ray: seconds to find a host for each process [default: 60]."),
    ] = None
    near: Annotated[
        bool | None,
        Sets("fleet.near"),
        Parameter(
            help="On Ray: assign workers to hosts as baton plan does, by the KV between them."
        ),
    ] = None
    insecure_ray: Annotated[
        bool | None, Sets("ray.insecure"), Parameter(help="Use a Ray without token authentication.")
    ] = None
    pin: Annotated[bool, Parameter(help="Give each worker cores of its own.")] = False
    fleet: Fleet = DEFAULT_FLEET
    detach: Annotated[
        bool,
        Parameter(
            help="Return when it serves; it runs in the background (baton status, logs, down)."
        ),
    ] = False
    background: Annotated[bool, Parameter(help="It was started by --detach.", show=False)] = False


def refuse_hosts(fleet: FleetSection) -> None:
    """What chooses hosts is not ignored where there is one.

    Raises:
        ConfigError: the settings assign workers to hosts.
    """
    if fleet.assignments or fleet.near:
        raise ConfigError(
            "fleet.assignments and fleet.near (--near) are for fleets on several hosts: give --on "
            "ray, or leave them out to start all workers on this machine"
        )


def up(flags: UpFlags | None = None) -> int:
    """Start a gateway and its workers on this machine; Ctrl-C drains and stops them.

    With --on ray they are started on a cluster, and go on after this command.

    With --prefill 0 or --decode 0 the remaining workers do both parts.
    """
    flags = flags or UpFlags()
    resolved = flags.resolve()
    if flags.on == "ray":
        if flags.pin:
            raise ConfigError("--pin divides the cores of this machine; it does nothing on Ray")
        from baton.cli.launching_ray import launch_on_ray  # noqa: PLC0415 - too heavy for --help

        return launch_on_ray(resolved, flags.fleet)
    refuse_hosts(resolved.to_config().fleet)
    if flags.detach:
        from baton.cli.background import launch_in_background  # noqa: PLC0415 - as below

        pinned = ["--pin"] if flags.pin else []
        return launch_in_background(resolved, [*pinned, "--fleet", flags.fleet])
    from baton.cli.launching import launch  # noqa: PLC0415 - too heavy for --help

    return launch(
        resolved,
        "own_cores" if flags.pin else "shared_cores",
        flags.fleet,
        in_background=flags.background,
    )
