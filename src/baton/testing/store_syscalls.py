"""System calls of a tier in a folder that fail, or at which its process is killed: each in turn.

The modules of `store.folder` get an `os` of their own in which the n-th call of those that touch
files fails. A test runs the same work again and again, until n is beyond its last call.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from abc import abstractmethod
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from baton.errors import StoreError
from baton.store import folder
from baton.store.folder import bodies, directory
from baton.store.folder.tier import FolderTier
from baton.store.interface import NamedBody, PutResult, TenantLabel, Tier
from baton.testing.store_contract import (
    BODY_BYTES,
    StoreContract,
    body_of,
    name_of,
    put,
    put_many,
    read,
    scan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

CALLS: Final = (
    *("open", "stat", "fstat", "scandir", "pread", "preadv"),
    *("write", "pwrite", "utime", "link", "unlink", "ftruncate", "posix_fallocate", "fchmod"),
    *("fdatasync", "rename"),
)
MAX_CALLS: Final = 2000
NUM_ENTRIES: Final = 3
LAST: Final = f"entry {NUM_ENTRIES - 1}"
NEW: Final = ("new", "newer")
TENANT: Final = TenantLabel(b"a tenant")


@dataclass(slots=True)
class SystemCalls:
    """`os`, but that `act` is called before the call number `at` of `names`, counted from 0.

    Before that one alone, or where `at` is None before all of them.
    """

    at: int | None
    act: Callable[[], None]
    names: Sequence[str] = CALLS
    num_calls: int = 0
    name: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def has_failed(self) -> bool:
        """Whether the call was reached."""
        return self.num_calls > (self.at or 0)

    def __getattr__(self, name: str) -> object:
        """As of `os`."""
        found = getattr(os, name)
        if name not in self.names:
            return found

        def call(*arguments: object, **options: object) -> object:
            with self._lock:  # a tier writes by several threads
                self.num_calls += 1
                is_it = self.at is None or self.num_calls == self.at + 1
            if is_it:
                self.name = name
                self.act()
            return found(*arguments, **options)

        return call


@contextmanager
def failing(
    at: int | None, act: Callable[[], None], names: Sequence[str] = CALLS
) -> Generator[SystemCalls]:
    """In this process, for the length of a block."""
    calls = SystemCalls(at, act, names)
    found = iter_modules(folder.__path__, f"{folder.__name__}.")
    spaces = [vars(import_module(each.name)) for each in found]
    spaces = [space for space in spaces if space.get("os") is os]
    for space in spaces:
        space["os"] = calls
    try:
        yield calls
    finally:
        for space in spaces:
            space["os"] = os


class SystemCallFaultContract(StoreContract):
    """A subclass defines where in a place the entries are, and what one of the kit's takes up."""

    entry_bytes: ClassVar = bodies.compute_cost(BODY_BYTES)
    reads_by: ClassVar = "preadv"
    writes_by: ClassVar = "write"

    @abstractmethod
    def folder(self, place: Path) -> Path:
        """Where its files are."""

    @pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
    def test_a_system_call_that_fails_costs_caching_only(self, tmp_path: Path, error: int) -> None:
        def fail() -> None:
            raise OSError(error, os.strerror(error))

        failed: set[str] = set()
        with others_frozen():
            for at in count():
                place = tmp_path / str(at)
                place.mkdir()
                with self.opened(place, NUM_ENTRIES * self.entry_bytes) as tier:
                    fill(tier)
                    num_open = count_descriptors()
                    with failing(at, fail) as calls:
                        work(tier)
                    assert count_descriptors() == num_open, calls.name
                    check(tier)
                if not calls.has_failed:
                    break
                failed.add(calls.name)
                assert at < MAX_CALLS
        assert failed >= {"open", "stat", "pread", "pwrite", "link", "unlink"}
        assert failed >= {self.reads_by, self.writes_by}

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_process_killed_at_any_system_call_leaves_a_right_store(
        self, tmp_path: Path, first: int
    ) -> None:
        """At every second one, from the first or the second on."""
        for at in count(first, 2):
            place = tmp_path / str(at)
            place.mkdir()
            with self.opened(place, NUM_ENTRIES * self.entry_bytes) as tier:
                fill(tier)
                status = self._run_until_killed(place, at)
                assert status in {0, -signal.SIGKILL}
                check(tier)
                for i in range(2 * NUM_ENTRIES):  # what is counted is set right for want of room
                    put(tier, f"another {i}")
                assert tier.usage().used_bytes == scan(tier).used_bytes, at
            with self.opened(place, NUM_ENTRIES * self.entry_bytes) as tier:
                left = {path.name for path in self.folder(place).iterdir()}
                assert not [name for name in left if name.startswith(directory.UNFINISHED)]
            if status == 0:
                break
            assert at < MAX_CALLS
        assert at > 20  # it was killed at each of them

    def _run_until_killed(self, place: Path, at: int) -> int:
        """The exit status of a process that works in the place; negative: the signal's number."""
        child = os.fork()
        if child == 0:
            try:
                with self.opened(place, NUM_ENTRIES * self.entry_bytes) as tier:
                    with failing(at, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                        work(tier)
                    os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def others_frozen() -> Generator[None]:
    """What other tests have left is not looked through for garbage: that takes a second each time.

    Its descriptors stay open meanwhile, and so change no count.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as `tests.conftest` has it: each later search would go through all modules


def count_descriptors() -> int:
    """Of this process, without those of garbage."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def fill(tier: Tier) -> None:
    """Put so much that the next entry needs room."""
    for i in range(NUM_ENTRIES):
        tier.put(name_of(f"entry {i}"), body_of(f"entry {i}"), TENANT)


def work(tier: Tier) -> None:
    """Each operation; a failure is a miss, or a StoreError."""
    outcomes = put_many(tier, [NamedBody(name_of(c), body_of(c)) for c in NEW], TENANT)
    for content, outcome in zip(NEW, outcomes, strict=True):
        found = read(tier, content)
        assert found in {None, body_of(content)}
        assert found is None or isinstance(outcome, PutResult)
    assert read(tier, LAST) in {None, body_of(LAST)}
    tier.discard(name_of("new"))
    with suppress(StoreError):
        tier.entries()


def check(tier: Tier) -> None:
    """All is right, and can be used: afterwards."""
    found = scan(tier)
    assert found.used_bytes <= found.capacity_bytes
    assert tier.usage().used_bytes >= found.used_bytes, "less is counted than there is"
    if isinstance(tier, FolderTier):
        held_bytes = sum(each.num_bytes for each in tier.entries() if each.tenant == TENANT)
        assert tier._capacity.peek_held(TENANT) >= held_bytes  # noqa: SLF001 - of this tier alone
    assert all(tier.is_whole(entry.name) for entry in tier.entries())
    for content in (*NEW, *(f"entry {i}" for i in range(NUM_ENTRIES))):
        assert read(tier, content) in {None, body_of(content)}
    put(tier, "after")
    assert read(tier, "after") == body_of("after")
    assert scan(tier).used_bytes <= found.capacity_bytes
