"""`baton gateway`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from baton.auth.certificates import IdentityRole
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
from baton.config.environment import change_environment, read_environment
from baton.config.logs import configure_logging
from baton.config.sections import Config
from baton.errors import ConfigError
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.targets import Targets
from baton.net.credentials import find_credentials
from baton.protocol.worker_http import Role
from baton.router.health import HealthOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GatewayFlags(ConfigFlags):
    """Where to listen, and the workers behind."""

    prefill: Annotated[
        list[str] | None,
        Sets("gateway.prefill"),
        Parameter(help="URL of a prefill worker, Baton's or vLLM's; may be repeated.", negative=""),
    ] = None
    decode: Annotated[
        list[str] | None,
        Sets("gateway.decode"),
        Parameter(help="URL of a decode worker, Baton's or vLLM's; may be repeated.", negative=""),
    ] = None
    worker: Annotated[
        list[str] | None,
        Sets("gateway.workers"),
        Parameter(help="URL of a worker that does both parts; may be repeated.", negative=""),
    ] = None
    members: Annotated[
        list[str] | None,
        Sets("gateway.members"),
        Parameter(
            help="Source of workers: file:/PATH, dns:ROLE=HOST:PORT, kubernetes:ROLE=SERVICE, "
            "announced; may be repeated.",
            negative="",
        ),
    ] = None
    host: Annotated[str | None, Sets("gateway.host"), Parameter(help="Where to listen.")] = None
    port: Annotated[
        int | None,
        Sets("gateway.port"),
        Parameter(help="The port [default: 8000]; 0 takes a free one."),
    ] = None
    gateways: Gateways = None
    management_port: ManagementPort = None
    announce_port: Annotated[
        int | None,
        Sets("gateway.announce_port"),
        Parameter(help="Port where workers announce themselves, of process i plus i."),
    ] = None
    peer: Annotated[
        list[str] | None,
        Sets("gateway.peers"),
        Parameter(help="Where another gateway takes announcements; may be repeated.", negative=""),
    ] = None
    tls_certificate: TlsCertificate = None
    tls_key: TlsKey = None
    client_keys: ClientKeys = None
    insecure: Insecure = None
    mode: Mode = None
    policy: Policy = None
    status_fd: StatusFd = 1
    listen_fds: InheritedFds = ""
    management_fds: InheritedFds = ""


def gateway(flags: GatewayFlags | None = None) -> int:
    """Start a gateway in front of workers that run already, or will."""
    from baton.gateway.process import run_gateway  # noqa: PLC0415 - too heavy for --help

    flags = flags or GatewayFlags()
    config = flags.resolve().to_config()
    configure_logging(config.log)
    options = replace(
        gateway_options(config, flags.status_fd),
        listen_fds=_numbers(flags.listen_fds),
        management_fds=_numbers(flags.management_fds),
    )
    change_environment({}, (KEY_VARIABLE,))
    run_gateway(options)
    return 0


def gateway_options(config: Config, status_fd: int) -> GatewayOptions:
    """What a gateway is built from."""
    section = config.gateway
    announces = section.announce_port is not None
    hosts = (section.host, *((section.announce_host,) if announces else ()))
    found = find_credentials(config.cluster, config.security, read_environment(), hosts)
    found.credentials.require(IdentityRole.GATEWAY)
    return GatewayOptions(
        workers=(
            *(WorkerAddress(url, Role.PREFILL) for url in section.prefill),
            *(WorkerAddress(url, Role.DECODE) for url in section.decode),
            *(WorkerAddress(url, Role.BOTH) for url in section.workers),
        ),
        credentials=found.credentials,
        key_origin=found.origin,
        host=section.host,
        port=section.port,
        num_processes=section.processes,
        status_fd=status_fd,
        max_connections=section.max_connections,
        max_connections_per_address=section.max_connections_per_address,
        max_inflight_requests=section.max_inflight_requests,
        max_body_bytes=section.max_body_bytes,
        max_body_bytes_per_token=section.max_body_bytes_per_token,
        max_total_body_bytes=section.max_total_body_bytes,
        max_answer_bytes=section.max_answer_bytes,
        max_answers=section.max_answers,
        max_total_record_bytes=section.max_total_record_bytes,
        max_running_per_worker=section.max_running_per_worker,
        max_queued_requests=section.max_queued_requests,
        max_queued_tokens=section.max_queued_tokens,
        max_queued_per_tenant=section.max_queued_per_tenant,
        targets={
            model: Targets(table.ttft_s, table.tpot_s)
            for model, table in config.router.targets.items()
        },
        request_timeout_s=section.request_timeout_s,
        first_byte_timeout_s=section.first_byte_timeout_s,
        connect_timeout_s=section.connect_timeout_s,
        prefill_grace_period_s=section.prefill_grace_period_s,
        probe_interval_s=section.probe_interval_s,
        probe_timeout_s=section.probe_timeout_s,
        abandon_after_s=section.abandon_after_s,
        silent_after_s=section.silent_after_s,
        health=HealthOptions(section.ejection_s, section.slow_start_s),
        wait_for_worker_s=section.wait_for_worker_s,
        drain_timeout_s=section.drain_timeout_s,
        num_records=config.trace.ring_size,
        mode=section.mode,
        policy=config.router.policy,
        policy_options=config.router.options,
        costs_file=None if config.router.costs_file is None else Path(config.router.costs_file),
        tokenizers={name: Path(folder) for name, folder in config.router.tokenizers.items()},
        tls=config.security.tls,
        first_token_early=section.first_token_early,
        move_streams=section.move_streams,
        tls_certificate=Path(section.tls_certificate) if section.tls_certificate else None,
        tls_key=Path(section.tls_key) if section.tls_key else None,
        client_keys_file=Path(section.client_keys_file) if section.client_keys_file else None,
        insecure=section.insecure,
        audit_log=Path(section.audit_log) if section.audit_log else None,
        management_host=section.management_host,
        management_port=section.management_port,
        announce_host=section.announce_host,
        announce_port=section.announce_port,
        announce_url=section.announce_url,
        peers=section.peers,
        allowed_hosts=section.allowed_hosts,
        allowed_origins=section.allowed_origins,
        members=section.members,
        members_interval_s=section.members_interval_s,
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError as exc:
        raise ConfigError(f"{text!r} is not a list of file descriptors") from exc
