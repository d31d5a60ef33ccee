"""A writer, or an owner, in another process: stopped, killed, or gone in peace, in mid-transfer.

The other process runs on this host, or on another one: a network namespace at the end of a cable.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Self

import msgspec
import numpy as np
import pytest

from baton.errors import PeerLostError, PeerUnreachableError
from baton.ids import new_epoch, new_ticket_id
from baton.kv.copies import PageCopies
from baton.testing.transport_contract.kit import LOOPBACK, TransportKit
from baton.testing.transport_pair import TIMEOUT_S, Side, whole_pages
from baton.testing.transport_peer import OWNED_BYTE, OwnerTask, PeerTask
from baton.transfer.interface import (
    Arrived,
    GrantQuiescent,
    PageRead,
    ReadCompleted,
    ReadFailed,
    RegionDescriptor,
    RemoteAttached,
    RemoteLost,
    TracksReaders,
    WriteGrant,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from numpy.typing import NDArray

    from baton.auth.credentials import Credentials
    from baton.testing.network_namespaces import FarHost
    from baton.transfer.interface import TransferId

SHAPES = ((256, 65_536),)
"""16 MiB: a write takes long enough to be interrupted."""
NUM_WRITES_BEFORE = 5
NUM_READS = 3
MAX_QUIESCENCE_S = 0.3
CUT_TIMEOUT_S = 8.0
START_TIMEOUT_S = 30.0  # a process that imports its transport's library, on a busy machine


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Where the other process lives: what its command begins with, and the address it binds.

    `module` is what it runs.
    """

    prefix: tuple[str, ...]
    host: str
    module: str = TransportKit.peer_module


THIS_HOST = ProcessPlacement((), LOOPBACK)


class ProcessKit(TransportKit):
    """Starts the other process, on this host or on another one."""

    def start_writer(self, far: FarHost | None = None) -> WriterProcess:
        """A writer there, which writes into a region here."""
        return WriterProcess(
            self.make_side(SHAPES), self.credentials, self.options, self._place_on(far)
        )

    def start_owner(self, far: FarHost | None = None) -> OwnerProcess:
        """An owner there, whose region is read from here."""
        return OwnerProcess(
            self.make_side(SHAPES), self.credentials, self.options, self._place_on(far)
        )

    def _place_on(self, far: FarHost | None) -> ProcessPlacement:
        if far is None:
            return ProcessPlacement((), LOOPBACK, self.peer_module)
        return ProcessPlacement(far.prefix, far.address, self.peer_module)


class ProcessContract(ProcessKit):
    """What the end of the writer's process means to its grants."""

    def test_a_killed_writers_grant_becomes_quiescent(self) -> None:
        with self.start_writer() as writer:
            writer.kill()
            writer.reader.transport.close_grant(writer.grant)
            writer.check_quiescent()

    def test_a_grant_closed_before_the_kill_becomes_quiescent(self) -> None:
        with self.start_writer() as writer:
            writer.stop()
            writer.reader.transport.close_grant(writer.grant)
            writer.check_waits_for_writer(is_quiescent=not self.peer_writes)
            writer.kill()
            writer.check_quiescent()

    def test_a_stopped_writer_that_goes_on_answers(self) -> None:
        with self.start_writer() as writer:
            writer.stop()
            writer.reader.transport.close_grant(writer.grant)
            writer.check_waits_for_writer(is_quiescent=not self.peer_writes)
            writer.resume()
            writer.check_quiescent()
            writer.check_alive()

    def test_a_writer_that_never_stops_writes_nothing_after_quiescence(self) -> None:
        with self.start_writer() as writer:
            writer.reader.transport.close_grant(writer.grant)
            writer.check_quiescent()
            writer.check_alive()

    def test_a_writer_that_leaves_in_peace(self) -> None:
        with self.start_writer() as writer:
            writer.leave()
            writer.reader.transport.close_grant(writer.grant)
            writer.check_quiescent()


