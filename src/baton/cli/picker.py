"""`baton picker`."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from baton.cli.flags import (
    ClientKeys,
    ConfigFlags,
    Insecure,
    ManagementPort,
    Policy,
    Sets,
    StatusFd,
    TlsCertificate,
    TlsKey,
)
from baton.cli.gateway import gateway_options
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import change_environment
from baton.config.logs import configure_logging
from baton.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PickerFlags(ConfigFlags):
    """Where Envoy asks, and the workers to choose from."""

    worker: Annotated[
        list[str] | None,
        Sets("gateway.workers"),
        Parameter(help="URL of a worker, Baton's or vLLM's; may be repeated.", negative=""),
    ] = None
    members: Annotated[
        list[str] | None,
        Sets("gateway.members"),
        Parameter(help="Source of workers, as of `baton gateway`; may be repeated.", negative=""),
    ] = None
    host: Annotated[str | None, Sets("gateway.host"), Parameter(help="Where to listen.")] = None
    port: Annotated[
        int | None, Sets("gateway.port"), Parameter(help="The gRPC port; 0 takes a free one.")
    ] = None
    management_port: ManagementPort = None
    tls_certificate: TlsCertificate = None
    tls_key: TlsKey = None
    client_keys: ClientKeys = None
    insecure: Insecure = None
    policy: Policy = None
    status_fd: StatusFd = 1


def picker(flags: PickerFlags | None = None) -> int:
    """Choose workers for requests that Envoy forwards: no request goes through this process."""
    try:
        from baton.gateway.picker.server import run_picker  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError(
            f"the endpoint picker needs gRPC ({exc}); run: pip install 'baton-kv[picker]'"
        ) from exc

    flags = flags or PickerFlags()
    config = flags.resolve().to_config()
    configure_logging(config.log)
    options = gateway_options(config, flags.status_fd)
    if options.processes > 1:
        raise ConfigError("a picker is one process: start several, each with a port of its own")
    change_environment({}, (KEY_VARIABLE,))
    run_picker(options)
    return 0
