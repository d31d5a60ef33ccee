"""Entries of a store in one file, to take them to another host: `baton store export`, `import`.

    magic (8 bytes) | entries, each as in its file: header and body (docs/wire/store.md) | end
    end = magic of the end (8) | u64 number of entries | HMAC-SHA256 (32) over all headers and that

Entries are authenticated by the cluster's key as in the store, and the end with it, so that a file
that was cut short, or put together from others, is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from baton.errors import ConfigError, ProtocolError, StoreError, StoreFullError
from baton.ops.store import check_answers, is_unreadable
from baton.store.entry_format import HEADER_BYTES, MAGIC, has_digest, make_header, parse_header
from baton.store.interface import NO_TENANT, EndsWithUsers, EntryName, PutResult, TenantLabel
from baton.store.remote.tier import RemoteTier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from baton.auth.key import ClusterKey
    from baton.store.counted_tier import CountedTier
    from baton.store.entry_format import EntryHeader

BEGIN: Final = b"BATONKA1"
END: Final = b"BATONKAE"
_COUNT: Final = struct.Struct("<8sQ")
END_BYTES: Final = _COUNT.size + 32
FILE_MODE: Final = 0o600
NOT_IN_USE: Final = (
    "no process uses this tier, which ends with its last user: start a worker or `baton store "
    "serve` first"
)


class ArchiveReport(msgspec.Struct, frozen=True):
    """What went into an archive, or came out of it. Bytes are of bodies.

    `num_unreadable`: entries that are not in it, though they are in the store (`TierCheck`).
    """

    num_entries: int
    num_bytes: int
    num_present: int = 0
    num_refused: int = 0
    num_unreadable: int = 0


def export_entries(
    tiers: Sequence[CountedTier], path: Path, key: ClusterKey, names: Sequence[EntryName]
) -> ArchiveReport:
    """Write the entries of these names, of all tiers where there are none, into a new file.

    The file appears under its name when it is complete. Entries that are evicted meanwhile are left
    out, and those that cannot be read are counted.

    Raises:
        StoreError: a tier cannot be looked at, or the file cannot be written.
    """
    entries_key, mac = key.sign("store", b"entries"), _begin_mac(key)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    num_entries = num_bytes = num_unreadable = 0
    for tier in tiers:
        if isinstance(tier.inner, RemoteTier):
            tier.inner.expect_refusals()
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        with os.fdopen(fd, "wb") as file:
            file.write(BEGIN)
            for name, tenant, body in _iter_bodies(tiers, names):
                if body is None:
                    num_unreadable += 1
                    continue
                header = make_header(entries_key, name, body, tenant=tenant)
                mac.update(header)
                file.write(header)
                file.write(body)
                num_entries += 1
                num_bytes += len(body)
            file.write(_make_end(mac, num_entries))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as exc:
        raise StoreError(f"cannot write {path}: {exc.strerror}") from exc
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return ArchiveReport(num_entries, num_bytes, num_unreadable=num_unreadable)


def check_archive(path: Path) -> None:
    """Refuse a file that does not begin as an archive, before a store is made for it.

    Raises:
        ProtocolError: it is no archive.
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(BEGIN))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    if begin != BEGIN:
        raise ProtocolError(f"{path} is no archive of a store, or one of another version")


def import_entries(tiers: Sequence[CountedTier], path: Path, key: ClusterKey) -> ArchiveReport:
    """Put the entries of an archive into the first tier that has room for each.

    The whole file is checked before the first entry is put. What is there already stays. Tiers that
    would end with this process get none.

    Raises:
        ProtocolError: it is no archive, it was changed or cut short, or it has another key.
        StoreError: the file cannot be read, or there is no tier that stays.
    """
    tiers = [tier for tier in tiers if not _ends_here(tier)]
    if not tiers:
        raise StoreError(NOT_IN_USE)
    entries_key = key.sign("store", b"entries")
    num_present = num_refused = num_entries = num_bytes = 0
    try:
        with path.open("rb") as file:
            for _ in _read_checked(file, key, entries_key):
                pass
            for header, body in _read_checked(file, key, entries_key):
                result = _put(tiers, header, body)
                num_entries += result is PutResult.STORED
                num_bytes += len(body) if result is PutResult.STORED else 0
                num_present += result is PutResult.EXISTS
                num_refused += result is None
    except OSError as exc:
        raise StoreError(f"cannot read {path}: {exc.strerror}") from exc
    return ArchiveReport(num_entries, num_bytes, num_present, num_refused)


