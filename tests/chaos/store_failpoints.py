"""A store of real workers that holds them where a test says so, through files.

`install` makes it an entry point, as a stranger's plug-in would be. It is the tier `inner`, but
that its worker can be held half-way through the writing of an entry (room is taken, the file has no
name), and with an entry open that it has not read. The test writes `armed.json`; the worker says in
`held.json` that it is held, and goes on when the test arms something else, or nothing.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from baton.registry import Plugin
from baton.store.folder import bodies, body_pool, directory
from baton.store.interface import NO_TENANT, TIERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from baton.store.capacity import StoredEntry
    from baton.store.interface import (
        Body,
        EntryLease,
        EntryName,
        PutResult,
        TenantLabel,
        Tier,
        TierContext,
        Usage,
    )

Touch: TypeAlias = Literal["put", "read"]

SMALLEST_BODY_BYTES = 4096
"""Of a prompt's KV; notes are smaller, and nobody is held at them."""
PAUSE_S = 0.005


class StoreFailpointOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is wrapped, its options, and where the files lie."""

    inner: str
    options: dict[str, object]
    folder: str


class Armed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who touches an entry so after `num_before` others is held, until this changes."""

    number: int
    touch: Touch | None = None
    num_before: int = 0


class StorePoint:
    """The test's end of it, for one worker (in all its lives)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0

    def arm(self, touch: Touch | None, num_before: int = 0) -> None:
        self._number += 1
        armed = Armed(self._number, touch, num_before)
        _replace(self.folder / "armed.json", msgspec.json.encode(armed))

    def release(self) -> None:
        self.arm(None)

    @property
    def is_held(self) -> bool:
        """Whether the worker is held by what was armed last."""
        try:
            entries = msgspec.json.decode((self.folder / "held.json").read_bytes(), type=int)
        except FileNotFoundError:
            return False
        return entries == self._number


class _Latch:
    """The worker's end of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = self._num_touched = 0

    def touch(self, touch: Touch) -> None:
        armed = self._look()
        if armed.touch != touch:
            return
        if armed.number != self._number:
            self._number, self._num_touched = armed.number, 0
        self._num_touched += 1
        if self._num_touched != armed.num_before + 1:
            return
        _replace(self._folder / "held.json", msgspec.json.encode(armed.number))
        while self._look().number == armed.number:
            time.sleep(PAUSE_S)

    def _look(self) -> Armed:
        try:
            return msgspec.json.decode((self._folder / "armed.json").read_bytes(), type=Armed)
        except FileNotFoundError:
            return Armed(0)


class _HalfWay:
    """An entry's buffers, of which the last one stops in the middle."""

    def __init__(self, buffers: Iterable[Body], latch: _Latch) -> None:
        self._buffers, self._latch = buffers, latch

    def __iter__(self) -> Iterator[Body]:
        *first, body = self._buffers
        yield from first
        half = len(body) // 2
        yield body[:half]
        if len(body) >= SMALLEST_BODY_BYTES:
            self._latch.touch("put")
        yield body[half:]


def _copy_half_way(
    latch: _Latch, views: Iterator[NDArray[np.uint8]], body: Body
) -> Iterator[NDArray[np.uint8]]:
    """The same of a body that goes into the folder's pool."""
    num_copied, is_past = 0, False
    for piece in body_pool.copy_in(views, body):
        if not is_past and num_copied + len(piece) > len(body) // 2:
            is_past = True
            latch.touch("put")
        yield piece
        num_copied += len(piece)


class FailpointTier:
    """See `Tier`."""

    def __init__(self, inner: Tier, latch: _Latch) -> None:
        self._inner, self._latch = inner, latch
        vars(bodies)["write_all"] = lambda fd, buffers, min_bytes=0: directory.write_all(
            fd, buffers if min_bytes else _HalfWay(buffers, latch), min_bytes
        )
        vars(bodies)["copy_in"] = partial(_copy_half_way, latch)

    def find(self, names: Sequence[EntryName]) -> int:
        return self._inner.find(names)

    def put(self, name: EntryName, body: Body, tenant: TenantLabel = NO_TENANT) -> PutResult:
        return self._inner.put(name, body, tenant)

    def try_lease(self, name: EntryName) -> EntryLease | None:
        lease = self._inner.try_lease(name)
        if lease is not None and lease.num_bytes >= SMALLEST_BODY_BYTES:
            self._latch.touch("read")
        return lease

    def discard(self, name: EntryName) -> None:
        self._inner.discard(name)

    def entries(self) -> list[StoredEntry]:
        return self._inner.entries()

    def is_whole(self, name: EntryName) -> bool:
        return self._inner.is_whole(name)

    def usage(self) -> Usage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()


def _build(options: StoreFailpointOptions):
    def factory(context: TierContext) -> Tier:
        inner = TIERS.build(options.inner, options.options)(context)
        return FailpointTier(inner, _Latch(Path(options.folder)))

    return factory


PLUGIN = Plugin(StoreFailpointOptions, _build)


def install(directory: Path) -> None:
    """Write the distribution's metadata; the directory and the clone belong on PYTHONPATH."""
    metadata = directory / "storefailpoints-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: storefailpoints\nVersion: 1.0\n", "utf-8")
    entry = f"[baton.tiers]\nfailpoint = {__name__}:PLUGIN\n"
    (metadata / "entry_points.txt").write_text(entry, "utf-8")


def settings(folder: Path, inner: str, options: dict[str, object]) -> dict[str, object]:
    """What a worker's configuration says."""
    return {
        "store.tiers": ["failpoint"],
        "store.options.failpoint.inner": inner,
        "store.options.failpoint.folder": str(folder),
    } | {f"store.options.failpoint.options.{key}": value for key, value in options.items()}


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)
