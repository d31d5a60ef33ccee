"""Calls that may hang without limit, on threads that nothing waits for: no process's end does.

An event loop's own threads are waited for when it ends (`Runner`), and by the interpreter.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


def begin_call(name: str, function: Callable[[], Result]) -> Future[Result]:
    """Begin a call on a thread of this name. Who waits for its result may be cancelled: not it.

    Raises:
        OSError: there are no more threads.
    """
    result: Future[Result] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as exc:  # noqa: BLE001 - whoever waits for the result gets it
            result.set_exception(exc)
        except BaseException as exc:  # noqa: BLE001 - a library in Rust that panics
            result.set_exception(RuntimeError(repr(exc)))

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as exc:
        raise OSError(str(exc)) from exc
    return result
