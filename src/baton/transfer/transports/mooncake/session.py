"""One Mooncake, for one peer, in a process of its own: what it may touch, and its end, are ours.

Mooncake listens on all addresses, reads and writes whatever address an unauthenticated peer names,
spins while it waits, and takes a second to end. In a process that maps nothing but regions of
pages, those are the only memory at stake; its spinning takes no time from this process; and SIGKILL
ends it at once.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, TypeVar, assert_never

import msgspec
import numpy as np

from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import read_environment
from baton.errors import UNDECODABLE, TransferError
from baton.net.framing import decode, encode
from baton.transfer.region import compute_region_bytes
from baton.transfer.scatter_gather import compute_copy_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from baton.clock import Clock
    from baton.ids import RegionHandle
    from baton.kv.copies import PageCopies
    from baton.transfer.interface import PageArray, PagedRegion, RegionDescriptor
    from baton.transfer.onesided.session import Direction


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `mooncake` transport.

    Mooncake does not authenticate peers: a host that reaches its ports can read and write the
    regions' pages. They are confined to the network interface that has the bind address (with
    loopback, to this host), or `advertise_host` where that is none; use it where everybody who
    reaches that is trusted.

    `protocol`: what Mooncake moves bytes by; `rdma` stripes over all devices it finds, or
    over `devices` only, and does not start where there is none.
    `advertise_host`: the address that peers are sent, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `max_connections`: of peers to this worker at once; what exceeds them is refused. Each has a
    process here, which takes 35 MiB.
    """

    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: tuple[str, ...] = ()
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 256


MAX_RUNS: Final = 2048
"""Of one order, which is one packet: 48 KiB."""
MAX_PACKET_BYTES: Final = 1 << 16

M = TypeVar("M")


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Start Mooncake, reachable over one interface."""

    host: str
    interface: str
    protocol: str
    devices: str


class Register(msgspec.Struct, frozen=True, tag="register"):
    """With a memfd: know this region."""

    region: bytes
    num_bytes: int


class SetPeer(msgspec.Struct, frozen=True, tag="set_peer"):
    """Where the peer's Mooncake answers (`host:port`), and its region's address there."""

    name: str
    base: int


class StartTransfer(msgspec.Struct, frozen=True, tag="start_transfer"):
    """Move runs, int64 `[r, 3]`: offset in our region, offset in the peer's, bytes."""

    id: int
    direction: Literal["write", "read"]
    region: bytes
    runs: bytes


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Mooncake runs, and is confined."""


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """Where peers ask for it, and the address that they need."""

    port: int
    base: int


class TransferDone(msgspec.Struct, frozen=True, tag="transfer_done"):
    """All of it is in place."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last word."""

    reason: str


Command: TypeAlias = Open | Register | SetPeer | StartTransfer
Report: TypeAlias = Started | Registered | TransferDone | Failed

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)

decode_command = _commands.decode
decode_report = _reports.decode


def receive(sock: socket.socket, decode: Callable[[bytes], M]) -> tuple[M, int | None]:
    """In the child: one packet, and the descriptor that came along.

    Raises:
        TransferError: the other side is gone.
    """
    body, fds, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, 1)
    return decode(_require(body)), fds[0] if fds else None


def _require(body: bytes) -> bytes:
    if not body:
        raise TransferError("Mooncake's process, or the one that started it, has ended")
    return body


MAX_ADDRESS: Final = 1 << 57
START_TIMEOUT_S: Final = 2.0
"""For a peer that attaches, from when its process has started. The agent's thread waits meanwhile,
and its peers give up a worker that is silent for `liveness_timeout_s` (3 s): all its handoffs would
fail."""
PINNED_BYTES_S: Final = 4 << 30
"""Bytes that `rdma` may take a second for besides: it pins the region's memory."""
MIN_WAIT_S: Final = 0.001
ENVIRONMENT: Final = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384", "MC_LOG_LEVEL": "ERROR"}
FORCED_PROTOCOL: Final = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}
"""Without either, Mooncake takes RDMA where it finds a device, and TCP elsewhere. The protocol that
it is started with has no influence on that."""


class MooncakeMetadata(msgspec.Struct, frozen=True):
    """Where the peer's Mooncake answers, on the host that was dialled, and its region's address."""

    port: Annotated[int, msgspec.Meta(gt=0, lt=65_536)]
    base: int


_metadata = msgspec.msgpack.Decoder(MooncakeMetadata)


@dataclass(slots=True, eq=False)
class MooncakeHandle:
    """A posted transfer: orders not given yet, and those that are not reported done."""

    commands: list[StartTransfer]
    unfinished: set[int] = field(default_factory=set)