class ReaderTrackingContract(ProcessKit):
    """For transports that are `TracksReaders`."""

    def test_the_end_of_a_process_that_mapped_the_pages_is_proved(self) -> None:
        """Not by the end of its connection, nor while it is stopped."""
        with self.start_writer() as reader:
            transport = reader.reader.transport
            assert isinstance(transport, TracksReaders)
            assert transport.open_reader(new_epoch()) is None
            process = transport.open_reader(reader.epoch)
            assert process is not None
            try:
                reader.stop()
                assert not _is_readable(process)
                reader.kill()
                reader.pump(lambda: _is_readable(process))
            finally:
                os.close(process)


class ReadOwnerContract(ProcessKit):
    """What the end of the owner's process means to reads, for transports that claim `reads`."""

    def test_reads_from_an_owner_that_is_killed_complete_or_fail(self) -> None:
        with self.start_owner() as owner:
            first = [owner.read() for _ in range(NUM_READS)]
            owner.kill()
            later = [owner.read() for _ in range(NUM_READS)]
            owner.pump(lambda: owner.is_lost and owner.num_ended == 2 * NUM_READS)
            last = owner.read()
            owner.pump(lambda: owner.num_ended == 2 * NUM_READS + 1)
            # Each once; those under way together may end in any order.
            assert sorted(event.transfer for event in owner.ended) == [*first, *later, last]
            assert owner.ended[-1].transfer == last
            assert isinstance(owner.ended[-1], ReadFailed)
            owner.check_bytes()


class ViewOwnerContract(ProcessKit):
    """What the end of the owner's process means to views, for transports that claim `views`."""

    def test_what_an_owner_that_is_killed_exported_stays_as_it_was(self) -> None:
        with self.start_owner() as owner:
            seen = owner.view()
            owner.kill()
            assert (seen == OWNED_BYTE).all()
            owner.pump(lambda: owner.is_lost)
            with pytest.raises(PeerLostError):
                owner.view()
            assert (seen == OWNED_BYTE).all()
            del seen  # the error's traceback keeps this frame, and the mapping has a descriptor


class NamespaceContract(ProcessKit):
    """For transports between hosts. The cable is a fixture of the session, `far_cable`.

    Laid before the first test of a process: UCX reads the routes once, when it is first used.
    `notices_cuts`: whether the transport itself finds out that a cable was cut. Where it does not,
    the handoff's own link does (`AgentOptions.liveness_timeout_s`), and detaches.
    """

    notices_cuts: ClassVar[bool]

    @pytest.fixture
    def far(self, far_cable: FarHost, monkeypatch: pytest.MonkeyPatch) -> FarHost:
        """The other host; this process's transports bind this end of the cable."""
        monkeypatch.setattr(type(self), "host", far_cable.near_address)
        return far_cable

    def test_a_writer_on_another_host_that_is_killed_leaves_a_quiescent_grant(
        self, far: FarHost
    ) -> None:
        with self.start_writer(far) as writer:
            assert (writer.reader.pages() != 0).all()
            writer.kill()
            writer.reader.transport.close_grant(writer.grant)
            writer.check_quiescent()

    def test_an_owner_on_another_host_is_read_until_it_is_killed(self, far: FarHost) -> None:
        with self.start_owner(far) as owner:
            first = owner.read()
            owner.pump(lambda: owner.num_ended == 1)
            assert owner.ended[0] == ReadCompleted(first, SHAPES[0][0] * SHAPES[0][1])
            owner.check_bytes()
            owner.kill()
            for _ in range(NUM_READS):
                owner.read()
            owner.pump(lambda: owner.is_lost and owner.num_ended == 1 + NUM_READS)
            assert isinstance(owner.ended[-1], ReadFailed)
            owner.check_bytes()

    def test_a_cut_cable_fails_a_read_in_mid_transfer(self, far: FarHost) -> None:
        """16 MiB at 8 MB/s: the cable is cut when some of it has come."""
        with self.start_owner(far) as owner, far.limited(8_000_000):
            owner.read()
            owner.pump_for(0.4)
            assert not owner.ended
            with far.cut():
                if self.notices_cuts:
                    owner.pump(lambda: owner.is_lost, CUT_TIMEOUT_S)
                else:
                    owner.pump_for(MAX_QUIESCENCE_S)
                    owner.reader.transport.detach(owner.remote)
                owner.pump(lambda: owner.num_ended == 1)
            assert isinstance(owner.ended[0], ReadFailed)
            assert isinstance(owner.ended[0].error, PeerLostError | PeerUnreachableError)
            owner.check_alive()
            owner.check_bytes()
            owner.pump_for(MAX_QUIESCENCE_S)  # on a whole cable: nothing of it lands any more
            assert owner.num_ended == 1


