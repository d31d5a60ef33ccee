"""`baton key`: keys of clients, identities of gateways, workers and monitors."""

import fcntl
import os
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from baton.cli.flags import ConfigFlags
from baton.config.environment import read_environment, state_directory
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

    from baton.auth.key import ClusterKey

DAY_S = 86_400
MAX_DAYS = 36_500

app = App(
    name="key", help="Make, show, rotate and revoke keys and identities.", help_format="plaintext"
)
client = App(name="client", help="API keys of the gateway's clients.", help_format="plaintext")
app.command(client)

File = Annotated[
    Path | None,
    Parameter(help="The file of keys [default: clients.json among this user's state]."),
]


@client.command(name="add")
def add(  # noqa: PLR0913 - one for each option
    *,
    tenant: Annotated[str, Parameter(help="Whose it is; clients of one tenant may share KV.")],
    expires_days: Annotated[int | None, Parameter(help="Days for which it is good.")] = None,
    max_inflight: Annotated[int | None, Parameter(help="Requests at once.")] = None,
    requests_per_minute: Annotated[int | None, Parameter(help="Requests in a minute.")] = None,
    priority: Annotated[
        Literal["low", "normal", "high"],
        Parameter(help="Which places it may fill, and before whom it is served."),
    ] = "normal",
    weight: Annotated[
        float, Parameter(help="What it gets while requests wait, relative to other tenants.")
    ] = 1.0,
    file: File = None,
) -> int:
    """Make an API key and print it: it is shown this once. A running gateway takes it up."""
    import msgspec  # noqa: PLC0415 - for --help

    from baton.clock import MachineClock  # noqa: PLC0415
    from baton.gateway.clients import make_key, read_keys, write_keys  # noqa: PLC0415

    path = file or _default_file()
    expires_at = None
    if expires_days is not None:
        if not 1 <= expires_days <= MAX_DAYS:
            raise ConfigError(f"--expires-days: a number above 0, at most {MAX_DAYS}")
        expires_at = int(MachineClock().unix_now()) + expires_days * DAY_S
    text, kept = make_key(
        tenant,
        expires_at=expires_at,
        max_inflight=max_inflight,
        requests_per_minute=requests_per_minute,
        priority=priority,
        weight=weight,
    )
    try:
        msgspec.convert(msgspec.to_builtins(kept), type=type(kept))  # its fields' bounds
    except msgspec.ValidationError as exc:
        raise ConfigError(f"no such key can be made: {exc}") from exc
    with suppress(OSError):  # `write_keys` reports it
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(path):
        write_keys(path, (*(read_keys(path) if path.exists() else ()), kept))
    print(text)
    return 0


@client.command(name="list")
def show(*, file: File = None) -> int:
    """List the keys: never their secrets, which are not kept."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from baton.gateway.clients import read_keys  # noqa: PLC0415

    table = Table("id", "tenant", "expires", "at once", "a minute", "priority", "weight")
    for key in read_keys(file or _default_file()):
        expires = "never" if key.expires_at is None else _show_time(key.expires_at)
        limits = (key.max_inflight, key.requests_per_minute)
        shown = ("" if limit is None else str(limit) for limit in limits)
        rank = (key.priority, f"{key.weight:g}")
        table.add_row(key.id, key.tenant, expires, *shown, *rank)
    Console(markup=False, highlight=False, soft_wrap=True).print(table)
    return 0


@client.command(name="remove")
def remove(
    key_id: Annotated[str, Parameter(help="The id of the key, or the key itself.")],
    *,
    file: File = None,
) -> int:
    """Remove a key: a running gateway refuses it from the next second on."""
    from baton.gateway.clients import read_keys, write_keys  # noqa: PLC0415

    path = file or _default_file()
    wanted = key_id.removeprefix("bk-").partition("-")[0]
    with _alone(path):
        keys = read_keys(path)
        left = tuple(key for key in keys if key.id != wanted)
        if len(left) == len(keys):
            raise ConfigError(
                f"{path} has no key with the id {wanted!r}; see: baton key client list"
            )
        write_keys(path, left)
    return 0


@contextmanager
def _alone(path: Path) -> "Generator[None]":
    """Change a file of keys alone: of two commands at once, one undoes what the other did.

    Nothing waits where there is no folder yet, or its filesystem has no locks.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _show_time(unix_s: int) -> str:
    from datetime import UTC, datetime  # noqa: PLC0415 - for --help

    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat()
    except (ValueError, OverflowError, OSError):  # beyond the year 9999
        return f"{unix_s}, Unix time"


