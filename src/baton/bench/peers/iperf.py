"""iperf3: what a C program that does nothing else gets out of TCP between the same two cores.

It sends and receives bytes of its own: one buffer of 128 KiB for each stream, again and again
(seen with strace), which stays in a core's cache. So it is a bound more than a peer, its bytes are
not compared, and it says itself how long it took: its start and its handshake are not counted.
"""

from __future__ import annotations

import select
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from baton.bench.contender import Lap, Traits
from baton.bench.pool import allocate_pool
from baton.errors import ConfigError, TransferError
from baton.transfer.region import release_region

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.bench.contender import CallWaiting, Surroundings
    from baton.bench.workload import Direction, Move, Workload

PROGRAM: Final = "iperf3"
LAP_BYTES: Final = 1_000_000_000
"""So many that its start, of which the CPU time is counted, is below a hundredth."""
RUN_TIMEOUT_S: Final = 30.0
READY_TIMEOUT_S: Final = 3.0
RETRY_S: Final = 0.05
END_TIMEOUT_S: Final = 2.0
MAX_REASON_CHARS: Final = 200

S = TypeVar("S", bound=msgspec.Struct)


class Address(msgspec.Struct, frozen=True):
    """Where the owner's server listens while it serves."""

    host: str
    port: int


class _Outcome(msgspec.Struct, frozen=True):
    error: str = ""


class _Received(msgspec.Struct, frozen=True):
    bits_per_second: float


class _End(msgspec.Struct, frozen=True):
    sum_received: _Received


class _Finished(msgspec.Struct, frozen=True):
    end: _End


class Iperf:
    """See `Contender` and `SelfTimed`. Both programs run on the core of the part that started them.

    The server listens where it is told to, on loopback, and only while this part serves: it lets
    anybody in.
    """

    def __init__(self, around: Surroundings, *, num_streams: int) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise ConfigError("iperf3 is not installed: apt-get install iperf3")
        self._program, self._num_streams = program, num_streams
        self._role, self._host, self._clock = around.role, around.host, around.clock
        self._address = Address(around.host, 0)
        self.traits = Traits("TCP", ("push",), "tuned socket", bytes_of="its own")
        self.region = self.target = allocate_pool(("host",), 1)

    def introduce(self) -> bytes:
        """See `Contender`. It cannot choose a port itself; this one was free just now."""
        if self._role == "driver":
            return b""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.create_server((self._host, 0), family=family) as listener:
            self._address = Address(self._host, listener.getsockname()[1])
        return msgspec.msgpack.encode(self._address)

    def meet(self, introduction: bytes) -> None:
        """See `Contender`: each run connects anew."""
        if self._role == "driver":
            self._address = msgspec.msgpack.decode(introduction, type=Address)

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Contender`."""
        del direction

        def push() -> None:
            self._run(move.num_bytes)

        return push

    def time_moves(self, workload: Workload) -> Lap:
        """See `SelfTimed`: as many in one stream of bytes as make up `LAP_BYTES`."""
        num_moves = -(-LAP_BYTES // workload.num_bytes)
        rate = self._run(num_moves * workload.num_bytes)
        return Lap(num_moves, workload.num_bytes / rate)

    def rest(self) -> None:
        """See `Contender`: the owner sees orders itself."""

    def serve(self, call: CallWaiting) -> None:
        """See `Contender`. The server ends before this returns, so that its CPU time is known."""
        where = ("-B", self._address.host, "-p", str(self._address.port))
        server = subprocess.Popen(  # noqa: S603 - a program by its path, a number
            [self._program, "-s", *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while not call():
                select.select([call.fd], [], [])
        finally:
            _end(server)

    def close(self) -> None:
        """See `Contender`."""
        release_region(self.region)

    def _run(self, num_bytes: int) -> float:
        """Send so many bytes; bytes per second, as the receiving program measured it.

        Raises:
            TransferError: it did not work, with what it said.
        """
        end = self._clock.now() + READY_TIMEOUT_S
        while True:
            said = self._call_program(num_bytes)
            error = _decode(said, _Outcome).error
            if not error:
                return _decode(said, _Finished).end.sum_received.bits_per_second / 8
            if self._clock.now() >= end:
                raise TransferError(f"iperf3: {error[:MAX_REASON_CHARS]}")
            time.sleep(RETRY_S)  # the server is about to listen, or ends the run before

    def _call_program(self, num_bytes: int) -> bytes:
        where = ("-c", self._address.host, "-p", str(self._address.port))
        what = ("-n", str(num_bytes), "-P", str(self._num_streams), "--json")
        try:
            done = subprocess.run(  # noqa: S603 - a program by its path, numbers
                [self._program, *where, *what],
                capture_output=True,
                timeout=RUN_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise TransferError(f"iperf3 took longer than {RUN_TIMEOUT_S:g} s") from exc
        return done.stdout


def _decode(said: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(said, type=kind)
    except msgspec.MsgspecError as exc:
        raise TransferError(f"iperf3 did not say what it measured: {exc}") from exc


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
