"""`baton key`: keys of clients, certificates for programs that are not Baton's."""

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from baton.cli.flags import ConfigFlags
from baton.config.environment import read_environment, state_directory
from baton.errors import ConfigError

DAY_S = 86_400

app = App(name="key", help="Make, list and remove keys.", help_format="plaintext")
client = App(name="client", help="API keys of the gateway's clients.", help_format="plaintext")
app.command(client)

File = Annotated[
    Path | None,
    Parameter(help="The file of keys [default: clients.json among this user's state]."),
]


@client.command(name="add")
def add(
    *,
    tenant: Annotated[str, Parameter(help="Whose it is; clients of one tenant may share KV.")],
    expires_days: Annotated[int | None, Parameter(help="Days for which it is good.")] = None,
    max_inflight: Annotated[int | None, Parameter(help="Requests at once.")] = None,
    requests_per_minute: Annotated[int | None, Parameter(help="Requests in a minute.")] = None,
    priority: Annotated[
        Literal["low", "normal", "high"], Parameter(help="Which places it may fill.")
    ] = "normal",
    file: File = None,
) -> int:
    """Make an API key and print it: it is shown this once. A running gateway takes it up."""
    import msgspec  # noqa: PLC0415 - for --help

    from baton.clock import MachineClock  # noqa: PLC0415
    from baton.gateway.clients import make_key, read_keys, write_keys  # noqa: PLC0415

    path = file or _default_file()
    keys = read_keys(path) if path.exists() else ()
    expires_at = None
    if expires_days is not None:
        expires_at = int(MachineClock().unix_now()) + expires_days * DAY_S
    text, kept = make_key(
        tenant,
        expires_at=expires_at,
        max_inflight=max_inflight,
        requests_per_minute=requests_per_minute,
        priority=priority,
    )
    try:
        msgspec.convert(msgspec.to_builtins(kept), type=type(kept))  # its fields' bounds
    except msgspec.ValidationError as exc:
        raise ConfigError(f"no such key can be made: {exc}") from exc
    write_keys(path, (*keys, kept))
    print(text)
    return 0


@client.command(name="list")
def show(*, file: File = None) -> int:
    """List the keys: never their secrets, which are not kept."""
    from datetime import UTC, datetime  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from baton.gateway.clients import read_keys  # noqa: PLC0415

    table = Table("id", "tenant", "expires", "at once", "a minute", "priority")
    for key in read_keys(file or _default_file()):
        expires = key.expires_at and datetime.fromtimestamp(key.expires_at, UTC).isoformat()
        limits = (key.max_inflight, key.requests_per_minute)
        shown = ("" if limit is None else str(limit) for limit in limits)
        table.add_row(key.id, key.tenant, expires or "never", *shown, key.priority)
    Console().print(table)
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
    keys = read_keys(path)
    wanted = key_id.removeprefix("bk-").partition("-")[0]
    left = tuple(key for key in keys if key.id != wanted)
    if len(left) == len(keys):
        raise ConfigError(f"{path} has no key with the id {wanted!r}; see: baton key client list")
    write_keys(path, left)
    return 0


@app.command(name="certificate")
def certificate(
    *,
    directory: Annotated[Path, Parameter(help="Where its three files go; made if need be.")],
    name: Annotated[str, Parameter(help="Whose it is, in logs.")] = "client",
    flags: ConfigFlags | None = None,
) -> int:
    """Write a certificate of the cluster, by which vllm serve, Prometheus or curl take part."""
    from baton.auth.certificates import make_identity  # noqa: PLC0415
    from baton.auth.key import ClusterKey  # noqa: PLC0415
    from baton.config.cluster_key import find_cluster_key  # noqa: PLC0415

    section = (flags or ConfigFlags()).resolve().to_config().cluster
    key = ClusterKey.from_hex(find_cluster_key(section, read_environment(), ()).text)
    identity = make_identity(key, name)
    files = {
        "certificate.pem": identity.certificate,
        "key.pem": identity.private_key,
        "authority.pem": identity.authority,
    }
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file_name, content in files.items():
            (directory / file_name).unlink(missing_ok=True)
            flags_and_mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
            with os.fdopen(os.open(directory / file_name, *flags_and_mode), "wb") as file:
                file.write(content)
    except OSError as exc:
        raise ConfigError(f"cannot write to {directory}: {exc.strerror}") from exc
    print("\n".join(str(directory / file_name) for file_name in files))
    return 0


def _default_file() -> Path:
    return state_directory(read_environment()) / "clients.json"
