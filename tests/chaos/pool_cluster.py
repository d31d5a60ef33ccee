"""Two pairs whose workers share a store each, one in memory and one on disk, in mode pool.

Prefill and decode never meet there: what they share is a folder, and this process is a third user
of it, the `StoreNeighbour`, who evicts entries, takes the room or stops with the lock.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from baton.auth.key import ClusterKey
from baton.clock import MachineClock
from baton.store.entry_format import HEADER_BYTES
from baton.store.folder.bodies import compute_cost
from baton.store.folder.directory import UNFINISHED
from baton.store.folder.shared_capacity import CAPACITY_FILE, SharedCapacity
from baton.store.interface import NAME_BYTES, TIERS, EntryName, TierContext
from baton.testing.fleet import Fleet
from baton.testing.store_faults import find_open_sizes
from tests.chaos import store_failpoints
from tests.chaos.clients import Prompts
from tests.chaos.conftest import KEY, ROLES, SEED, ChaosCluster, Pair, start
from tests.chaos.process_state import read_descriptors
from tests.chaos.store_failpoints import StorePoint
from tests.preloaded import start_preloaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.config.sections import Role
    from baton.testing.fleet import FleetProcess

ENTRY_TOKENS = 64
"""Of a full entry: the default of `store.block_size`."""
NUM_PROMPT_TOKENS = 4 * ENTRY_TOKENS + 44
NUM_ENTRIES = 5
BODY_BYTES = ENTRY_TOKENS * 6 * 2 * 2 * 32 * 4
"""Of the demo model in float32: layers, planes, KV heads, head dim."""
CAPACITY_BYTES = 40 * compute_cost(BODY_BYTES)
TRANSPORT_BESIDE = {"shared": "shared", "file": "tcp"}
"""By which the pair with such a tier hands over where the store cannot."""
MAX_ATTEMPTS = 100
PAUSE_S = 0.05
SLACK_BYTES = 2 * compute_cost(1)
"""Room for a note and no entry, where the neighbour takes all the rest."""


class OtherStoreUser:
    """One more user of a folder of entries, as any worker is. Owner: the test."""

    def __init__(self, folder: Path) -> None:
        options = {"directory": str(folder), "capacity_bytes": CAPACITY_BYTES}
        self.folder = folder
        key = ClusterKey.from_hex(KEY).sign("store", b"entries")
        context = TierContext("chaos", key, MachineClock())
        self._tier = TIERS.build("file", options)(context)
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._capacity = SharedCapacity(self._descriptor, CAPACITY_BYTES)
        self._num_taken_bytes = 0
        self._numbers = itertools.count()

    @property
    def num_reserved_bytes(self) -> int:
        """What somebody is about to keep, as all users know it."""
        return self._capacity.peek().reserved_bytes

    def take_back(self) -> None:
        """What killed workers were about to keep is forgotten, as whenever there is no room."""
        assert self._capacity.try_reserve(2 * CAPACITY_BYTES, needs_no_memory) is not None

    def names(self) -> frozenset[str]:
        """Of entries and notes."""
        return frozenset(path.name for path in self.folder.iterdir() if is_entry(path.name))

    def unfinished(self) -> list[str]:
        """Files that somebody has begun, where the filesystem has none without a name."""
        return [path.name for path in self.folder.iterdir() if path.name.startswith(UNFINISHED)]

    def evict(self, names: frozenset[str]) -> int:
        """Put entries of one's own until these had to go; how many it took."""
        body = bytes(BODY_BYTES)
        for num_put in range(3 * CAPACITY_BYTES // BODY_BYTES):
            if not names & self.names():
                return num_put
            self._tier.put(EntryName(next(self._numbers).to_bytes(32, "big")), body)
        raise AssertionError("they do not go")

    def fill_capacity(self) -> None:
        """Nothing is kept any more, and nothing but a note can be: all is about to be written."""
        for _ in range(MAX_ATTEMPTS):  # workers may still keep what the request before has left
            for name in self.names():
                self._tier.discard(EntryName(bytes.fromhex(name)))
            num_bytes = CAPACITY_BYTES - self.num_reserved_bytes - SLACK_BYTES
            if self._capacity.try_reserve(num_bytes, needs_no_memory) is None:
                self._num_taken_bytes = num_bytes
                return
            time.sleep(PAUSE_S)
        raise AssertionError("there was no room")

    def free_capacity(self) -> None:
        self._capacity.release(self._num_taken_bytes)
        self._num_taken_bytes = 0

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """The lock of the counts is held meanwhile, as by a user that was stopped with it."""
        fd = os.open(self.folder / CAPACITY_FILE, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        self._capacity.close()
        os.close(self._descriptor)
        self._tier.close()


def needs_no_memory() -> bool:
    """Bodies lie in their entries' files."""
    return True


def is_entry(name: str) -> bool:
    return len(name) == 2 * NAME_BYTES


@dataclass
class PoolPair(Pair):
    """`points` are found by role."""

    points: dict[str, StorePoint] = field(default_factory=dict)
    other_user: OtherStoreUser = field(init=False)

    def heal(self) -> None:
        for point in self.points.values():
            point.release()
        self.other_user.free_capacity()
        super().heal()

    def check_writing(self) -> None:
        """Prefill has written half of an entry, and the room for it is taken."""
        half = HEADER_BYTES + BODY_BYTES // 2
        assert half in find_open_sizes(self.prefill.pid, self.other_user.folder)
        assert self.other_user.num_reserved_bytes >= compute_cost(BODY_BYTES)

    def find_open_entries(self) -> list[Path]:
        """Entries that decode has open."""
        folder = self.other_user.folder
        opened = [Path(target) for target in read_descriptors(self.decode.pid)]
        return [path for path in opened if path.parent == folder and is_entry(path.name)]


@contextmanager
def open_pool_cluster(
    folder: Path, oracle: FleetProcess, tiers: Sequence[str]
) -> Iterator[tuple[ChaosCluster, tuple[PoolPair, ...]]]:
    """Start a pair for each kind of tier."""
    root = Path(__file__).parents[2]
    store_failpoints.install(folder)
    paths = [str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, BATON_CLUSTER_KEY=KEY, PYTHONPATH=os.pathsep.join(paths))
    logs = folder / "logs"
    logs.mkdir()
    with ExitStack() as stack:
        memory = Path(tempfile.mkdtemp(prefix="tmp-chaos-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        places = {"shared": memory, "file": folder / "entries"}
        fleet = stack.enter_context(Fleet(logs, environment, start=start_preloaded))
        pairs = tuple(_start(fleet, tier, places[tier], folder) for tier in tiers)
        for pair, tier in zip(pairs, tiers, strict=True):
            pair.settle()
            (own,) = memory.iterdir() if tier == "shared" else (places[tier],)
            pair.other_user = OtherStoreUser(own)
        print(f"seed {SEED}, logs in {logs}")
        yield ChaosCluster(oracle.wait_ready(), pairs, Prompts(SEED)), pairs
        for pair in pairs:
            pair.other_user.close()
        assert set(fleet.stop().values()) == {0}
        assert not list(memory.iterdir()), "the last user takes the memory away"


def _start(fleet: Fleet, tier: str, place: Path, folder: Path) -> PoolPair:
    """Both workers of a pair, without waiting for them."""
    points = {role: StorePoint(folder / f"{tier}-{role}") for role in ROLES}
    options: dict[str, object] = {"directory": str(place), "capacity_bytes": CAPACITY_BYTES}
    changes: dict[Role, dict[str, object]] = {}
    for role, point in points.items():
        point.folder.mkdir()
        changes[role] = store_failpoints.settings(point.folder, tier, options)
    transport = TRANSPORT_BESIDE[tier]
    prefill, decode = (start(fleet, transport, role, changes[role]) for role in ROLES)
    return PoolPair(transport, fleet, prefill, decode, mode="pool", changes=changes, points=points)
