"""The contract of a source of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.gateway.options import WorkerAddress


class WorkerSource(Protocol):
    """Something that knows the addresses of workers: a file, DNS, Kubernetes, announcements.

    A source that cannot be read keeps quiet: what it last yielded stays valid, for as long as that
    takes. Owner: the event loop's thread.
    """

    def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """Yield the whole set at first, and again whenever it changes.

        Never ends by itself. Errors of the source are logged once for each cause, and retried.
        """
        ...