def _iter_bodies(
    tiers: Sequence[CountedTier], names: Sequence[EntryName]
) -> Iterator[tuple[EntryName, TenantLabel, memoryview | None]]:
    """Each entry once, from the first tier that has it whole; None: there, and cannot be read.

    The least recently used first: reading is a use, and so is putting, and the order is to stay.
    """
    entries = [] if names else [entry for tier in tiers for entry in tier.entries()]
    entries.sort(key=lambda entry: entry.used_at)
    wanted = names or [entry.name for entry in entries]
    for name in dict.fromkeys(wanted):
        for tier in tiers:
            lease = tier.inner.try_lease(name)
            if lease is None:
                check_answers(tier)
                continue
            with lease:
                body = memoryview(bytearray(lease.num_bytes))
                if lease.try_read(body):
                    yield name, lease.tenant, body
                    break
        else:
            if any(is_unreadable(tier, name) for tier in tiers):
                yield name, NO_TENANT, None


def _read_checked(
    file: BinaryIO, key: ClusterKey, entries_key: bytes
) -> Iterator[tuple[EntryHeader, bytes]]:
    """All entries of an archive, each of them checked; then its end.

    Raises:
        ProtocolError: it is no archive, it was changed or cut short, or it has another key.
    """
    left_bytes = os.fstat(file.fileno()).st_size - len(BEGIN) - END_BYTES
    file.seek(0)
    if left_bytes < 0 or file.read(len(BEGIN)) != BEGIN:
        raise ProtocolError("this is no archive of a store, or one of another version")
    mac, num_entries = _begin_mac(key), 0
    while left_bytes:
        raw = file.read(min(HEADER_BYTES, left_bytes))
        header = parse_header(raw)
        if header is None or header.num_bytes > left_bytes - HEADER_BYTES:
            raise ProtocolError(
                f"entry {num_entries} of the archive makes no sense: it was changed"
            )
        body = file.read(header.num_bytes)
        if not has_digest(entries_key, header, body):
            raise ProtocolError(
                f"entry {num_entries} of the archive is not what was put, or was exported with "
                "another cluster key: both sides need the same BATON_CLUSTER_KEY"
            )
        mac.update(raw)
        num_entries += 1
        left_bytes -= HEADER_BYTES + header.num_bytes
        yield header, body
    if not hmac.compare_digest(file.read(END_BYTES), _make_end(mac, num_entries)):
        raise ProtocolError("the archive is not complete, or was put together from others")


def _ends_here(tier: CountedTier) -> bool:
    return isinstance(tier.inner, EndsWithUsers) and tier.inner.was_unused


def _put(tiers: Sequence[CountedTier], header: EntryHeader, body: bytes) -> PutResult | None:
    """None where no tier has room."""
    if any(tier.find((header.name,)) for tier in tiers):
        return PutResult.EXISTS
    for tier in tiers:
        with suppress(StoreFullError):
            return tier.put(header.name, body, header.tenant)
    return None


def _begin_mac(key: ClusterKey) -> hmac.HMAC:
    return hmac.new(key.sign("store", b"archive/1"), MAGIC, hashlib.sha256)


def _make_end(mac: hmac.HMAC, num_entries: int) -> bytes:
    count = _COUNT.pack(END, num_entries)
    whole = mac.copy()
    whole.update(count)
    return count + whole.digest()