class MooncakeSession:
    """See `OneSidedSession`. The process takes a third of a second, or more, to start.

    `get_metadata` waits for that, unless its descriptor (`prepare`) is readable, and for the region
    to be registered; for both together at most `START_TIMEOUT_S`, with `rdma` and the time to pin
    it.

    Raises:
        TransferError: it cannot be started: no descriptor, or no memory, is left.
    """

    peer_process_writes = False
    needs_serving = True

    def __init__(
        self, host: str, interface: str, *, protocol: str, devices: str, clock: Clock
    ) -> None:
        self._clock, self._pins_memory = clock, protocol == "rdma"
        try:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "baton.transfer.transports.mooncake.child"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_compute_environment(host, protocol),
                )
        except OSError as exc:
            raise TransferError(f"cannot start Mooncake's process: {exc}") from exc
        self._known: set[RegionHandle] = set()
        self._theirs: tuple[PageArray, ...] | None = None
        self._num_commands = 0
        self._handles: dict[int, MooncakeHandle] = {}
        self._socket.send(encode(Open(host, interface, protocol, devices)))

    def prepare(self, region: PagedRegion) -> int:
        """See `OneSidedSession`. Readable when the process has started, or has ended."""
        self._register(region)
        return self._socket.fileno()

    def get_metadata(self, region: PagedRegion) -> bytes:
        """See `OneSidedSession`."""
        self._register(region)
        pinned_bytes = len(region.memory) if self._pins_memory else 0
        deadline = self._clock.now() + START_TIMEOUT_S + pinned_bytes / PINNED_BYTES_S
        for _ in range(2):  # `Started` comes first
            self._socket.settimeout(max(deadline - self._clock.now(), MIN_WAIT_S))
            report = self._receive()
            if isinstance(report, Registered):
                return encode(MooncakeMetadata(report.port, report.base))
            self._handle_report(report)
        raise TransferError("Mooncake's process has registered no region")

    def load_metadata(self, metadata: bytes, descriptor: RegionDescriptor) -> None:
        """See `OneSidedSession`."""
        decoded = decode(_metadata, metadata)
        if not 0 < decoded.base <= MAX_ADDRESS - compute_region_bytes(descriptor.arrays):
            raise TransferError("the peer's region begins at no address")
        host, _, _ = descriptor.endpoint.rpartition(":")
        self._theirs = descriptor.arrays
        self._send(SetPeer(f"{host}:{decoded.port}", decoded.base))

    def post(self, direction: Direction, region: PagedRegion, copies: PageCopies) -> MooncakeHandle:
        """See `OneSidedSession`."""
        self._register(region)
        runs = self._compute_runs(direction, region, copies)
        handle = MooncakeHandle([])
        for at in range(0, len(runs), MAX_RUNS):
            self._num_commands += 1
            packed = runs[at : at + MAX_RUNS].tobytes()
            handle.commands.append(
                StartTransfer(self._num_commands, direction, region.handle, packed)
            )
            handle.unfinished.add(self._num_commands)
            self._handles[self._num_commands] = handle
        self._send_commands(handle)
        return handle

    def is_done(self, handle: MooncakeHandle) -> bool:
        """See `OneSidedSession`."""
        self._socket.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                self._handle_report(self._receive())
        self._send_commands(handle)
        return not handle.unfinished

    def serve(self) -> None:
        """See `OneSidedSession`. Mooncake's own threads do, over there."""

    def close(self) -> None:
        """See `OneSidedSession`. The process is dead when this returns."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _compute_runs(
        self, direction: Direction, region: PagedRegion, copies: PageCopies
    ) -> NDArray[np.int64]:
        """Offset in our region, offset in the peer's, bytes: int64 `[r, 3]`."""
        if self._theirs is None:
            raise TransferError("Mooncake has not met its peer")
        ours, theirs = region.arrays[copies.layer], self._theirs[copies.layer]
        if direction == "write":
            found = [compute_copy_runs(group, ours, theirs) for group in copies.groups]
        else:
            found = [
                compute_copy_runs(group, theirs, ours)[:, [1, 0, 2]] for group in copies.groups
            ]
        return np.concatenate([np.empty((0, 3), np.int64), *found])

    def _register(self, region: PagedRegion) -> None:
        if region.handle not in self._known and region.fd is not None:
            self._send(Register(region.handle, len(region.memory)), region.fd)
            self._known.add(region.handle)

    def _send_commands(self, handle: MooncakeHandle) -> None:
        """Give the orders that the process takes now."""
        self._socket.settimeout(0)
        with suppress(BlockingIOError):
            while handle.commands:
                self._send(handle.commands[0])
                handle.commands.pop(0)

    def _send(self, command: Command, fd: int | None = None) -> None:
        try:
            socket.send_fds(self._socket, [encode(command)], [] if fd is None else [fd])
        except BlockingIOError:
            raise
        except OSError as exc:
            raise TransferError(f"Mooncake's process has ended: {exc}") from exc

    def _receive(self) -> Report:
        """The process's next report: untrusted, since peers reach the process.

        Raises:
            BlockingIOError: there is none yet, and the socket does not wait.
            TransferError: the process has ended, or reports something else.
        """
        try:
            body = self._socket.recv(MAX_PACKET_BYTES)  # a descriptor beside it is dropped
            return decode_report(_require(body))
        except BlockingIOError:
            raise
        except (OSError, *UNDECODABLE) as exc:
            raise TransferError(f"Mooncake's process does not answer: {exc}") from exc

    def _handle_report(self, report: Report) -> None:
        match report:
            case TransferDone(command):
                handle = self._handles.pop(command, None)
                if handle is None:
                    raise TransferError("Mooncake's process ended a transfer that was not begun")
                handle.unfinished.discard(command)
            case Failed(reason):
                raise TransferError(f"Mooncake: {reason}")
            case Started() | Registered():
                return
            case unknown:
                assert_never(unknown)


def _compute_environment(host: str, protocol: str) -> dict[str, str]:
    """Of the process. Unauthenticated peers can reach it: it knows no secret."""
    removed = {KEY_VARIABLE, *FORCED_PROTOCOL.values()}
    inherited = {k: v for k, v in read_environment().items() if k not in removed}
    # Else it listens for handshakes over IPv4 alone.
    ipv6 = {"MC_USE_IPV6": "1"} if ":" in host else {}
    return {**inherited, **ENVIRONMENT, **ipv6, FORCED_PROTOCOL[protocol]: "1"}
