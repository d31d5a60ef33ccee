"""What the operator decides about a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from msgspec import structs
from yarl import URL

from baton.clock import Clock, MachineClock
from baton.config.cluster_key import is_loopback, is_wildcard
from baton.config.sections import AlertsSection, GatewaySection, Tls, TraceSection
from baton.errors import ConfigError
from baton.gateway.members.interface import NamedSource, SourceStatus, build_source
from baton.gateway.targets import NO_TARGETS, Targets
from baton.protocol.alerts import AlertName
from baton.protocol.announcements import require_https
from baton.protocol.worker_http import Role
from baton.router.health import HealthOptions
from baton.router.placement import POLICIES, PlacementPolicy, choose_policy, find_first_share

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from baton.auth.credentials import Credentials
    from baton.gateway.members.announced import AnnouncedWorkers

ANNOUNCED = "announced"
"""The source of workers that needs `announce_port`."""
ANY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class WorkerPrices:
    """What one worker of each role costs for an hour, in any unit."""

    prefill: float
    decode: float
    both: float


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker is, and in which role it is used. `draining`: it gets nothing new.

    `topology` is what its source knows of its `zone/rack/host/device`.

    Raises:
        ConfigError: `url` is not `https://host:port` (or http).
    """

    url: str
    role: Role
    draining: bool = False
    topology: str = ""
    origin: URL = field(init=False, repr=False, compare=False)
    """By which a worker is known: two of one are the same worker, however they are written."""

    def __post_init__(self) -> None:
        if (origin := _find_origin(self.url)) is None:
            raise ConfigError(
                f"{self.url!r} is not a worker's address; write it as https://host:port"
            )
        object.__setattr__(self, "origin", origin)

    @property
    def is_plain(self) -> bool:
        """Whether who answers there proves nothing: requests, and the bearer, go in the clear."""
        return self.origin.scheme == "http"


def _find_origin(text: str) -> URL | None:
    try:
        parts, origin = urlsplit(text), URL(text).origin()
        has_host = bool(origin.host)  # decodes it
    except ValueError:
        return None
    is_whole = parts.path in {"", "/"} and not (parts.query or parts.fragment)
    return origin if is_whole and origin.scheme in {"http", "https"} and has_host else None


def check_processes(num_processes: int, management_port: int | None) -> None:
    """Pass, or raise: also for launchers, before anything starts.

    Raises:
        ConfigError: the metrics of several processes could not be reached.
    """
    if num_processes > 1 and management_port is None:
        raise ConfigError(
            "several gateway processes count each on its own: give --management-port, process i "
            "answers /metrics and /debug at that port + i"
        )


