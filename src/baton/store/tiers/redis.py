"""`redis`: a Redis or Valkey server that workers of several hosts share.

The server bounds itself: `maxmemory` and its policy are its operator's, who sees all that it keeps.
Each entry expires when it was not used for `ttl_s`, so policies that evict only keys that expire
work, too. Keys: `baton:<cluster>:<name>`, values as in a folder's files.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from yarl import URL

from baton.clock import MachineClock
from baton.config.cluster_key import find_readers
from baton.config.environment import read_environment
from baton.errors import ConfigError, StoreError, StoreFullError
from baton.registry import Plugin
from baton.store.remote.client import RemoteValue, RequestRefusedError, ServerReport
from baton.store.remote.tier import RemoteLimits, RemoteTier

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as exc:
    raise ConfigError("tier redis needs redis-py: pip install 'baton-kv[redis]'") from exc

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from baton.clock import Clock
    from baton.store.interface import TierContext, TierFactory

PASSWORD_VARIABLE: Final = "BATON_REDIS_PASSWORD"  # noqa: S105 - the name of a variable
NAMES_PER_COUNT: Final = 32
KEYS_PER_PAGE: Final = 1000
_NUM_READ_AHEAD: Final = 2
_READ_BYTES: Final = 1 << 18
"""Of the socket at once: fewer system calls for a large value."""


class RedisTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`url`: `redis://HOST:PORT/DB`, `rediss://…` (TLS) or `unix:///PATH`, without a password.

    The password is in `password_file` or in BATON_REDIS_PASSWORD. `ca_file`: of the server's
    authority, where the system does not know it; `certificate_file`, `key_file`: this client's, if
    the server asks for one. All workers need the same `max_entry_bytes`. `compress`: bodies are
    kept in fewer bytes, without loss; versions without this setting take them for damaged.
    """

    url: str
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.5
    ttl_s: Annotated[float, msgspec.Meta(ge=1)] = 86_400.0
    max_entry_bytes: Annotated[int, msgspec.Meta(ge=1, le=(512 << 20) - 4096)] = 64 << 20
    buffer_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 << 20
    compress: bool = False


class RedisClient:
    """See `RemoteClient`. Keys have the cluster's prefix."""

    def __init__(self, options: RedisTierOptions, cluster: str, clock: Clock) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: the URL or the files make no sense.
        """
        self._prefix, self._ttl_ms = f"baton:{cluster}:", int(options.ttl_s * 1000)
        self._clock = clock
        settings: dict[str, Any] = {**_parse_url(options.url), **_read_secrets(options)}
        self._redis = redis.Redis(
            **settings,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            socket_read_size=_READ_BYTES,
            retry=Retry(NoBackoff(), 1),  # the server may have closed an idle connection
            retry_on_error=[redis.ConnectionError],
            protocol=2,
        )

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """See `RemoteClient`: counts of many at once, then each of those that are there in part."""
        full = [self._prefix + key for key in keys]
        groups = [full[at : at + NAMES_PER_COUNT] for at in range(0, len(full), NAMES_PER_COUNT)]
        with _mapped(), self._redis.pipeline(transaction=False) as pipeline:
            for group in groups:
                pipeline.exists(*group)
            counts = pipeline.execute()
            partly = [g for g, n in zip(groups, counts, strict=True) if 0 < n < len(g)]
            for key in (key for group in partly for key in group):
                pipeline.exists(key)
            singles = iter(pipeline.execute())
        found: list[bool] = []
        for group, count in zip(groups, counts, strict=True):
            is_partly = 0 < count < len(group)
            found += [bool(next(singles) if is_partly else count) for _ in group]
        return found

    def read(self, key: str, max_bytes: int) -> bytes | None:
        with _mapped(), self._redis.pipeline(transaction=False) as pipeline:
            pipeline.getrange(self._prefix + key, 0, max_bytes - 1)
            pipeline.exists(self._prefix + key)
            return _take_value(pipeline.execute(raise_on_error=False))

    def use(self, key: str, max_bytes: int) -> bytes | None:
        with _mapped(), self._redis.pipeline(transaction=False) as pipeline:
            pipeline.getrange(self._prefix + key, 0, max_bytes - 1)
            pipeline.pexpire(self._prefix + key, self._ttl_ms)
            return _take_value(pipeline.execute(raise_on_error=False))

    def put(self, key: str, value: bytes) -> bool:
        with _mapped():
            is_new = self._redis.set(self._prefix + key, value, nx=True, px=self._ttl_ms)
            if not is_new:
                self._redis.pexpire(self._prefix + key, self._ttl_ms)
        return bool(is_new)

    def delete(self, key: str) -> None:
        with _mapped():
            self._redis.unlink(self._prefix + key)

    def list_values(self, max_values: int) -> list[RemoteValue]:
        """See `RemoteClient`. The last use follows from the time to live."""
        found: list[RemoteValue] = []
        cursor = 0
        with _mapped():
            while len(found) < max_values:
                cursor, keys = self._redis.scan(cursor, f"{self._prefix}*", KEYS_PER_PAGE)
                found += self._look_at(keys)
                if cursor == 0:
                    break
        return found[:max_values]

    def report(self) -> ServerReport:
        """See `RemoteClient`.

        Raises:
            ConfigError: the server does not know this user or password.
            StoreError: it is a replica, which takes nothing, nor counts what is read as used.
        """
        try:
            with _mapped():
                info = self._redis.info()
                if info.get("role") == "slave" and info.get("slave_read_only", 1):
                    raise StoreError("redis: the server is a read-only replica")
                return _read_report(info)
        except RequestRefusedError as exc:
            if isinstance(exc.__cause__, redis.AuthenticationError):
                raise ConfigError(f"store.options.redis: {exc}") from exc
            raise

    def disconnect(self) -> None:
        """See `RemoteClient`."""
        self._redis.connection_pool.disconnect(inuse_connections=True)

    def _look_at(self, keys: Sequence[bytes | str]) -> list[RemoteValue]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.strlen(key)
                pipeline.pttl(key)
            answers = pipeline.execute(raise_on_error=False)
        now = self._clock.unix_now()
        found = []
        for key, num_bytes, left_ms in zip(keys, answers[::2], answers[1::2], strict=True):
            if isinstance(num_bytes, int) and isinstance(left_ms, int) and left_ms > 0:
                name = str(key, "ascii", "replace") if isinstance(key, bytes) else key
                name = name.removeprefix(self._prefix)
                found.append(RemoteValue(name, num_bytes, now - (self._ttl_ms - left_ms) / 1000))
        return found


@dataclass(frozen=True, slots=True)
class RedisTierFactory:
    """See `TierFactory` and `ReportsServer`."""

    options: RedisTierOptions

    def __call__(self, context: TierContext) -> RemoteTier:
        options = self.options
        limits = RemoteLimits(
            timeout_s=options.timeout_s,
            max_entry_bytes=options.max_entry_bytes,
            buffer_bytes=options.buffer_bytes,
            compresses=options.compress,
            num_read_ahead=_NUM_READ_AHEAD,
            num_writers=1,  # entries appear in the order in which they were put
        )
        client = RedisClient(options, context.cluster, context.clock)
        return RemoteTier("redis", client, limits, context)

    def report(self) -> ServerReport:
        """See `ReportsServer`."""
        client = RedisClient(self.options, "doctor", MachineClock())
        try:
            return client.report()
        finally:
            client.disconnect()


def _take_value(answers: Sequence[Any]) -> bytes | None:
    """A value and whether its key is there; nothing is none, and what is no string is no entry."""
    value, is_there = answers
    if isinstance(value, redis.ResponseError) and str(value).startswith("WRONGTYPE"):
        return b""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    if value is not None and not isinstance(value, bytes):
        return b""
    return value if value or is_there else None


@contextmanager
def _mapped() -> Generator[None]:
    """Translate redis-py's errors."""
    try:
        yield
    except redis.exceptions.OutOfMemoryError as exc:
        raise StoreFullError(f"redis: {exc}") from exc
    except redis.exceptions.ReadOnlyError as exc:  # after a failover, on an old connection
        raise StoreError(f"redis: {exc}") from exc
    except (redis.ResponseError, redis.AuthenticationError) as exc:
        raise RequestRefusedError(f"redis: {exc}") from exc
    except (redis.RedisError, OSError, ValueError, AttributeError, TypeError) as exc:
        # The last three: an answer of another type, or another thread has closed the connection.
        raise StoreError(f"redis: {exc}") from exc


