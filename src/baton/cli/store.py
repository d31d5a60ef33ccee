"""`baton store`: what the store holds, whether it is whole, and what it is to keep."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from cyclopts import App, Parameter

from baton.cli.exit_codes import FAILED
from baton.cli.flags import ConfigFlags, StatusFd, Store
from baton.config.logs import configure_logging
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from baton.auth.key import ClusterKey
    from baton.store.counted_tier import CountedTier
    from baton.store.interface import EntryName, TenantLabel

MIB: Final = 1 << 20
MAX_PORT: Final = 65_535
ALL_DAMAGED: Final = (
    "baton: every entry looks damaged: is this the workers' cluster key? It is in "
    "BATON_CLUSTER_KEY, or in the file of [cluster] key_file. Entries of another version of Baton "
    "look damaged, too. Nothing was removed"
)

NOT_REMOVED: Final = (
    "entries are there still: a server refused to delete them, another process has held the lock "
    "of the tier's counts, or a worker has put them again"
)

NOT_READ: Final = (
    "entries are in the store and not in the file: a server refused them (archived objects), they "
    "are larger than the tier's max_entry_bytes, or the disk failed"
)

OWN_MEMORY: Final = (
    "tier host is each process's own memory, which no other process can look at: /metrics of a "
    "worker, or of `baton store serve`, shows how full it is"
)

app = App(name="store", help="Look at the store, check it, make room in it, keep it up.")

Json = Annotated[bool, Parameter(help="Print JSON.")]


@app.command
def stats(flags: ConfigFlags | None = None, *, store: Store = None, json: Json = False) -> int:
    """Print for each tier how many entries it holds, how full it is, and how old they are."""
    from baton.ops.store import look_at, print_stats  # noqa: PLC0415 - for --help

    with _open(flags, store) as (tiers, _):
        found = look_at(tiers)
    if json:
        _print_json(found)
    else:
        print_stats(found)
    return 0


@app.command(name="ls")
def list_entries(
    flags: ConfigFlags | None = None,
    *,
    store: Store = None,
    oldest: Annotated[bool, Parameter(help="The least recently used first.")] = False,
    limit: Annotated[int, Parameter(help="At most so many of each tier; 0: all.")] = 20,
    json: Json = False,
) -> int:
    """List entries of each tier: name, size, last use, and whether they are pinned."""
    from baton.ops import store as ops  # noqa: PLC0415 - for --help

    if limit < 0:
        raise ConfigError("--limit takes no negative number")
    with _open(flags, store) as (tiers, _):
        found = ops.list_entries(tiers, oldest_first=oldest, limit=limit)
    if json:
        _print_json(found)
    else:
        ops.print_entries(found)
    return 0


@app.command
def verify(
    flags: ConfigFlags | None = None,
    *,
    store: Store = None,
    remove: Annotated[bool, Parameter(help="Remove damaged entries.")] = False,
    json: Json = False,
) -> int:
    """Read every entry and compare it with its digest. Exit code 1: some are damaged or unreadable.

    The digests are keyed: with another cluster key than the workers' every entry looks damaged.
    """
    from baton.ops import store as ops  # noqa: PLC0415 - for --help

    with _open(flags, store) as (tiers, _):
        found = ops.verify(tiers, remove=remove)
    if json:
        _print_json(found)
    else:
        ops.print_checks(found)
    num_damaged = sum(each.num_damaged for each in found)
    if num_damaged and not any(each.num_whole for each in found):
        print(ALL_DAMAGED, file=sys.stderr)
    return FAILED if num_damaged + sum(each.num_unreadable for each in found) else 0


@app.command
def evict(  # noqa: PLR0913 - a flag each
    flags: ConfigFlags | None = None,
    *,
    store: Store = None,
    mebibytes: Annotated[
        float | None, Parameter(name="--mib", help="So much, the least recently used first.")
    ] = None,
    older_than_hours: Annotated[
        float | None, Parameter(help="What was not used for so long.")
    ] = None,
    tenant: Annotated[
        str | None, Parameter(help="One tenant's, by its label as `stats` prints it.")
    ] = None,
    salt_file: Annotated[
        Path | None, Parameter(help="One tenant's: the file has its requests' cache_salt.")
    ] = None,
    client_tenant: Annotated[
        str | None,
        Parameter(help="One tenant's, of `baton key client add`; with --salt-file, of that salt."),
    ] = None,
    all_entries: Annotated[bool, Parameter(name="--all", help="Everything.")] = False,
    json: Json = False,
) -> int:
    """Remove entries of every tier; workers that are reading them finish.

    Exit code 1: some are there still. A tenant's entries go even if they are pinned, as with --all.
    """
    from baton.ops import store as ops  # noqa: PLC0415 - for --help

    by_salt = salt_file is not None or client_tenant is not None
    wanted = (mebibytes is not None, older_than_hours is not None, tenant is not None, by_salt)
    if sum((*wanted, all_entries)) != 1:
        raise ConfigError(
            "give one of --mib, --older-than-hours, --all, --tenant, and --salt-file or "
            "--client-tenant"
        )
    _check_amount("--mib", mebibytes or 0)
    _check_amount("--older-than-hours", older_than_hours or 0)
    num_bytes = None if mebibytes is None else int(mebibytes * MIB)
    with _open(flags, store) as (tiers, key):
        label = None if tenant is None else _parse_label(tenant)
        if by_salt:
            label = _label_salt(key, salt_file, client_tenant)
        done = ops.evict(
            tiers, num_bytes=num_bytes, older_than_hours=older_than_hours, tenant=label
        )
    if json:
        _print_json(done)
    else:
        ops.print_evictions(done)
    num_left = sum(each.num_left for each in done)
    if num_left:
        print(f"baton: {num_left:,} {NOT_REMOVED}", file=sys.stderr)
    return FAILED if num_left else 0


@app.command
def pin(
    *names: str,
    flags: ConfigFlags | None = None,
    store: Store = None,
) -> int:
    """Keep entries: they are not evicted and do not expire, until `unpin`. Exit code 1: not there.

    Names are those of `ls`. At most half of a tier can be pinned.
    """
    return _change_pins(flags, store, names, "pin")


@app.command
def unpin(
    *names: str,
    flags: ConfigFlags | None = None,
    store: Store = None,
) -> int:
    """Let entries be evicted again. Exit code 1: one is not there."""
    return _change_pins(flags, store, names, "unpin")


@app.command(name="export")
def export_entries(
    file: Path,
    /,
    *names: str,
    flags: ConfigFlags | None = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Write entries into a file: those of these names (see `ls`), or all.

    Exit code 1: some are there and could not be read. The file has the others.
    """
    from baton.bench.files import check_writable  # noqa: PLC0415 - for --help
    from baton.ops.store_archive import export_entries as export  # noqa: PLC0415

    check_writable(file)
    wanted = [_parse_name(name) for name in names]
    with _open(flags, store) as (tiers, key):
        done = export(tiers, file, key, wanted)
    if json:
        _print_json(done)
    else:
        print(f"{done.num_entries:,} entries, {done.num_bytes:,} bytes: {file}")
    if done.num_unreadable:
        print(f"baton: {done.num_unreadable:,} {NOT_READ}", file=sys.stderr)
    return FAILED if done.num_unreadable else 0