Directory = Annotated[Path, Parameter(help="The directory; made if need be.")]
AuthorityDirectory = Annotated[
    Path | None,
    Parameter(help="The authority's directory [default: the cluster key's own authority]."),
]
RoleName = Annotated[
    Literal["gateway", "worker", "monitor"], Parameter(help="What its holder may do.")
]


@app.command(name="authority")
def make_authority(directory: Directory) -> int:
    """Make an authority, which issues identities: keep its directory where nothing serves."""
    from baton.auth.issuing import create_authority  # noqa: PLC0415 - for --help

    create_authority(directory)
    print(f"{directory}: an authority; next: baton key issue --authority {directory} …")
    return 0


@app.command(name="issue")
def issue(
    directory: Directory,
    *,
    role: RoleName,
    name: Annotated[str, Parameter(help="A worker's name, or what logs are to show.")],
    authority: AuthorityDirectory = None,
    expires_days: Annotated[int | None, Parameter(help="Days for which it is good.")] = None,
    flags: ConfigFlags | None = None,
) -> int:
    """Make an identity: a certificate and its key, for one process (`security.identity`)."""
    from baton.auth import issuing  # noqa: PLC0415 - for --help

    order = issuing.Order(role, name, expires_days)
    if authority is not None:
        issuing.issue(order, authority, directory)
    else:
        issuing.issue_derived(order, _cluster_keys(flags), directory)
    print("\n".join(str(path) for path in sorted(directory.iterdir())))
    return 0


@app.command(name="rotate")
def rotate(
    directory: Annotated[Path, Parameter(help="The identity's directory.")],
    *,
    authority: Annotated[Path, Parameter(help="The authority's directory: a new one, perhaps.")],
    expires_days: Annotated[int | None, Parameter(help="Days for which it is good.")] = None,
    trust_only: Annotated[
        bool, Parameter(help="Trust this authority too, and keep the certificate.")
    ] = False,
    drop_old: Annotated[bool, Parameter(help="Trust no other authority any more.")] = False,
) -> int:
    """Renew an identity where it lies; its process takes it up within a second.

    To change the authority: first --trust-only for all, then renew all, then --drop-old for all.
    """
    from baton.auth.issuing import renew  # noqa: PLC0415 - for --help

    renew(
        directory,
        authority,
        expires_days=expires_days,
        keeps_certificate=trust_only,
        drops_others=drop_old,
    )
    return 0


@app.command(name="revoke")
def revoke(
    which: Annotated[str, Parameter(help="A serial number (hex), or a name: all of that name.")],
    *,
    authority: Annotated[Path, Parameter(help="The authority's directory.")],
) -> int:
    """Revoke certificates: copy ca.crl of the authority to all identities' directories."""
    from baton.auth.issuing import revoke as revoke_certificates  # noqa: PLC0415 - for --help

    for issued in revoke_certificates(which, authority):
        print(f"revoked {issued.serial_number} ({issued.role} {issued.name})")
    print(f"copy {authority / 'ca.crl'} to the directories of all identities")
    return 0


@app.command(name="show")
def show_identity(
    directory: Annotated[Path, Parameter(help="An identity's directory, or an authority's.")],
) -> int:
    """Show an identity, or what an authority has issued: never a private key."""
    from rich.console import Console  # noqa: PLC0415 - for --help
    from rich.table import Table  # noqa: PLC0415

    from baton.auth.issuing import describe  # noqa: PLC0415

    table = Table("role", "name", "serial number", "good until", "")
    for row in describe(directory):
        table.add_row(*row)
    Console(markup=False, highlight=False, soft_wrap=True).print(table)
    return 0


@app.command(name="fingerprint")
def show_fingerprints(*, flags: ConfigFlags | None = None) -> int:
    """Print the fingerprint of this host's cluster key, to be compared with another host's.

    Of several keys the first is the one that processes here show; the others they accept.
    """
    from baton.config.cluster_key import find_existing_key  # noqa: PLC0415 - for --help
    from baton.net.credentials import parse_keys  # noqa: PLC0415

    section = (flags or ConfigFlags()).resolve().to_config().cluster
    found = find_existing_key(section, read_environment())
    for key in parse_keys(found.text):
        print(f"{key.fingerprint}  {found.path or 'BATON_CLUSTER_KEY'}")
    return 0


def _cluster_keys(flags: ConfigFlags | None) -> "list[ClusterKey]":
    from baton.config.cluster_key import find_cluster_key  # noqa: PLC0415
    from baton.net.credentials import parse_keys  # noqa: PLC0415

    section = (flags or ConfigFlags()).resolve().to_config().cluster
    return parse_keys(find_cluster_key(section, read_environment(), ()).text)


def _default_file() -> Path:
    return state_directory(read_environment()) / "clients.json"