@contextmanager
def closed_on_error(process: OwnerProcess | WriterProcess) -> Generator[None]:
    """What did not come to be is not left behind: `with` closes only what it has entered."""
    try:
        yield
    except BaseException:
        process.__exit__()
        raise


class OwnerProcess:
    """A `transport_peer` whose region `reader` attached; closing this ends it."""

    def __init__(
        self,
        reader: Side,
        credentials: Credentials,
        options: Mapping[str, object],
        place: ProcessPlacement = THIS_HOST,
    ) -> None:
        self.reader = reader
        self.events: list[object] = []
        self._process = subprocess.Popen(  # noqa: S603 -- a test kit's module
            [*place.prefix, sys.executable, "-m", place.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        task = OwnerTask(
            reader.transport.kind,
            dict(options),
            credentials.key.secret.hex(),
            new_epoch(),
            SHAPES,
            place.host,
        )
        self._stdin, self._stdout = _pipes(self._process)
        self._stdin.write(msgspec.json.encode(task) + b"\n")
        self._stdin.flush()
        self._descriptor = self._stdout.readline()

    def __enter__(self) -> Self:
        with closed_on_error(self):
            descriptor = msgspec.json.decode(self._descriptor, type=RegionDescriptor)
            self.remote = self.reader.transport.attach(descriptor)
            self.pump(lambda: RemoteAttached(self.remote) in self.events)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(TIMEOUT_S)
        self._stdin.close()
        self._stdout.close()
        self.reader.close()

    @property
    def ended(self) -> list[ReadCompleted | ReadFailed]:
        """What was reported of reads, in order."""
        return [event for event in self.events if isinstance(event, ReadCompleted | ReadFailed)]

    @property
    def num_ended(self) -> int:
        """Reads of which something was reported."""
        return len(self.ended)

    @property
    def is_lost(self) -> bool:
        """Whether the owner's end was noticed."""
        return any(isinstance(event, RemoteLost) for event in self.events)

    def read(self) -> TransferId:
        """Post a read of all pages."""
        array = self.reader.region.arrays[0]
        pages = range(array.num_pages)
        copies = PageCopies(0, (whole_pages(pages, pages, array.page_bytes),))
        return self.reader.read(PageRead(self.remote, self.reader.region.handle, copies))

    def view(self) -> NDArray[np.uint8]:
        """The owner's pages, in place."""
        return self.reader.view(self.remote)

    def kill(self) -> None:
        """SIGKILL, and proof that it was that which ended the process."""
        self._process.kill()
        assert self._process.wait(TIMEOUT_S) == -signal.SIGKILL

    def check_bytes(self) -> None:
        """What was read is what the owner had: all of it, once a read has completed."""
        pages = self.reader.pages()
        is_whole = any(isinstance(event, ReadCompleted) for event in self.ended)
        assert (pages == OWNED_BYTE).all() or (
            not is_whole and not pages[pages != OWNED_BYTE].any()
        )

    def check_alive(self) -> None:
        """The process is still there."""
        assert self._process.poll() is None

    def pump(self, until: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Poll until something is the case."""
        deadline = time.monotonic() + timeout_s  # noqa: TID251 -- real processes, real time
        while not until():
            assert time.monotonic() < deadline, self.events[-3:]  # noqa: TID251 -- see above
            self.events += self.reader.transport.poll()
            time.sleep(0.001)

    def pump_for(self, duration_s: float) -> None:
        """Poll for so long."""
        end = time.monotonic() + duration_s  # noqa: TID251 -- real processes, real time
        self.pump(lambda: time.monotonic() > end, duration_s + TIMEOUT_S)  # noqa: TID251


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


class WriterProcess:
    """A `transport_peer` that is writing into `reader`; closing this ends it."""

    def __init__(
        self,
        reader: Side,
        credentials: Credentials,
        options: Mapping[str, object],
        place: ProcessPlacement = THIS_HOST,
    ) -> None:
        self.reader, self.grant = reader, new_ticket_id()
        self.events: list[object] = []
        self.epoch = epoch = new_epoch()
        num_pages = reader.region.arrays[0].num_pages
        grant = WriteGrant(self.grant, reader.region.handle, epoch, np.arange(num_pages))
        reader.transport.open_grant(grant)
        self._process = subprocess.Popen(  # noqa: S603 -- a test kit's module
            [*place.prefix, sys.executable, "-m", place.module],
            stdin=subprocess.PIPE,
        )
        task = PeerTask(
            reader.transport.kind,
            dict(options),
            credentials.key.secret.hex(),
            epoch,
            reader.descriptor,
            self.grant,
            num_pages,
            place.host,
        )
        self._send_line(msgspec.json.encode(task) + b"\n")

    def __enter__(self) -> Self:
        with closed_on_error(self):
            self.pump(lambda: self.num_arrived >= NUM_WRITES_BEFORE, START_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.reader.close()

    @property
    def num_arrived(self) -> int:
        """Writes of the peer that have arrived."""
        return sum(isinstance(event, Arrived) for event in self.events)

    def stop(self) -> None:
        """SIGSTOP, and proof that the process stands still."""
        self._process.send_signal(signal.SIGSTOP)
        self.pump(lambda: self._state() == "T")

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and proof that it was that which ended the process."""
        self._process.kill()
        assert self._process.wait(TIMEOUT_S) == -signal.SIGKILL

    def leave(self) -> None:
        """Let the process end of its own accord."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.pump(lambda: self._process.poll() == 0)

    def check_alive(self) -> None:
        """The process is still there."""
        assert self._process.poll() is None

    def check_waits_for_writer(self, *, is_quiescent: bool) -> None:
        """For a while nothing is reported, unless the receiver alone decides."""
        self._poll_for(MAX_QUIESCENCE_S)
        assert (GrantQuiescent(self.grant) in self.events) == is_quiescent

    def check_quiescent(self) -> None:
        """The grant becomes quiescent, once; from then on no byte changes."""
        self.pump(lambda: GrantQuiescent(self.grant) in self.events)
        num_arrived, at_quiescence = self.num_arrived, self.reader.snapshot()
        self._poll_for(MAX_QUIESCENCE_S)
        assert self.reader.snapshot() == at_quiescence
        assert self.num_arrived == num_arrived
        assert self.events.count(GrantQuiescent(self.grant)) == 1

    def pump(self, until: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Poll until something is the case."""
        deadline = time.monotonic() + timeout_s  # noqa: TID251 -- real processes, real time
        while not until():
            assert time.monotonic() < deadline, self.events[-3:]  # noqa: TID251 -- see above
            assert self._process.poll() in {None, 0, -signal.SIGKILL}, "it has ended"
            self._poll_for(0.002)

    def _poll_for(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s  # noqa: TID251 -- real processes, real time
        while time.monotonic() < end:  # noqa: TID251 -- see above
            self.events += self.reader.transport.poll()
            time.sleep(0.001)

    def _state(self) -> str:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        return stat.rpartition(")")[2].split()[0]

    def _send_line(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
