"""`baton gateway`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from msgspec import structs

from baton.cli.flags import (
    ClientKeys,
    ConfigFlags,
    Gateways,
    InheritedFds,
    Insecure,
    ManagementPort,
    Mode,
    Policy,
    Sets,
    StatusFd,
    TlsCertificate,
    TlsKey,
)
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import TOKENIZER_VARIABLES, change_environment, read_environment
from baton.config.logs import configure_logging
from baton.config.sections import Config, ScalingSection
from baton.errors import ConfigError
from baton.gateway.targets import Targets
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from baton.gateway.options import GatewayOptions, WorkerPrices


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FrontFlags(ConfigFlags):
    """What a gateway and an endpoint picker have in common."""

    worker: Annotated[
        list[str] | None,
        Sets("gateway.workers"),
        Parameter(help="URL of a worker that does both parts; may be repeated."),
    ] = None
    members: Annotated[
        list[str] | None,
        Sets("gateway.members"),
        Parameter(
            help="Source of workers: file:/PATH, dns:ROLE=HOST:PORT, kubernetes:ROLE=SERVICE, "
            "announced; may be repeated."
        ),
    ] = None
    host: Annotated[str | None, Sets("gateway.host"), Parameter(help="Where to listen.")] = None
    port: Annotated[
        int | None,
        Sets("gateway.port"),
        Parameter(help="The port [default: 8000]; 0 takes a free one."),
    ] = None
    management_port: ManagementPort = None
    tls_certificate: TlsCertificate = None
    tls_key: TlsKey = None
    client_keys: ClientKeys = None
    insecure: Insecure = None
    policy: Policy = None
    status_fd: StatusFd = 1


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GatewayFlags(FrontFlags):
    """Where to listen, and the workers behind."""

    prefill: Annotated[
        list[str] | None,
        Sets("gateway.prefill"),
        Parameter(help="URL of a prefill worker, Baton's or vLLM's; may be repeated."),
    ] = None
    decode: Annotated[
        list[str] | None,
        Sets("gateway.decode"),
        Parameter(help="URL of a decode worker, Baton's or vLLM's; may be repeated."),
    ] = None
    gateways: Gateways = None
    announce_port: Annotated[
        int | None,
        Sets("gateway.announce_port"),
        Parameter(help="Port where workers announce themselves, of process i plus i."),
    ] = None
    peer: Annotated[
        list[str] | None,
        Sets("gateway.peers"),
        Parameter(help="Where another gateway takes announcements; may be repeated."),
    ] = None
    mode: Mode = None
    listen_fds: InheritedFds = ""
    management_fds: InheritedFds = ""


def gateway(flags: GatewayFlags | None = None) -> int:
    """Start a gateway in front of workers that run already, or will."""
    from baton.gateway.process import run_gateway  # noqa: PLC0415 - too heavy for --help

    flags = flags or GatewayFlags()
    config = flags.resolve().to_config()
    configure_logging(config.log)
    options = structs.replace(
        gateway_options(config, flags.status_fd),
        listen_fds=_numbers(flags.listen_fds),
        management_fds=_numbers(flags.management_fds),
    )
    change_environment(TOKENIZER_VARIABLES, (KEY_VARIABLE,))
    run_gateway(options)
    return 0


def gateway_options(config: Config, status_fd: int) -> "GatewayOptions":
    """What a gateway is built from."""
    from baton.auth.certificates import IdentityRole  # noqa: PLC0415 - too heavy for --help
    from baton.gateway.options import GatewayOptions, WorkerAddress  # noqa: PLC0415
    from baton.net.credentials import find_credentials  # noqa: PLC0415
    from baton.router.placement import POLICIES  # noqa: PLC0415

    POLICIES.check_tables(config.router.options)
    section = config.gateway
    announces = section.announce_port is not None
    hosts = (section.host, *((section.announce_host,) if announces else ()))
    found = find_credentials(config.cluster, config.security, read_environment(), hosts)
    found.credentials.require(IdentityRole.GATEWAY)
    router = config.router
    return GatewayOptions(
        **structs.asdict(section),
        addresses=(
            *(WorkerAddress(url, Role.PREFILL) for url in section.prefill),
            *(WorkerAddress(url, Role.DECODE) for url in section.decode),
            *(WorkerAddress(url, Role.BOTH) for url in section.workers),
        ),
        credentials=found.credentials,
        key_origin=found.origin,
        status_fd=status_fd,
        trace=config.trace,
        policy=router.policy,
        policy_options=router.options,
        tokenizers={name: Path(folder) for name, folder in router.tokenizers.items()},
        targets={
            model: Targets(table.ttft_s, table.tpot_s, itl_s=table.itl_s)
            for model, table in router.targets.items()
        },
        costs_file=None if router.costs_file is None else Path(router.costs_file),
        tls=config.security.tls,
        alerts=config.alerts,
        prices=_find_prices(config.scaling),
    )


def _find_prices(scaling: ScalingSection) -> "WorkerPrices | None":
    """None where all are the default and nothing bounds their sum: then they mean nothing."""
    from baton.gateway.options import WorkerPrices  # noqa: PLC0415 - too heavy for --help

    prices = WorkerPrices(scaling.price_prefill, scaling.price_decode, scaling.price_both)
    is_default = prices == WorkerPrices(1.0, 1.0, 1.0) and scaling.max_price is None
    return None if is_default else prices


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError as exc:
        raise ConfigError(f"{text!r} is not a list of file descriptors") from exc
