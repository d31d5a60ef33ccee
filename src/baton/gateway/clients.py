"""Clients and their API keys: who may ask, as which tenant, and how much at once.

A key is `bk-ID-SECRET`; the file of keys has SHA-256 of each secret (256 random bits: no slow hash
is needed) and is read again when it changes. Without a file everybody is the same client.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import UNDECODABLE, ConfigError
from baton.gateway.errors import QuotaError, UnauthorizedError
from baton.router.fair_queue import Priority

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from baton.clock import Clock, Instant

Weight: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]
Label: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

SHARES: Final[dict[Priority, float]] = {"low": 0.5, "normal": 0.9, "high": 1.0}
"""Of the gateway's places, what requests of a priority may fill; the rest is for higher ones."""
RELOAD_INTERVAL_S: Final = 1.0
WINDOW_S: Final = 60.0
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32
MAX_KEYS: Final = 100_000
FILE_MODE: Final = 0o600

_KEY: Final = re.compile(rb"(?i:bearer) +bk-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")

log = logging.getLogger(__name__)


class ClientKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file has of one key. `expires_at` is Unix time; None: never, or without a limit.

    `priority` and `weight`: when its requests are served of those that wait, and how many of them.
    """

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{12}$")]
    tenant: Label
    secret_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    expires_at: int | None = None
    max_inflight: Annotated[int, Meta(ge=1)] | None = None
    requests_per_minute: Annotated[int, Meta(ge=1)] | None = None
    priority: Priority = "normal"
    weight: Weight = 1.0


class ClientKeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: JSON."""

    keys: Annotated[tuple[ClientKey, ...], Meta(max_length=MAX_KEYS)] = ()


def make_key(
    tenant: str,
    *,
    expires_at: int | None = None,
    max_inflight: int | None = None,
    requests_per_minute: int | None = None,
    priority: Priority = "normal",
    weight: float = 1.0,
) -> tuple[str, ClientKey]:
    """A new key: what its client gets, once, and what is kept."""
    key_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    kept = ClientKey(
        id=key_id,
        tenant=tenant,
        secret_sha256=hashlib.sha256(secret.encode()).hexdigest(),
        expires_at=expires_at,
        max_inflight=max_inflight,
        requests_per_minute=requests_per_minute,
        priority=priority,
        weight=weight,
    )
    return f"bk-{key_id}-{secret}", kept


def read_keys(path: Path) -> tuple[ClientKey, ...]:
    """The keys of a file.

    Raises:
        ConfigError: it cannot be read, or is no file of keys.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"cannot read the clients' keys in {path}: {exc.strerror}; make one with: baton key "
            "client add --tenant NAME"
        ) from exc
    try:
        keys = msgspec.json.decode(data, type=ClientKeyFile).keys
    except UNDECODABLE as exc:
        raise ConfigError(f"{path} is no file of clients' keys: {exc}") from exc
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"{path} has two keys with the same id")
    return keys


def write_keys(path: Path, keys: Iterable[ClientKey]) -> None:
    """Replace a file of keys as a whole.

    Raises:
        ConfigError: it cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(ClientKeyFile(tuple(keys))), indent=1)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        with os.fdopen(fd, "wb") as file:
            file.write(data + b"\n")
            file.flush()
            os.fsync(fd)
        unfinished.replace(path)
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the clients' keys to {path}: {exc.strerror}") from exc


class Client:
    """Who asks: one key, or everybody where there are no keys. Owner: the event loop's thread."""

    def __init__(self, key: ClientKey | None) -> None:
        self.key = key

    @property
    def id(self) -> str:
        """Of the key; empty for everybody."""
        return self.key.id if self.key else ""

    @property
    def tenant(self) -> str:
        """Whose KV the client's requests may share; empty for everybody."""
        return self.key.tenant if self.key else ""

    @property
    def priority(self) -> Priority:
        """The class of its requests; they may name a lower one."""
        return self.key.priority if self.key else "normal"

    @property
    def weight(self) -> float:
        """What its tenant gets of those that wait, relative to others."""
        return self.key.weight if self.key else 1.0

    @property
    def share(self) -> float:
        """Of the gateway's places, what this client's requests may fill."""
        return SHARES[self.key.priority] if self.key else 1.0


