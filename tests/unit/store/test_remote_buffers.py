"""What a tier on a server holds for a while: values fetched ahead, and values to be written."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from baton.errors import StoreError
from baton.store.remote.read_ahead import ReadAhead
from baton.store.remote.write_behind import WriteBehind
from baton.store.request_threads import RequestThreads
from baton.testing.store_contract import name_of

if TYPE_CHECKING:
    from baton.store.interface import EntryName

NAMES = [name_of(f"entry {i}") for i in range(10)]


class Fetches:
    """Requests that are answered at once; which ones there were."""

    def __init__(self) -> None:
        self.names: list[EntryName] = []

    def __call__(self, name: EntryName) -> Future[bytes | None]:
        self.names.append(name)
        future: Future[bytes | None] = Future()
        future.set_result(name * 4)
        return future


def test_values_are_fetched_ahead_within_bounds() -> None:
    fetches = Fetches()
    ahead = ReadAhead(fetches, max_entries=4, max_bytes=300)
    ahead.expect(NAMES)
    assert ahead.take(NAMES[0]).result() == NAMES[0] * 4
    assert fetches.names == NAMES[:2], "of values of an unknown size one is fetched ahead"
    ahead.observe(128)
    ahead.take(NAMES[1])
    assert fetches.names == NAMES[:4], "two fit"
    ahead.observe(1)
    ahead.take(NAMES[2])
    assert fetches.names == NAMES[:7], "four at most"
    ahead.observe(1000)
    ahead.take(NAMES[3])
    assert fetches.names == NAMES[:7]


def test_what_is_not_expected_any_more_is_dropped() -> None:
    fetches = Fetches()
    ahead = ReadAhead(fetches, max_entries=4, max_bytes=1000)
    ahead.expect(NAMES)
    ahead.observe(1)
    ahead.take(NAMES[0])
    ahead.forget(NAMES[1])
    ahead.take(NAMES[1])
    assert fetches.names.count(NAMES[1]) == 2, "it was removed meanwhile, and is asked for again"
    ahead.expect([NAMES[9], NAMES[3]])
    ahead.take(NAMES[2])
    ahead.take(NAMES[3])
    assert fetches.names.count(NAMES[2]) == 2
    assert fetches.names.count(NAMES[3]) == 1


def refuse_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def make_queue(max_bytes: int, num_writers: int = 1) -> tuple[WriteBehind, list, threading.Event]:
    """A queue whose writes wait for the event; what was written."""
    written: list[EntryName] = []
    may_write = threading.Event()

    def write(name: EntryName, value: bytes) -> None:
        assert may_write.wait(30)
        if value == b"bad":
            raise StoreError("no")
        written.append(name)

    threads = RequestThreads("test", 4)
    queue = WriteBehind(write, threads.submit, max_bytes=max_bytes, num_writers=num_writers)
    return queue, written, may_write


def test_what_waits_is_bounded_and_found() -> None:
    queue, written, may_write = make_queue(100)
    assert all(queue.try_add(name, bytes(30)) for name in NAMES[:3])
    assert queue.try_add(NAMES[0], bytes(30)), "it waits already"
    assert not queue.try_add(NAMES[3], bytes(30))
    assert queue.get(NAMES[2]) == bytes(30)
    queue.discard(NAMES[2])
    assert queue.get(NAMES[2]) is None
    assert queue.try_add(NAMES[3], bytes(30))
    assert not queue.wait_empty(0.01)
    may_write.set()
    assert queue.wait_empty(30)
    assert written == [NAMES[0], NAMES[1], NAMES[3]], "in the order in which they came"
    assert queue.get(NAMES[0]) is None
    assert all(queue.try_add(name, bytes(30)) for name in NAMES[:3])
    assert queue.wait_empty(30)


def test_a_value_that_is_larger_than_the_bound_is_taken_alone() -> None:
    queue, written, may_write = make_queue(100)
    assert queue.try_add(NAMES[0], bytes(101))
    assert not queue.try_add(NAMES[1], bytes(1))
    may_write.set()
    assert queue.wait_empty(30)
    assert queue.try_add(NAMES[1], bytes(1)), "its room is free again"
    assert queue.wait_empty(30)
    assert written == NAMES[:2]


def test_what_no_thread_can_be_started_for_is_not_carried_out_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, done = RequestThreads("test", 2), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(StoreError, match="new thread"):
            threads.submit(lambda: done.append("first"))
    threads.submit(lambda: done.append("second")).result(30)
    may_end = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        threads.submit(lambda: may_end.wait(30))
        third = threads.submit(lambda: done.append("third"))  # by the thread that there is
    may_end.set()
    third.result(30)
    assert done == ["second", "third"]
    threads.stop(30)


def test_after_a_failure_what_waits_is_dropped() -> None:
    queue, written, may_write = make_queue(100)
    assert queue.take_failure() is None
    queue.try_add(NAMES[0], b"bad")
    queue.try_add(NAMES[1], bytes(30))
    may_write.set()
    assert queue.wait_empty(30)
    assert written == []
    assert queue.num_dropped == 2
    assert isinstance(queue.take_failure(), StoreError)
    assert queue.take_failure() is None
    assert queue.try_add(NAMES[1], bytes(100)), "its room is free again"
    assert queue.wait_empty(30)
    assert written == [NAMES[1]]


def test_what_was_written_is_reported_once_and_not_after_a_failure() -> None:
    queue, _, may_write = make_queue(100)
    may_write.set()
    assert not queue.take_success()
    for value, has_written in ((bytes(30), True), (b"bad", False), (bytes(30), True)):
        queue.try_add(NAMES[0], value)
        assert queue.wait_empty(30)
        assert queue.take_success() is has_written
        assert not queue.take_success()
