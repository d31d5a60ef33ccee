"""`baton up`: its flags."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from baton.cli.flags import (
    ClientKeys,
    ConfigFlags,
    Fleet,
    Gateways,
    Insecure,
    ManagementPort,
    Mode,
    Policy,
    Sets,
    Store,
    Transport,
)
from baton.launch.fleet import DEFAULT_FLEET


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class UpFlags(ConfigFlags):
    """What to start."""

    model: Annotated[
        str | None, Sets("worker.model"), Parameter(help="A model's folder [default: the demo].")
    ] = None
    engine: Annotated[
        str | None,
        Sets("worker.engine"),
        Parameter(help="transformers (default), vllm, or another."),
    ] = None
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
    pin: Annotated[
        bool,
        Parameter(help="Give each worker cores of its own.", negative="", show_default=False),
    ] = False
    fleet: Fleet = DEFAULT_FLEET
    detach: Annotated[
        bool,
        Parameter(
            help="Return when it serves; it runs in the background (baton status, logs, down).",
            negative="",
            show_default=False,
        ),
    ] = False
    background: Annotated[
        bool, Parameter(help="It was started by --detach.", negative="", show=False)
    ] = False


def up(flags: UpFlags | None = None) -> int:
    """Start a gateway and its workers on this machine; Ctrl-C drains and stops them.

    With --prefill 0 or --decode 0 the remaining workers do both parts.
    """
    flags = flags or UpFlags()
    if flags.detach:
        from baton.cli.background import launch_in_background  # noqa: PLC0415 - as below

        pinned = ["--pin"] if flags.pin else []
        return launch_in_background(flags.resolve(), [*pinned, "--fleet", flags.fleet])
    from baton.cli.launching import launch  # noqa: PLC0415 - too heavy for --help

    resolved = flags.resolve()
    return launch(
        resolved,
        "own_cores" if flags.pin else "shared_cores",
        flags.fleet,
        in_background=flags.background,
    )
