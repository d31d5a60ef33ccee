"""A tier on a server: bounded waits, values that are believed only with the cluster's tag."""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from baton.errors import BatonError, ConfigError, StoreError, StoreFullError
from baton.store.capacity import StoredEntry
from baton.store.compressed_lease import CompressedEntryLease
from baton.store.compression import CompressionChoice, compress
from baton.store.entry_format import (
    HEADER_BYTES,
    BodyCheck,
    has_digest,
    make_header,
    parse_header,
    read_header,
)
from baton.store.interface import NAME_BYTES, NO_TENANT, EntryName, PutResult, ServerHealth, Usage
from baton.store.promotion import PromotionPolicy
from baton.store.remote.circuit_breaker import CircuitBreaker
from baton.store.remote.client import EntryRefusedError, RequestRefusedError, ServerReport
from baton.store.remote.lease import ValueLease
from baton.store.remote.read_ahead import ReadAhead
from baton.store.remote.refused_reads import READ_AGAIN_S, RefusedReads
from baton.store.remote.write_behind import WriteBehind
from baton.store.request_threads import RequestThreads
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.clock import Instant
    from baton.store.interface import Body, EntryLease, TenantLabel, TierContext
    from baton.store.remote.client import RemoteClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

LISTING_TIMEOUT_S: Final = 60.0
MAX_LISTED: Final = 1_000_000
REPORT_INTERVAL_S: Final = 10.0
"""Between two questions for how full the server is; asked beside other requests."""
KNOWN_S: Final = 5.0
"""So long an entry that was found or read is not written again: another may have removed it."""
MAX_KNOWN: Final = 4096
LOG_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """What one tier may cost its caller. Fetched ahead: at most `num_read_ahead` entries.

    `timeout_s` bounds each call; after one that is late the server is not asked until a trial,
    beside the caller, has succeeded. `buffer_bytes`: of entries fetched ahead, and as many again of
    entries that wait to be written (a larger one alone). `promote_at_read`: see `PromotionPolicy`.
    `is_billed`: each request costs money. `compresses`: bodies are sent in fewer bytes; they are
    read in any case.
    """

    timeout_s: float
    max_entry_bytes: int
    buffer_bytes: int
    num_read_ahead: int
    num_writers: int
    promote_at_read: int = 1
    is_billed: bool = False
    compresses: bool = False


@dataclass(frozen=True, slots=True)
class StartedFind:
    """A question to the server that is on its way; None: it is not asked now."""

    names: Sequence[EntryName]
    began_at: Instant
    answer: Future[Sequence[bool]] | None