EVERYBODY: Final = Client(None)
_UNCOUNTED: Final = contextlib.nullcontext()


class Clients:
    """Finds the client of a request, and keeps to its quotas. Owner: the event loop's thread."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Read the file, if there is one.

        Raises:
            ConfigError: it cannot be read.
        """
        self._path, self._clock = path, clock
        self._by_id: dict[str, Client] = {}
        self._num_inflight: Counter[str] = Counter()
        self._windows: dict[str, tuple[Instant, int]] = {}
        self._looked_at, self._version = clock.now(), self._stat()
        self._failure = ""
        if path is not None:
            self._take(read_keys(path))

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Client:
        """The client whose key a request shows.

        Raises:
            UnauthorizedError: it shows none, or a wrong, removed or expired one.
        """
        if self._path is None:
            return EVERYBODY
        self._reload()
        shown = next((value for name, value in headers if name == b"authorization"), b"")
        if not shown:
            raise UnauthorizedError(
                "this gateway needs an API key; send it as: Authorization: Bearer KEY",
                code="missing_api_key",
            )
        found = _KEY.fullmatch(shown)
        client = self._by_id.get(found[1].decode()) if found else None
        key = client.key if client else None
        digest = hashlib.sha256(found[2] if found else b"").hexdigest()
        is_right = hmac.compare_digest(digest, key.secret_sha256 if key else "0" * 64)
        if client is None or key is None or not is_right:
            raise UnauthorizedError("this gateway does not know the key", code="invalid_api_key")
        if key.expires_at is not None and self._clock.unix_now() >= key.expires_at:
            raise UnauthorizedError("the API key has expired", code="expired_api_key")
        return client

    def admit(self, client: Client) -> AbstractContextManager[None]:
        """Count a request against its client's quotas, for as long as the block runs.

        Raises:
            QuotaError: they are used up.
        """
        return _UNCOUNTED if client.key is None else self._admit(client, client.key)

    @contextlib.contextmanager
    def _admit(self, client: Client, key: ClientKey) -> Generator[None]:
        self._count(key)
        self._num_inflight[client.id] += 1
        try:
            yield
        finally:
            self._num_inflight[client.id] -= 1
            if not self._num_inflight[client.id]:
                del self._num_inflight[client.id]

    def _count(self, key: ClientKey) -> None:
        if key.max_inflight is not None and self._num_inflight[key.id] >= key.max_inflight:
            raise QuotaError(
                f"this API key may have {key.max_inflight} requests at once", retry_after_s=1.0
            )
        if key.requests_per_minute is None:
            return
        now = self._clock.now()
        begun, num = self._windows.get(key.id, (now, 0))
        if now - begun >= WINDOW_S:
            begun, num = now, 0
        if num >= key.requests_per_minute:
            raise QuotaError(
                f"this API key may ask {key.requests_per_minute} times a minute",
                retry_after_s=max(1.0, begun + WINDOW_S - now),
            )
        self._windows[key.id] = begun, num + 1

    def _reload(self) -> None:
        now = self._clock.now()
        if self._path is None or now - self._looked_at < RELOAD_INTERVAL_S:
            return
        self._looked_at = now
        version = self._stat()
        if version == self._version:
            return
        try:
            self._take(read_keys(self._path))
        except ConfigError as exc:
            # It is read again: a change of its owner or mode, for one, leaves the version.
            if (failure := str(exc)) != self._failure:
                log.error("%s; the keys that were read before stay valid", exc)  # noqa: TRY400
            self._failure = failure
            return
        self._version, self._failure = version, ""
        log.info("read %d API keys from %s", len(self._by_id), self._path)

    def _stat(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _take(self, keys: Iterable[ClientKey]) -> None:
        self._by_id = {key.id: Client(key) for key in keys}
        self._windows = {i: window for i, window in self._windows.items() if i in self._by_id}