def check_alerts(section: AlertsSection) -> None:
    """Pass, or raise.

    Raises:
        ConfigError: the webhook has no usable URL, or there is no alert of a disabled name.
    """
    if section.webhook_url is not None:
        try:
            parts = urlsplit(section.webhook_url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            # It may have a secret in it: it is not repeated here.
            raise ConfigError("alerts.webhook_url is not a URL as https://HOST[:PORT]/PATH")
    unknown = [name for name in section.disabled if name not in {*AlertName}]
    if unknown:
        raise ConfigError(f"alerts.disabled names {unknown[0]!r}; there are {', '.join(AlertName)}")


class GatewayOptions(GatewaySection, frozen=True, kw_only=True):
    """Everything `run_gateway` needs: the section `[gateway]`, and what belongs to other sections.

    `addresses` are those of `prefill`, `decode` and `workers`. `key_origin` is whether an operator
    configured the cluster key or a launcher made it up for this machine: a gateway that others can
    reach insists on the former. `status_fd` is the file descriptor that gets the line
    `{"event":"ready",...}`. `listen_fds` and `management_fds`: bound sockets of a launcher, one for
    each process, in place of the ports. `first_share`: where in the workers' order a process of
    several begins (`Fleet.beginning_at`). `policy` is how workers are chosen, one of `POLICIES`
    (None: see `choose_policy`), and `policy_options` those of each policy by its name. `targets`:
    by model, "*" for those that are not named. `prices`: None where the operator has named none.

    Raises:
        ConfigError: no worker can ever decode, or the gateway would be reachable from other
            machines without a configured cluster key.
    """

    addresses: tuple[WorkerAddress, ...]
    credentials: Credentials
    key_origin: Literal["configured", "generated"] = "generated"
    status_fd: int = 1
    listen_fds: tuple[int, ...] = ()
    management_fds: tuple[int, ...] = ()
    trace: TraceSection = TraceSection()
    policy: str | None = None
    policy_options: Mapping[str, Mapping[str, object]] = {}
    tokenizers: Mapping[str, Path] = {}
    targets: Mapping[str, Targets] = {}
    costs_file: Path | None = None
    tls: Tls = "control"
    first_share: float = 0.0
    alerts: AlertsSection = AlertsSection()
    prices: WorkerPrices | None = None

    def __post_init__(self) -> None:
        can_decode = any(worker.role is not Role.PREFILL for worker in self.addresses)
        if not (can_decode or self.members):
            raise ConfigError(
                "no worker can decode; give the gateway at least one --decode or --worker address, "
                "or a list that is followed: --members file:/PATH"
            )
        urls = [worker.url.rstrip("/") for worker in self.addresses]
        twice = {url for url in urls if urls.count(url) > 1}
        if twice:
            raise ConfigError(f"listed twice: {', '.join(sorted(twice))}")
        if len(set(self.members)) < len(self.members):
            raise ConfigError("gateway.members names a source twice")
        self.build_policy()
        self._check_announcements()
        check_alerts(self.alerts)
        self.build_sources(MachineClock())
        check_processes(self.processes, self.management_port)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError(
                "gateway.tls_certificate and gateway.tls_key go together: give both, or neither"
            )
        plain = [worker.url for worker in self.addresses if worker.is_plain]
        if plain and self.tls != "off":
            raise ConfigError(
                f"{plain[0]} does not prove who answers there: workers speak TLS, write https://; "
                'or set security.tls = "off" for workers and gateway alike, within a network that '
                "encrypts by itself"
            )
        if self.key_origin == "generated" and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host}: other machines could reach this gateway, and "
                "no cluster key is configured; set BATON_CLUSTER_KEY or listen on 127.0.0.1"
            )
        if not (is_loopback(self.host) or self.client_keys_file or self.insecure):
            raise ConfigError(
                f"refusing to listen on {self.host} without API keys: everybody who reaches it "
                "could use it; make some with: baton key client add --tenant NAME, and name the "
                "file with --client-keys; or give --insecure"
            )

    def targets_of(self, model: str) -> Targets:
        """What the operator wants for a model's requests."""
        for name in (model, ANY_MODEL):
            if name in self.targets:
                return self.targets[name]
        return NO_TARGETS

    @property
    def health(self) -> HealthOptions:
        """When a worker is ejected, and how it comes back."""
        return HealthOptions(self.ejection_s, self.slow_start_s)

    @property
    def policy_name(self) -> str:
        """The policy in use: workers that come and go may have any role, and `cost` suits all."""
        if self.policy is None and self.members:
            return "cost"
        return choose_policy(self.policy, [worker.role for worker in self.addresses])

    def build_policy(self) -> PlacementPolicy:
        """A new one of the policy in use, with its options.

        Raises:
            ConfigError: there is no such policy, or its options are wrong.
        """
        name = self.policy_name
        return POLICIES.build(name, self.policy_options.get(name, {}))(self.mode)

    def build_sources(
        self, clock: Clock, announced: AnnouncedWorkers | None = None
    ) -> tuple[NamedSource, ...]:
        """New ones of the sources of workers, in the operator's order; nothing is opened yet.

        `announced` is the source of that name, which takes announcements already.

        Raises:
            ConfigError: there is no such source, or its argument cannot be used.
        """
        sources: list[NamedSource] = []
        for text in self.members:
            if text != ANNOUNCED or self.announce_port is None:
                sources.append(build_source(text, clock, self.members_interval_s, self.tls))
            elif announced is not None:
                announced.status = SourceStatus(text, clock)
                sources.append(NamedSource(announced.status, announced))
        return tuple(sources)

    @property
    def is_managed_here(self) -> bool:
        """Whether /metrics and /debug are answered on the gateway's own port."""
        return self.management_port is None and (is_loopback(self.host) or self.insecure)

    def of_process(self, index: int, status_fd: int) -> GatewayOptions:
        """Of process `index` of several, which has own ports beside the shared one.

        They exchange announcements with each other.
        """
        own_port, announced = self.management_port, self._announced_urls()
        return structs.replace(
            self,
            status_fd=status_fd,
            processes=1,
            first_share=find_first_share(self.policy_name, index, self.processes),
            management_port=own_port and own_port + index,
            management_fds=self.management_fds[index : index + 1],
            announce_port=self.announce_port and self.announce_port + index,
            announce_url=announced[index] if announced else None,
            peers=(*self.peers, *(url for i, url in enumerate(announced) if i != index)),
        )

    def _announced_urls(self) -> list[str]:
        """Where each process takes announcements; none where they do not."""
        if self.announce_port is None:
            return []
        host = f"[{self.announce_host}]" if ":" in self.announce_host else self.announce_host
        first = URL(self.announce_url or f"https://{host}:{self.announce_port}").origin()
        return [str(first.with_port((first.port or 0) + i)) for i in range(self.processes)]

    def _check_announcements(self) -> None:
        if (self.announce_port is not None) != (ANNOUNCED in self.members):
            raise ConfigError(
                "gateway.announce_port and the source announced go together: give "
                "--members announced and --announce-port, or neither"
            )
        if self.announce_port is None:
            if self.peers:
                raise ConfigError(
                    "gateway.peers exchange announcements: give gateway.announce_port, too"
                )
            return
        require_https("gateway.peers", self.peers)
        if self.announce_url is not None:
            require_https("gateway.announce_url", (self.announce_url,))
        elif is_wildcard(self.announce_host):
            raise ConfigError(
                f"no other process can reach {self.announce_host}: give gateway.announce_url, as "
                "https://host:port, or a gateway.announce_host that others can reach"
            )
        if self.processes > 1 and self.announce_port == 0:
            raise ConfigError("several gateway processes need a fixed gateway.announce_port")
        if self.key_origin == "generated" and not is_loopback(self.announce_host):
            raise ConfigError(
                f"refusing to take announcements at {self.announce_host} without a configured "
                "cluster key; set BATON_CLUSTER_KEY"
            )
