"""A peer that keeps whatever it is sent: an authenticated process whose values may be wrong.

`python -m tests.peer_server PORT` answers on 127.0.0.1 until it is killed.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.store.capacity import StoredEntry
from baton.store.entry_format import HEADER_BYTES
from baton.store.interface import PeerAccess, PutResult, Usage
from baton.store.peer.server import EntryServer, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.store.interface import EntryName

PEER_KEY = ClusterKey(b"p" * 32)
MAX_VALUE_BYTES = 16 << 20


def access(*, serves: bool = False) -> PeerAccess:
    return PeerAccess(Credentials.of(PEER_KEY), serves=serves)


class RawEntries:
    """See `ServedEntries`: checks nothing."""

    def __init__(self) -> None:
        self._values: dict[EntryName, bytes] = {}

    def holds(self, names: Sequence[EntryName]) -> list[bool]:
        return [name in self._values for name in names]

    def read_value(self, name: EntryName, *, is_use: bool) -> tuple[bytes, bytes] | None:
        value = self._values.get(name)
        return None if value is None else (value[:HEADER_BYTES], value[HEADER_BYTES:])

    def put_value(self, name: EntryName, value: memoryview) -> PutResult:
        self._values[name] = bytes(value)
        return PutResult.STORED

    def discard(self, name: EntryName) -> None:
        self._values.pop(name, None)

    def entries(self) -> list[StoredEntry]:
        now = MachineClock().unix_now()
        return [StoredEntry(name, len(value), now) for name, value in self._values.items()]

    def usage(self) -> Usage:
        return Usage(sum(map(len, self._values.values())), 1 << 30, 0, 0, 0)


def main(port: int) -> None:
    options = ServerOptions("127.0.0.1", port, takes_entries=True, max_value_bytes=MAX_VALUE_BYTES)
    EntryServer(RawEntries(), options).start(access(serves=True), MachineClock())
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(int(sys.argv[1]))
