"""`object`: a bucket of an object store (S3 and what speaks its protocol; others that obstore has).

The bucket bounds itself by its lifecycle rules, which count from an entry's write: object stores
keep no time of use. Objects: `<prefix>/<cluster>/<name>`, bodies as in a folder's files.
obstore finds the credentials: in the environment, a web identity token, or the instance's role.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from baton.errors import ConfigError, StoreError
from baton.registry import Plugin
from baton.store.remote.client import (
    EntryRefusedError,
    RemoteValue,
    RequestRefusedError,
    ServerReport,
)
from baton.store.remote.tier import RemoteLimits, RemoteTier

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        UnauthenticatedError,
    )
    from obstore.store import from_url
except ModuleNotFoundError as exc:
    raise ConfigError("tier object needs obstore: pip install 'baton-kv[object]'") from exc

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from baton.store.interface import Body, TierContext, TierFactory

NUM_AT_ONCE: Final = 16
"""Requests that one look sends together; the next ones only if all of these are there."""
_LAST_KEY: Final = "~"
"""Sorts after every name: a listing from here on is empty."""


class ObjectTierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`url`: `s3://BUCKET/PREFIX`, or another that obstore takes (`gs://`, `az://`, `file://`).

    `endpoint`: of a server that is not Amazon's; `http://…` sends KV in the clear. All workers need
    the same `max_entry_bytes`. `compress`: bodies are kept in fewer bytes, without loss; workers of
    versions without this setting take them for damaged.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 1.5
    max_entry_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)] = 64 << 20
    buffer_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 << 20
    compress: bool = False


class ObjectClient:
    """See `RemoteClient`."""

    def __init__(self, options: ObjectTierOptions, cluster: str) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: obstore takes no such URL.
        """
        config = {"endpoint": options.endpoint, "region": options.region}
        timeout = f"{int(options.timeout_s * 1000)}ms"
        settings: dict[str, Any] = {}  # obstore's
        if not options.url.startswith(("file:", "memory:")):
            settings["config"] = {key: value for key, value in config.items() if value is not None}
            settings["client_options"] = {
                "allow_http": (options.endpoint or "").startswith("http://"),
                "timeout": timeout,
                "connect_timeout": timeout,
            }
            settings["retry_config"] = {
                "max_retries": 1,
                "retry_timeout": timedelta(seconds=options.timeout_s),
            }
        if options.url.startswith("file:"):
            settings["mkdir"] = True
        self._find_s = options.timeout_s / 2
        self.url = f"{options.url.rstrip('/')}/{cluster}"
        try:
            self._store = from_url(self.url, **settings)
        except (BaseError, ValueError, TypeError, OSError) as exc:
            raise ConfigError(f"store.options.object: {_first_line(exc)}") from exc

    def exists(self, keys: Sequence[str]) -> Sequence[bool]:
        """See `RemoteClient`: some at once, until one is missing, or half of the time is up.

        Of a long prompt that is there, the beginning is found: a late answer would be none.
        """
        with _mapped():
            found = asyncio.run(self._find_leading(keys))
        return found + [False] * (len(keys) - len(found))

    def read(self, key: str, max_bytes: int) -> Body | None:
        """See `RemoteClient`: an archived object, or one under another key, is refused alone."""
        try:
            with _mapped():
                answer = obstore.get(self._store, key)
                if answer.meta["size"] > max_bytes:  # the beginning shows what it is
                    return memoryview(obstore.get_range(self._store, key, start=0, end=max_bytes))
                return memoryview(answer.bytes())
        except _MissingError:
            return None
        except RequestRefusedError as exc:
            raise EntryRefusedError(str(exc)) from exc
        except AlreadyExistsError as exc:  # obstore's for any status 409: Azure's archived blobs
            raise EntryRefusedError(f"object: {_first_line(exc)}") from exc

    def use(self, key: str, max_bytes: int) -> Body | None:
        """See `RemoteClient`: the bucket keeps no account of it."""
        return self.read(key, max_bytes)

    def put(self, key: str, value: bytes) -> bool:
        try:
            with _mapped():
                obstore.put(self._store, key, value, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    def delete(self, key: str) -> None:
        try:
            with _mapped():
                obstore.delete(self._store, key)
        except _MissingError:  # a folder reports it, S3 does not
            return

    def list_values(self, max_values: int) -> list[RemoteValue]:
        """See `RemoteClient`. The time of use is that of the write."""
        found: list[RemoteValue] = []
        with _mapped():
            for page in obstore.list(self._store, chunk_size=1000):
                found += [
                    RemoteValue(each["path"], each["size"], each["last_modified"].timestamp())
                    for each in page
                ]
                if len(found) >= max_values:
                    break
        return found[:max_values]

    def report(self) -> ServerReport:
        """See `RemoteClient`: asks for what comes after the last name; sizes are not known.

        Two questions: of one object, which shows refused credentials, and of the bucket.

        Raises:
            ConfigError: the credentials are refused.
        """
        try:
            with _mapped():
                with suppress(FileNotFoundError):
                    obstore.head(self._store, _LAST_KEY)
                for _ in obstore.list(self._store, offset=_LAST_KEY, chunk_size=1):
                    break
        except RequestRefusedError as exc:
            raise ConfigError(f"store.options.object: {exc}") from exc
        return ServerReport(self.url.partition(":")[0])

    def disconnect(self) -> None:
        """See `RemoteClient`: each request ends by itself, at its time-out."""

    async def _find_leading(self, keys: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        now = asyncio.get_running_loop().time
        ends_at = now() + self._find_s
        for at in range(0, len(keys), NUM_AT_ONCE):
            some = keys[at : at + NUM_AT_ONCE]
            found += await asyncio.gather(*(self._exists(key) for key in some))
            if not all(found) or now() >= ends_at:
                break
        return found

    async def _exists(self, key: str) -> bool:
        try:
            await obstore.head_async(self._store, key)
        except FileNotFoundError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class ObjectTierFactory:
    """See `TierFactory` and `ReportsServer`."""

    options: ObjectTierOptions

    def __call__(self, context: TierContext) -> RemoteTier:
        options = self.options
        limits = RemoteLimits(
            timeout_s=options.timeout_s,
            max_entry_bytes=options.max_entry_bytes,
            buffer_bytes=options.buffer_bytes,
            compresses=options.compress,
            num_read_ahead=NUM_AT_ONCE,
            num_writers=NUM_AT_ONCE // 2,
            is_billed=True,
        )
        return RemoteTier("object", ObjectClient(options, context.cluster), limits, context)

    def report(self) -> ServerReport:
        """See `ReportsServer`."""
        return ObjectClient(self.options, "doctor").report()


class _MissingError(StoreError):
    """An object, or its bucket, is not there."""


@contextmanager
def _mapped() -> Generator[None]:
    """Translate obstore's errors, but that of a conditional put whose object exists."""
    try:
        yield
    except AlreadyExistsError:
        raise
    except FileNotFoundError as exc:
        raise _MissingError(f"object: {_first_line(exc)}") from exc
    except (PermissionDeniedError, UnauthenticatedError) as exc:
        raise RequestRefusedError(f"object: {_first_line(exc)}") from exc
    except (BaseError, OSError) as exc:
        raise StoreError(f"object: {_first_line(exc)}") from exc


def _first_line(error: Exception) -> str:
    """Without the library's own debugging output."""
    return str(error).partition("\n")[0]


def _build(options: ObjectTierOptions) -> TierFactory:
    return ObjectTierFactory(options)


PLUGIN = Plugin(ObjectTierOptions, _build)
