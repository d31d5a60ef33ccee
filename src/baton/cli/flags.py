"""Flags as dataclasses: each field names the setting it sets."""

# Annotations are read at run time here and in the commands' modules: cyclopts parses by them.
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

from cyclopts import Group, Parameter, Token

from baton.config.environment import read_environment
from baton.config.resolve import CommandLine, Resolved, resolve
from baton.config.sections import TransferSection
from baton.errors import ConfigError

CONFIGURATION = Group("Configuration", sort_key=1)


@dataclass(frozen=True, slots=True)
class Sets:
    """Marks a flag's field with the key that it sets; None: the flag was not given."""

    key: str


def chosen_transports(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """What `--transport` means: `auto` is the default preference, else that one alone."""
    kind = tokens[0].value
    return TransferSection().transports if kind == "auto" else (kind,)


def chosen_tiers(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    """What `--store` means: kinds of tiers with commas between them."""
    return tuple(word.strip() for word in tokens[0].value.split(",") if word.strip())


StatusFd = Annotated[
    int,
    Parameter(help="File descriptor that gets JSON lines for a launcher.", show=False),
]
Fleet = Annotated[
    str,
    Parameter(
        help="Name of the fleet; several may run under different names. On Kubernetes: "
        "[NAMESPACE/]RELEASE [default: the only release]."
    ),
]
LOCAL = "local"
On = Annotated[
    str, Parameter(help="Where the fleet runs: local (this machine), ray or kubernetes.")
]
InheritedFds = Annotated[
    str,
    Parameter(help="Bound sockets of a launcher: numbers with commas between.", show=False),
]
Model = Annotated[
    str | None, Sets("worker.model"), Parameter(help="A model's folder [default: the demo].")
]
Engine = Annotated[
    str | None, Sets("worker.engine"), Parameter(help="transformers (default), vllm, or another.")
]
Mode = Annotated[
    Literal["auto", "push", "pull", "pool", "reference", "colocated"] | None,
    Sets("gateway.mode"),
    Parameter(help="How KV is handed over [default: auto]."),
]
Policy = Annotated[
    str | None,
    Sets("router.policy"),
    Parameter(
        help="How workers are chosen: round_robin, random, least_loaded, prefix, cost [default: "
        "cost for several workers of which some do both parts, else round_robin]."
    ),
]
ClientKeys = Annotated[
    Path | None,
    Sets("gateway.client_keys_file"),
    Parameter(help="File of API keys (baton key client add); needed beyond loopback."),
]
Gateways = Annotated[
    int | None,
    Sets("gateway.processes"),
    Parameter(help="Gateway processes on the one port [default: 1]; need --management-port."),
]
ManagementPort = Annotated[
    int | None,
    Sets("gateway.management_port"),
    Parameter(help="Port for /metrics and /debug; of process i of --gateways, this plus i."),
]
TlsCertificate = Annotated[
    Path | None,
    Sets("gateway.tls_certificate"),
    Parameter(help="PEM file: serve clients over TLS with this certificate."),
]
TlsKey = Annotated[
    Path | None,
    Sets("gateway.tls_key"),
    Parameter(help="PEM file with the private key of --tls-certificate."),
]
Insecure = Annotated[
    bool | None,
    Sets("gateway.insecure"),
    Parameter(help="Listen beyond loopback without API keys."),
]
Transport = Annotated[
    tuple[str, ...] | None,
    Sets("transfer.transports"),
    Parameter(
        help="auto, or the one transport to use: shared, tcp, or cuda_ipc (one GPU host).",
        converter=chosen_transports,
        n_tokens=1,
    ),
]
RayAddress = Annotated[
    str | None,
    Sets("ray.address"),
    Parameter(help="Ray's head, as HOST:PORT [default: RAY_ADDRESS, else this host's Ray]."),
]
Store = Annotated[
    tuple[str, ...] | None,
    Sets("store.tiers"),
    Parameter(
        help="Keep KV in these tiers, the quickest first: host, shared, file, peer, redis, object.",
        converter=chosen_tiers,
        n_tokens=1,
    ),
]


def read_api_key(variable: str) -> str | None:
    """The API key of an environment variable; files and secrets may end it with a line break.

    Raises:
        ConfigError: no header can have it.
    """
    key = read_environment().get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{variable} has a character that no header can have")
    return key or None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ConfigFlags:
    """The flags of every command that reads the configuration."""

    config: Annotated[
        Path | None,
        Parameter(help="A TOML file; see docs/configuration.md.", group=CONFIGURATION),
    ] = None
    assignments: Annotated[
        list[str],
        Parameter(
            name="--set",
            help="Any setting, as section.key=value; may be repeated.",
            group=CONFIGURATION,
        ),
    ] = field(default_factory=list)
    debug: Annotated[
        bool, Parameter(help="Log everything; show where an error arose.", group=CONFIGURATION)
    ] = False

    def resolve(self) -> Resolved:
        """All settings, from every source.

        Raises:
            ConfigError: a source is unreadable or has an invalid value.
        """
        given = dict(self._given())
        if self.debug:
            given["log.level"] = ("--debug", "debug")
        command_line = CommandLine(self.config, given, self.assignments)
        return resolve(command_line, read_environment())

    def _given(self) -> Iterator[tuple[str, tuple[str, object]]]:
        hints = get_type_hints(type(self), include_extras=True)
        for flag in fields(self):
            value = getattr(self, flag.name)
            for mark in getattr(hints[flag.name], "__metadata__", ()):
                if isinstance(mark, Sets) and value is not None:
                    setting = str(value) if isinstance(value, Path) else value
                    yield mark.key, (f"--{flag.name.replace('_', '-')}", setting)