class RemoteTier:  # noqa: PLR0904 - two contracts, and the parts of a question to many servers
    """See `Tier`, `RemoteLookup`, `ServerPlace`, `WritesBehind` and `DelaysPromotion`.

    Others use the server, too.

    The server decides what it evicts. A server that fails or is late is reported as missing
    everything; `put` then raises StoreError at once.
    """

    def __init__(
        self, kind: str, client: RemoteClient, limits: RemoteLimits, context: TierContext
    ) -> None:
        """Ask the server once whether it is there. One that is not is tried again later.

        Raises:
            ConfigError: it refuses these credentials, or has no such place.
        """
        self._kind, self._client, self._limits = kind, client, limits
        self._clock, self._key = context.clock, context.key
        self._server, self._writes = CircuitBreaker(), CircuitBreaker()
        num_threads = 1 + limits.num_read_ahead + limits.num_writers
        self._threads = RequestThreads(f"store-{kind}", num_threads)
        self._ahead = ReadAhead(
            self._start_read, max_entries=limits.num_read_ahead, max_bytes=limits.buffer_bytes
        )
        self._behind = WriteBehind(
            self._write,
            self._submit,
            max_bytes=limits.buffer_bytes,
            num_writers=limits.num_writers,
        )
        self._compression = CompressionChoice(is_adaptive=False) if limits.compresses else None
        self._promotion = PromotionPolicy(limits.promote_at_read)
        self._known: OrderedDict[EntryName, Instant] = OrderedDict()
        self._refused = RefusedReads(context.clock)
        self._num_damaged = self._num_failures = 0
        self._log = LimitedLog(logger, context.clock, LOG_INTERVAL_S)
        self._report = ServerReport(kind)
        self._reporting: Future[ServerReport] | None = None
        self._reported_at = self._clock.now()
        self._is_closed = False
        self._ask_first()

    def find(self, names: Sequence[EntryName]) -> int:
        found = self.find_each(names)
        return next((at for at, is_there in enumerate(found) if not is_there), len(names))

    @property
    def is_billed(self) -> bool:
        """Whether each look costs money."""
        return self._limits.is_billed

    @property
    def is_read_only(self) -> bool:
        """See `ServerPlace`: as far as the server has reported of itself."""
        return not self._report.takes_entries

    def find_each(self, names: Sequence[EntryName]) -> Sequence[bool]:
        """See `RemoteLookup`."""
        return self.end_find(self.begin_find(names))

    def check_each(self, names: Sequence[EntryName]) -> Sequence[bool] | None:
        """See `ServerPlace`."""
        found = self._try_take_answer(self.begin_find(names))
        return None if found is None else self._with_waiting(names, found)

    def begin_find(self, names: Sequence[EntryName]) -> StartedFind:
        """Ask, without waiting for the answer: several servers are asked at once."""
        now = self._clock.now()
        if not names or not self.is_available():
            return StartedFind(names, now, None)
        keys = [name.hex() for name in names]
        return StartedFind(names, now, self._submit(partial(self._client.exists, keys)))

    def end_find(self, started: StartedFind) -> Sequence[bool]:
        """Wait for the answer, until `timeout_s` after it was asked for: see `RemoteLookup`."""
        names, found = started.names, self._try_take_answer(started)
        if found is None:
            return (False,) * len(names)
        for name, is_there in zip(names, found, strict=True):
            self._note(name, is_known=is_there)
        if len(names) > 1:
            self._ahead.expect([n for n, is_there in zip(names, found, strict=True) if is_there])
        return self._with_waiting(names, found)

    def _try_take_answer(self, started: StartedFind) -> Sequence[bool] | None:
        if started.answer is None:
            return None
        try:
            found = self._answer(started.answer, since=started.began_at)
        except StoreError:
            return None
        if not self._refused:
            return found
        names = started.names
        return [n not in self._refused and there for n, there in zip(names, found, strict=True)]

    def _with_waiting(self, names: Sequence[EntryName], found: Sequence[bool]) -> Sequence[bool]:
        """Entries that wait to be written count as there."""
        waiting = self._behind.names()
        if not waiting:
            return found
        return [there or name in waiting for name, there in zip(names, found, strict=True)]

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        if self.is_known(name):
            return PutResult.EXISTS
        if not self.is_available():
            raise StoreError(self._why_unavailable())
        self._require_taking()
        value = self._make_value(name, body, tenant)
        if not self._writes.is_closed and not self._writes.try_begin_trial(self._clock.now()):
            raise StoreFullError(f"{self._kind} has refused entries; it is asked again later")
        is_trial = not self._writes.is_closed
        try:
            is_new = self._wait(self._submit(partial(self._client.put, name.hex(), value)))
        except StoreError as exc:
            if is_trial or isinstance(exc, StoreFullError | RequestRefusedError):
                self._writes.fail(self._clock.now())
            raise
        self._writes.pass_trial()
        self._writes.succeed()
        return PutResult.STORED if is_new else PutResult.EXISTS

    def put_behind(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        """See `WritesBehind`."""
        if self.is_known(name) or self._behind.get(name) is not None:
            return PutResult.EXISTS
        if not (self.is_available() and self._writes_are_open()):
            raise StoreError(self._why_unavailable())
        self._require_taking()
        value = self._make_value(name, body, tenant)
        if not self._behind.try_add(name, value):
            raise StoreFullError(
                f"{len(value)} bytes have no room among those that wait for {self._kind} already: "
                f"store.options.{self._kind}.buffer_bytes is {self._limits.buffer_bytes}"
            )
        return PutResult.STORED

    def try_lease(self, name: EntryName) -> EntryLease | None:
        value: Body | None = self._behind.get(name)
        if value is None:
            if name in self._refused or not self.is_available():
                return None
            try:
                value = self._take_value(name)
            except StoreError:
                return None
        self._note(name, is_known=value is not None)
        if value is None:
            return None
        self._ahead.observe(len(value))
        lease = self._check(name, value, partial(self._remove_damaged, name))
        if lease is None:
            too_large = self._why_too_large(name, value)
            if too_large is None:
                self._remove_damaged(name)
            else:  # others may have use for it; this process is not to fetch it at each look
                self._refused.leave_alone(name)
                self._log.warning("too large", f"store: {too_large}")
        return lease

    def expect_refusals(self) -> None:
        """For who reads all entries, and counts those that are refused, however many in a row."""
        self._refused.counts_rows = False

    def count_read(self, name: EntryName) -> bool:
        """See `DelaysPromotion`."""
        return self._promotion.count_read(name)

    def discard(self, name: EntryName) -> None:
        self._forget(name)
        self._behind.discard(name)
        if self.is_available():
            self._try_delete(name)

    def entries(self) -> list[StoredEntry]:
        listing = self._submit(partial(self._client.list_values, MAX_LISTED))
        try:
            values = listing.result(LISTING_TIMEOUT_S)
        except TimeoutError:
            raise StoreError(
                f"{self._kind}: the list of entries took longer than {LISTING_TIMEOUT_S} s"
            ) from None
        named = ((_try_parse(value.key), value) for value in values)
        return [StoredEntry(name, v.num_bytes, v.used_at) for name, v in named if name is not None]

    def is_whole(self, name: EntryName) -> bool:
        if not self.is_available():
            raise StoreError(self._why_unavailable())
        value = self._request(partial(self._client.read, name.hex(), self._max_value_bytes))
        lease = None if value is None else self._check(name, value, _do_nothing)
        if value is not None and lease is None:
            too_large = self._why_too_large(name, value)
            if too_large is not None:
                raise StoreError(too_large)
        return lease is not None and lease.try_read(memoryview(bytearray(lease.num_bytes)))

    def usage(self) -> Usage:
        """See `Tier`. Of the whole server, as it was at most some seconds ago."""
        return Usage(
            used_bytes=self._report.used_bytes,
            capacity_bytes=self._report.capacity_bytes,
            num_demoted=0,
            num_dropped=self._behind.num_dropped,
            num_damaged=self._num_damaged,
            server=ServerHealth(self._num_failures, self._server.is_closed),
            compression=None if self._compression is None else self._compression.report(),
        )

    def close(self) -> None:
        """See `Tier`. Entries stay; those that wait to be written have `timeout_s` for it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._server.is_closed:
            self._behind.wait_empty(self._limits.timeout_s)
        self._ahead.clear()
        self._client.disconnect()
        self._threads.stop(self._limits.timeout_s)

    @property
    def _max_value_bytes(self) -> int:
        return HEADER_BYTES + self._limits.max_entry_bytes

    def _ask_first(self) -> None:
        try:
            self._report = self._request(self._client.report)
        except ConfigError:
            self.close()
            raise
        except StoreError:  # it is logged, and tried again
            return

    def _start_read(self, name: EntryName) -> Future[Body | None]:
        return self._submit(partial(self._client.use, name.hex(), self._max_value_bytes))

    def _take_value(self, name: EntryName) -> Body | None:
        """What the server gives of an entry. Raises: as `_answer`."""
        try:
            value = self._answer(self._ahead.take(name))
        except EntryRefusedError as exc:
            why = f"it is a miss for {READ_AGAIN_S:.0f} s: {exc}"
            self._log.warning("refused", f"store: entry {name.hex()} is refused, {why}")
            if self._refused.add(name):
                self._fail(exc)
            raise
        self._refused.end_row()
        return value

    def _write(self, name: EntryName, value: bytes) -> None:
        """Write what has waited; a failure of one beyond `buffer_bytes` costs no reads.

        `timeout_s` may be too short for it. Where the server has failed, the next read shows it.
        """
        try:
            self._client.put(name.hex(), value)
        except StoreError as exc:
            if len(value) <= self._limits.buffer_bytes:
                raise
            raise RequestRefusedError(f"{len(value)} bytes were not written: {exc}") from exc

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(partial(self._attempt, work))
        except StoreError as exc:
            failed: Future[T] = Future()
            failed.set_exception(exc)
            return failed

    def _attempt(self, work: Callable[[], T]) -> T:
        """Carry out a request. Libraries raise anything for an answer that makes no sense."""
        try:
            return work()
        except BatonError:
            raise
        except Exception as exc:
            raise StoreError(f"{self._kind}: an answer that makes no sense: {exc!r}") from exc

    def _request(self, work: Callable[[], T]) -> T:
        return self._answer(self._submit(work))

    def _answer(self, future: Future[T], since: Instant | None = None) -> T:
        """The same where a refusal is a failure, unless it is of one entry."""
        try:
            return self._wait(future, since)
        except EntryRefusedError:
            raise
        except RequestRefusedError as exc:
            self._fail(exc)
            raise

    def _wait(self, future: Future[T], since: Instant | None = None) -> T:
        """What the server answers; the time limit begins now, or at `since`.

        Raises:
            StoreError: nothing within the time limit, or a failure; it is not asked for a while.
            StoreFullError, RequestRefusedError: it answered.
        """
        passed_s = 0.0 if since is None else self._clock.now() - since
        try:
            result = future.result(max(0.0, self._limits.timeout_s - passed_s))
        except TimeoutError:
            late = StoreError(f"{self._kind}: no answer within {self._limits.timeout_s} s")
            self._fail(late)
            raise late from None
        except (StoreFullError, RequestRefusedError):
            raise
        except StoreError as exc:
            self._fail(exc)
            raise
        self._server.succeed()
        return result

    def _fail(self, error: StoreError) -> None:
        """Stop asking. The trial connects anew: the address may be another server's by then."""
        self._num_failures += 1
        self._client.disconnect()
        self._ahead.clear()
        if self._server.is_closed:
            logger.warning(
                "store: %s is not used for at least %.0f s: %s",
                self._kind,
                self._server.backoff_s,
                error,
            )
        self._server.fail(self._clock.now())

    @property
    def server_report(self) -> ServerReport:
        """What the server has reported of itself last."""
        return self._report

    def is_available(self) -> bool:
        """Whether requests may be sent; begins and ends trials, which no caller waits for."""
        now = self._clock.now()
        failure = self._behind.take_failure()
        if isinstance(failure, StoreFullError | RequestRefusedError):
            self._log.warning("write", f"store: {self._kind}: {failure}")
            self._writes.fail(now)
        elif failure is not None:
            self._fail(failure)
        elif self._behind.take_success():
            self._writes.succeed()
        self._end_report(now)
        if self._server.try_begin_trial(now) or (
            self._server.is_closed and now >= self._reported_at + REPORT_INTERVAL_S
        ):
            self._reported_at = now
            self._reporting = self._submit(self._client.report)
        return self._server.is_closed

    def _end_report(self, now: Instant) -> None:
        """Take the server's answer about itself, if it is there or late."""
        asked = self._reporting
        if asked is None or not (asked.done() or now >= self._reported_at + self._limits.timeout_s):
            return
        self._reporting = None
        try:
            self._report = asked.result(0)
        except (BatonError, TimeoutError) as exc:
            logger.debug("store: %s does not answer: %s", self._kind, str(exc) or "too late")
            self._fail(StoreError(str(exc) or f"{self._kind} does not answer"))
            return
        if not self._server.is_closed:
            logger.info("store: %s answers again", self._kind)
        self._server.pass_trial()

    def _writes_are_open(self) -> bool:
        """Whether the server takes entries; the trial of one that did not is the caller's next."""
        if self._writes.try_begin_trial(self._clock.now()):
            self._writes.pass_trial()
        return self._writes.is_closed

    def _require_taking(self) -> None:
        if not self._report.takes_entries:
            raise StoreFullError(f"{self._kind} is only read")

    def _why_unavailable(self) -> str:
        return f"{self._kind} has failed or has no room; it is asked again later"

    def _make_value(self, name: EntryName, body: Body, tenant: TenantLabel) -> bytes:
        if len(body) > self._limits.max_entry_bytes:
            raise StoreFullError(
                f"an entry of {len(body)} bytes; {self._kind} takes "
                f"{self._limits.max_entry_bytes}: set store.options.{self._kind}.max_entry_bytes"
            )
        kept, whole_bytes = self._try_compress(body), len(body)
        if kept is None:
            kept, whole_bytes = body, 0
        header = make_header(self._key, name, kept, tenant=tenant, whole_bytes=whole_bytes)
        return b"".join((header, kept))

    def _try_compress(self, body: Body) -> Body | None:
        """What is sent in its place; None: itself."""
        choice = self._compression
        if choice is None or not choice.begin_put(len(body)):
            return None
        began_at = self._clock.now()
        smaller = compress(body)
        sent_bytes = len(body if smaller is None else smaller)
        choice.observe_compression(len(body), sent_bytes, self._clock.now() - began_at)
        return smaller

    def _check(
        self, name: EntryName, value: Body, on_damage: Callable[[], None]
    ) -> EntryLease | None:
        view = memoryview(value).cast("B")
        header = read_header(name, bytes(view[:HEADER_BYTES]), len(view))
        if header is None or header.whole_bytes > self._limits.max_entry_bytes:
            return None
        lease = ValueLease(view[HEADER_BYTES:], header, BodyCheck(self._key, header), on_damage)
        if not header.whole_bytes:
            return lease
        return CompressedEntryLease(lease, self._compression, self._clock)

    def _why_too_large(self, name: EntryName, value: Body) -> str | None:
        """Of a value that is no entry here: it came cut off, or is too much when decompressed.

        None: it is neither, but damaged.
        """
        view = memoryview(value).cast("B")
        header = parse_header(bytes(view[:HEADER_BYTES]))
        if header is None or header.name != name:
            return None
        is_cut_off = len(view) >= self._max_value_bytes
        if not (is_cut_off or has_digest(self._key, header, view[HEADER_BYTES:])):
            return None
        return (
            f"entry {name.hex()} in {self._kind} has {max(header.num_bytes, header.whole_bytes)} "
            "bytes, and is not read: "
            f"store.options.{self._kind}.max_entry_bytes is {self._limits.max_entry_bytes}"
        )

    def _remove_damaged(self, name: EntryName) -> None:
        self._num_damaged += 1
        logger.warning("store: entry %s in %s is damaged: removed", name.hex(), self._kind)
        self.discard(name)

    def _try_delete(self, name: EntryName) -> None:
        try:
            self._request(partial(self._client.delete, name.hex()))
        except StoreError as exc:
            logger.debug("store: %s keeps an entry: %s", self._kind, exc)

    def is_known(self, name: EntryName) -> bool:
        """Whether it was found, read or refused some time ago: it is not written again."""
        if name in self._refused:
            return True
        known_at = self._known.get(name)
        return known_at is not None and self._clock.now() < known_at + KNOWN_S

    def _note(self, name: EntryName, *, is_known: bool) -> None:
        self._known.pop(name, None)
        if is_known:
            self._known[name] = self._clock.now()
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _forget(self, name: EntryName) -> None:
        self._note(name, is_known=False)
        self._ahead.forget(name)


def _try_parse(key: str) -> EntryName | None:
    """The name that a key stands for; None for what others keep there."""
    try:
        name = bytes.fromhex(key)
    except ValueError:
        return None
    return EntryName(name) if len(name) == NAME_BYTES else None


def _do_nothing() -> None:
    """What is damaged stays."""