@app.command(name="import")
def import_entries(
    file: Path,
    /,
    *,
    flags: ConfigFlags | None = None,
    store: Store = None,
    json: Json = False,
) -> int:
    """Put the entries of an exported file into the store. Exit code 1: some found no room.

    All of the file is checked before the first is put. Both sides need the same cluster key.
    """
    from baton.ops.store_archive import check_archive  # noqa: PLC0415 - for --help
    from baton.ops.store_archive import import_entries as import_  # noqa: PLC0415

    check_archive(file)
    with _open(flags, store, may_create=True) as (tiers, key):
        done = import_(tiers, file, key)
    if json:
        _print_json(done)
    else:
        print(
            f"{done.num_entries:,} entries, {done.num_bytes:,} bytes; {done.num_present:,} were"
            f" there already, {done.num_refused:,} found no room"
        )
    return FAILED if done.num_refused else 0


@app.command
def serve(
    flags: ConfigFlags | None = None,
    *,
    store: Store = None,
    port: Annotated[
        int, Parameter(help="For /metrics and /health on 127.0.0.1; 0: a free one.")
    ] = 8009,
    listen: Annotated[
        str | None,
        Parameter(help="HOST:PORT where workers read and write its tier host (their tier peer)."),
    ] = None,
    verify_mib_per_s: Annotated[
        float,
        Parameter(help="This host's entries are read and checked at this rate; 0: not at all."),
    ] = 8.0,
    status_fd: StatusFd = 1,
) -> int:
    """Keep the store up without workers: the shared tier stays, expired entries go, room is made.

    With --store host --listen: this process's memory is a tier of workers on other hosts.

    Runs until SIGTERM or SIGINT.
    """
    from baton.ops.store_daemon import run_store_daemon  # noqa: PLC0415 - for --help

    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port {port}: give a number from 0 to {MAX_PORT}")
    _check_amount("--verify-mib-per-s", verify_mib_per_s)
    config = (flags or ConfigFlags()).resolve().to_config()
    configure_logging(config.log)
    with _open(flags, store, may_create=True, serves=True, listen=listen) as (tiers, _):
        run_store_daemon(
            tiers, port=port, verify_bytes_per_s=int(verify_mib_per_s * MIB), status_fd=status_fd
        )
    return 0


