"""iperf3: the TCP rate of a C program between the same two cores.

It sends bytes of its own: one buffer of 128 KiB for each stream, again and again (seen with
strace), which stays in a core's cache. So it is an upper limit rather than a peer, and its
bytes are not verified. It reports the time itself: its start and its handshake are not counted.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from baton.errors import UNDECODABLE, ConfigError, TransferError
from baton.rig.backend import Backend, BackendContext, StopRequested, TimedBatch, Traits
from baton.rig.pages import Direction, Move, Workload, allocate_pool

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM: Final = "iperf3"
BATCH_BYTES: Final = 1_000_000_000
"""Enough for the CPU time of its start to be below one percent."""
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


class Iperf(Backend):
    """See `Backend` and `SelfTimed`. Both programs run on the core of the node that started them.

    The server listens on the loopback address that it is given, without authentication, and only
    while this node serves.
    """

    def __init__(self, context: BackendContext, *, num_streams: int) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise ConfigError("iperf3 is not installed: apt-get install iperf3")
        self._program, self._num_streams = program, num_streams
        self._role, self._host, self._clock = context.role, context.host, context.clock
        self._address = Address(context.host, 0)
        self.traits = Traits("TCP", ("push",), "tuned socket", bytes_of="its own")
        self.region = self.target = allocate_pool(("host",), 1)

    def local_metadata(self) -> bytes:
        """See `Backend`. iperf3 cannot choose a port itself; this one was free just now."""
        if self._role == "driver":
            return b""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.create_server((self._host, 0), family=family) as listener:
            self._address = Address(self._host, listener.getsockname()[1])
        return msgspec.msgpack.encode(self._address)

    def connect(self, metadata: bytes) -> None:
        """See `Backend`: each run opens its own connection."""
        if self._role == "driver":
            self._address = msgspec.msgpack.decode(metadata, type=Address)

    def prepare(self, move: Move, direction: Direction) -> Callable[[], None]:
        """See `Backend`."""
        del direction

        def push() -> None:
            self._run(move.num_bytes)

        return push

    def time_moves(self, workload: Workload) -> TimedBatch:
        """See `SelfTimed`: as many in one stream of bytes as make up `BATCH_BYTES`."""
        num_moves = -(-BATCH_BYTES // workload.num_bytes)
        rate = self._run(num_moves * workload.num_bytes)
        return TimedBatch(num_moves, workload.num_bytes / rate)

    def serve(self, stop: StopRequested) -> None:
        """See `Backend`. The server ends before this returns, so that its CPU time is counted."""
        where = ("-B", self._address.host, "-p", str(self._address.port))
        server = subprocess.Popen(  # noqa: S603 - a program by its path, a number
            [self._program, "-s", *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            super().serve(stop)
        finally:
            _end(server)

    def _run(self, num_bytes: int) -> float:
        """Send this many bytes; the rate in bytes per second, as the receiver measured it.

        Raises:
            TransferError: it failed; with its error message.
        """
        end = self._clock.now() + READY_TIMEOUT_S
        while True:
            output = self._call_program(num_bytes)
            error = _decode(output, _Outcome).error
            if not error:
                return _decode(output, _Finished).end.sum_received.bits_per_second / 8
            if self._clock.now() >= end:
                raise TransferError(f"iperf3: {error[:MAX_REASON_CHARS]}")
            time.sleep(RETRY_S)  # the server does not listen yet, or still ends the last run

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


def one_stream(context: BackendContext) -> Iperf:
    """One TCP connection."""
    return Iperf(context, num_streams=1)


def two_streams(context: BackendContext) -> Iperf:
    """Two TCP connections."""
    return Iperf(context, num_streams=2)


def _decode(output: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(output, type=kind)
    except UNDECODABLE as exc:
        raise TransferError(f"iperf3 reported no result: {exc}") from exc


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