def _parse_url(text: str) -> Mapping[str, object]:
    """Where the server is, in redis-py's words.

    Raises:
        ConfigError: it is no such URL, or holds a password, which a log might show.
    """
    expected = "redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///PATH"
    try:
        url = URL(text)
        port, database = url.port, url.path.strip("/")
    except ValueError:
        raise ConfigError(f"store.options.redis.url is no URL; it is {expected}") from None
    if url.user is not None or url.password is not None or url.query_string:
        raise ConfigError(
            "store.options.redis.url: put the user into `username`, and the password into "
            f"`password_file` or {PASSWORD_VARIABLE}"
        )
    if url.scheme == "unix" and url.path:
        return {"unix_socket_path": url.path}
    if url.scheme not in {"redis", "rediss"} or not url.host or not (database or "0").isdigit():
        raise ConfigError(f"store.options.redis.url is {expected}, not {text}")
    return {
        "host": url.host,
        "port": port or 6379,
        "db": int(database or 0),
        "ssl": url.scheme == "rediss",
    }


def _read_secrets(options: RedisTierOptions) -> Mapping[str, object]:
    """User, password and files of TLS, in redis-py's words.

    Raises:
        ConfigError: a file cannot be read, or others can read the password.
    """
    settings: dict[str, object] = {"username": options.username}
    if options.password_file is not None:
        settings["password"] = _read_password(Path(options.password_file).expanduser())
    else:
        settings["password"] = read_environment().get(PASSWORD_VARIABLE)
    if options.url.startswith("rediss:"):
        settings["ssl_ca_certs"] = options.ca_file
        settings["ssl_certfile"], settings["ssl_keyfile"] = (
            options.certificate_file,
            options.key_file,
        )
    return settings


def _read_password(path: Path) -> str:
    try:
        others = find_readers(path.stat())
        password = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"store.options.redis.password_file: {exc}") from exc
    if others:
        raise ConfigError(f"other users can read the password: run `chmod 600 {path}`")
    return password


def _read_report(info: Mapping[str, Any]) -> ServerReport:
    product = "Valkey" if "valkey_version" in info else "Redis"
    return ServerReport(
        product=product,
        version=str(info.get("valkey_version", info.get("redis_version", ""))),
        used_bytes=int(info.get("used_memory", 0)),
        capacity_bytes=int(info.get("maxmemory", 0)),
        eviction=str(info.get("maxmemory_policy", "")) or None,
    )


def _build(options: RedisTierOptions) -> TierFactory:
    return RedisTierFactory(options)


PLUGIN = Plugin(RedisTierOptions, _build)
