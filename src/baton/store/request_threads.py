"""Threads that carry out requests, so that who waits for one waits for a bounded time.

A library's own time-outs bound each read of a socket, not a whole answer, and no lookup of a host's
name. A request that hangs keeps its thread, which ends with the process.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar, cast

from baton.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class RequestThreads:
    """At most `num_threads`, started when they are needed. Thread-safe."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = name, num_threads
        self._requests: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Carry out `work` on one of the threads, in the order of the calls.

        Raises:
            StoreError: the process may start no thread, and has none here.
        """
        future: Future[object] = Future()
        with self._lock:
            if len(self._threads) < min(self._num_unfinished + 1, self._num_threads):
                self._try_start()
            self._requests.put((future, work))
            self._num_unfinished += 1
        return cast("Future[T]", future)

    def stop(self, timeout_s: float) -> None:
        """End the threads, waiting for at most so long for those that are at work."""
        with self._lock:
            threads, self._num_threads = tuple(self._threads), 0
        for _ in threads:
            self._requests.put(None)
        for thread in threads:
            thread.join(timeout_s / len(threads))

    def _try_start(self) -> None:
        """Start one more. Where the process may have no more, the others do its work."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            if not self._threads:
                raise StoreError(f"{self._name}: {exc}") from exc
            return
        self._threads.append(thread)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            future, work = request
            if future.set_running_or_notify_cancel():
                _carry_out(future, work)
            with self._lock:
                self._num_unfinished -= 1


def _carry_out(future: Future[object], work: Callable[[], object]) -> None:
    try:
        result = work()
    except Exception as exc:  # noqa: BLE001 - who waits for it gets it
        future.set_exception(exc)
    else:
        future.set_result(result)