def _change_pins(
    flags: ConfigFlags | None,
    store: tuple[str, ...] | None,
    names: tuple[str, ...],
    change: Literal["pin", "unpin"],
) -> int:
    from baton.ops.store import change_pins  # noqa: PLC0415 - for --help

    if not names:
        raise ConfigError(f"{change} takes the names of entries, as `baton store ls` prints them")
    with _open(flags, store) as (tiers, _):
        missing = change_pins(tiers, [_parse_name(name) for name in names], change)
    for name in missing:
        print(f"baton: no tier that pins entries has {name.hex()}", file=sys.stderr)
    return FAILED if missing else 0


def _check_amount(flag: str, amount: float) -> None:
    if not 0 <= amount < float("inf"):
        raise ConfigError(f"{flag} takes no negative number, nor inf or nan")


def _parse_name(text: str) -> "EntryName":
    from baton.store.interface import NAME_BYTES, EntryName  # noqa: PLC0415 - for --help

    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b""
    if len(name) != NAME_BYTES:
        raise ConfigError(f"{text!r} is no entry's name: 64 hex digits, as `baton store ls` prints")
    return EntryName(name)


def _parse_label(text: str) -> "TenantLabel":
    from baton.store.interface import TENANT_BYTES, TenantLabel  # noqa: PLC0415 - for --help

    try:
        label = bytes.fromhex(text)
    except ValueError:
        label = b""
    if len(label) != TENANT_BYTES or not any(label):
        raise ConfigError(
            f"{text!r} is no tenant's label: 16 hex digits, as `baton store stats` prints"
        )
    return TenantLabel(label)


def _label_salt(
    key: "ClusterKey", salt_file: Path | None, client_tenant: str | None
) -> "TenantLabel":
    """The label of the tenant whose requests have this salt, or this API key's tenant."""
    from baton.auth.ticket import bind_salt, hash_tenant  # noqa: PLC0415 - for --help
    from baton.handoff.pool_mode.store_access import label_tenant  # noqa: PLC0415

    try:
        salt = salt_file.read_text("utf-8").removesuffix("\n") if salt_file else ""
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"cannot read a cache_salt from {salt_file}: {exc}") from exc
    if not salt and client_tenant is None:
        raise ConfigError(f"{salt_file} is empty: a tenant has a cache_salt")
    if client_tenant is not None:
        salt = bind_salt(client_tenant, salt)
    return label_tenant(key, hash_tenant(salt))


@contextmanager
def _open(
    flags: ConfigFlags | None,
    tiers: tuple[str, ...] | None,
    *,
    may_create: bool = False,
    serves: bool = False,
    listen: str | None = None,
) -> "Generator[tuple[Sequence[CountedTier], ClusterKey]]":
    """The tiers that the configuration names, or `--store`, and the cluster's key.

    Without `host`, which is each process's own, unless this one `serves`: other processes are
    answered where the tier `host` is to listen, or at `listen`.

    Raises:
        ConfigError: there are none, they cannot be opened, or the cluster's key is not known.
    """
    from baton.auth.certificates import IdentityRole  # noqa: PLC0415 - for --help
    from baton.config.environment import read_environment  # noqa: PLC0415
    from baton.net.credentials import find_credentials  # noqa: PLC0415
    from baton.net.tls import ClusterTls  # noqa: PLC0415
    from baton.ops.store import open_tiers  # noqa: PLC0415
    from baton.store.interface import PeerAccess  # noqa: PLC0415
    from baton.store.peer.addresses import find_listen_hosts  # noqa: PLC0415

    config = (flags or ConfigFlags()).resolve().to_config()
    kinds = tiers or config.store.tiers
    if not kinds:
        raise ConfigError(
            "no store is configured: give --store shared,file, or the workers' --config FILE"
        )
    if not serves:
        kinds = tuple(kind for kind in kinds if kind != "host")
        if not kinds:
            raise ConfigError(OWN_MEMORY)
    options = config.store.options
    if listen is not None:
        if kinds != ("host",):
            raise ConfigError("--listen shows the tier host to other processes: give --store host")
        host = {**options.get("host", {}), "listen": listen, "peers_may": "write"}
        options = {**options, "host": host}
    hosts = find_listen_hosts(kinds, options) if serves else ()
    credentials = find_credentials(
        config.cluster, config.security, read_environment(), hosts
    ).credentials
    if hosts:
        credentials.require(IdentityRole.WORKER)
    tls = ClusterTls(credentials) if config.security.tls == "all" else None
    peers = PeerAccess(credentials, tls, serves=serves)
    with open_tiers(kinds, options, credentials.key, may_create=may_create, peers=peers) as opened:
        yield opened, credentials.key


def _print_json(found: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
