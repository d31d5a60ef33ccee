"""The measured process: `python -m baton.rig.node --fd N` runs the commands of a socket.

Its terms (the cluster key among them) come from standard input, never from the command line.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import resource
import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.session import Session
from baton.clock import MachineClock
from baton.errors import BatonError, ConfigError, PeerLostError, ProtocolError, TransferError
from baton.rig.backend import (
    BackendContext,
    Build,
    Built,
    Call,
    Called,
    Clear,
    Command,
    ComputeDigest,
    Connect,
    Digest,
    DigestReferenced,
    Done,
    Failed,
    Measure,
    Measured,
    ReferenceReader,
    Reply,
    SelfTimed,
    Serve,
    Served,
    StopServing,
    TransferOnce,
)
from baton.rig.channel import Channel, Frames, node_channel
from baton.rig.machine import describe_machine
from baton.rig.nodes import NodeTerms
from baton.rig.pages import (
    Move,
    UnsupportedError,
    Workload,
    clear_target,
    digest,
    layout_moves,
    view_bytes,
)
from baton.rig.transport import TransportBackend

if TYPE_CHECKING:
    from baton.rig.backend import Backend, BuildBackend, Role

CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWNET: Final = 0x40000000
SIOCGIFFLAGS: Final = 0x8913
SIOCSIFFLAGS: Final = 0x8914
IFF_UP: Final = 1
_REQUEST: Final = struct.Struct("16sh14x")

_libc = ctypes.CDLL(None, use_errno=True)


def pin_to_core(role: Role) -> None:
    """Pin this process to the first core of one half of the cores; before any thread starts."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0 if role == "driver" else len(cores) // 2]})


def enter_network(network_of: int | None) -> None:
    """Choose the network namespace: None the host's, 0 a new one, else that of a process id.

    Before any thread starts.

    Raises:
        TransferError: the process has ended, or this user may not.
    """
    if network_of == 0:
        _enter_new_network()
    elif network_of is not None:
        _join_network_of(network_of)


def _enter_new_network() -> None:
    """Leave the host's network namespace for one with loopback only."""
    is_root = os.geteuid() == 0
    _check(_libc.unshare(CLONE_NEWNET | (0 if is_root else CLONE_NEWUSER)), "make")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = _REQUEST.pack(b"lo", 0)
        _, flags = _REQUEST.unpack(fcntl.ioctl(sock, SIOCGIFFLAGS, request))
        fcntl.ioctl(sock, SIOCSIFFLAGS, _REQUEST.pack(b"lo", flags | IFF_UP))


def _join_network_of(pid: int) -> None:
    # Without root, the network belongs to a user namespace, which must be entered first.
    kinds = (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET))
    for name, flag in kinds[os.geteuid() == 0 :]:
        try:
            fd = os.open(Path("/proc") / str(pid) / "ns" / name, os.O_RDONLY)
        except OSError as exc:
            raise TransferError(f"cannot join a network namespace: {exc.strerror}") from exc
        try:
            _check(_libc.setns(fd, flag), "join")
        finally:
            os.close(fd)


def _check(code: int, verb: str) -> None:
    if code != 0:
        reason = os.strerror(ctypes.get_errno())
        raise TransferError(
            f"cannot {verb} a network namespace ({reason}), and its library would listen on "
            "all interfaces"
        )


COMMAND_TIMEOUT_S: Final = 3600.0
MAX_REASON_CHARS: Final = 400
MOST_MEASURING_S: Final = 15.0
"""After this long one sample is enough: on a slow link the reply would come too late
(`pair.REPLY_TIMEOUT_S`)."""


class NodeServer:
    """Runs commands on one backend, from its `Build` on. Owner thread: the process's main one."""

    def __init__(
        self, terms: NodeTerms, channel: Channel[Reply, Command], build: BuildBackend
    ) -> None:
        self._terms, self._channel, self._build_backend = terms, channel, build
        self._clock = MachineClock()
        self._built: Backend | None = None
        self._num_pages = 0
        self._role: Role = "owner"
        self._moves: dict[Workload, list[Move]] = {}

    def run(self) -> None:
        """Run commands until the channel closes or one fails."""
        while True:
            try:
                command = self._channel.receive(COMMAND_TIMEOUT_S)
            except PeerLostError:
                return
            reply = self._try(command)
            if reply is not None:
                self._channel.send(reply)
            if isinstance(reply, Failed):
                return

    def close(self) -> None:
        """Release what the backend holds."""
        if self._built is not None:
            self._built.close()

    def _try(self, command: Command) -> Reply | None:
        try:
            return self._run(command)
        except Exception as exc:  # noqa: BLE001 - a library may raise anything: that is the reply
            return Failed(describe_error(exc), isinstance(exc, UnsupportedError))

    def _run(self, command: Command) -> Reply | None:  # noqa: PLR0911 - flat match
        match command:
            case Build():
                return self._build(command)
            case Connect(metadata):
                self._backend.connect(metadata)
                self._stop_owner()
                return Done()
            case Serve():
                return self._serve()
            case StopServing():
                raise ProtocolError("asked to stop serving, and it did not serve")
            case Clear(workload):
                clear_target(view_bytes(self._backend.target), self._moves_of(workload)[0])
                return Done()
            case ComputeDigest(workload, side):
                region = self._backend.region if side == "src" else self._backend.target
                return Digest(digest(region.memory, self._moves_of(workload)[0], side))
            case DigestReferenced():
                return self._digest_referenced()
            case TransferOnce(workload, direction):
                self._backend.prepare(self._moves_of(workload)[0], direction)()
                self._stop_owner()
                return Done()
            case Measure():
                return self._measure(command)
            case Call(name, payload):
                return Called(self._backend.call(name, payload))
            case unknown:
                assert_never(unknown)

    @property
    def _backend(self) -> Backend:
        if self._built is None:
            raise ProtocolError("a command before `Build`")
        return self._built

    def _build(self, command: Build) -> Built:
        machine = describe_machine()  # before a core is chosen: it counts them
        pin_to_core(command.role)
        terms = self._terms
        credentials = Credentials.of(ClusterKey.from_hex(terms.key_hex))
        context = BackendContext(
            command.role,
            command.num_pages,
            terms.host,
            credentials,
            self._clock,
            command.page_bytes,
        )
        self._built = self._build_backend(command, context)
        self._num_pages, self._role = command.num_pages, command.role
        metadata = self._built.local_metadata()
        return Built(self._built.traits, metadata, machine)

    def _digest_referenced(self) -> Digest:
        if not isinstance(self._backend, ReferenceReader):
            raise ProtocolError("this backend reads no pages by reference")
        return Digest(self._backend.digest_referenced_pages())

    def _serve(self) -> Served:
        begin_cpu_s = _spent_cpu_s()
        self._backend.serve(_CommandWaiting(self._channel.fd))
        cpu_s = _spent_cpu_s() - begin_cpu_s
        if not isinstance(self._channel.receive(COMMAND_TIMEOUT_S), StopServing):
            raise ProtocolError("a command other than `StopServing` while it served")
        return Served(cpu_s)

    def _measure(self, command: Measure) -> Measured:
        backend = self._backend
        if isinstance(backend, SelfTimed):
            return _measure_self_timed(backend, command)
        moves = self._moves_of(command.workload)
        actions = [backend.prepare(move, command.direction) for move in moves]
        samples: list[float] = []
        begin_cpu_s = _spent_cpu_s()
        actions[-1]()  # first uses (connections, page tables) are not what is measured
        started_s = now = time.perf_counter()
        end = now + command.budget_s
        while len(samples) < command.min_samples or (
            now < end and len(samples) < command.max_samples
        ):
            if samples and now - started_s > MOST_MEASURING_S:
                break
            action = actions[len(samples) % len(actions)]
            started = time.perf_counter()
            action()
            now = time.perf_counter()
            samples.append(now - started)
        cpu_s = _spent_cpu_s() - begin_cpu_s
        self._stop_owner()
        return Measured(tuple(samples), len(samples) + 1, cpu_s)

    def _stop_owner(self) -> None:
        if self._role == "driver":
            self._backend.stop_serving()

    def _moves_of(self, workload: Workload) -> list[Move]:
        if workload not in self._moves:
            self._moves = {workload: layout_moves(workload, self._num_pages)}
        return self._moves[workload]


class _CommandWaiting:
    """See `StopRequested`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def __call__(self) -> bool:
        return bool(self._poll.poll(0))


def run_node(build: BuildBackend) -> None:
    """The whole process: terms from standard input, commands from `--fd`. Does not return."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    fd: int = parser.parse_known_args()[0].fd
    terms = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeTerms)
    frames = Frames(socket.socket(fileno=fd), MachineClock())
    if terms.session_keys is not None:
        frames.session = Session.from_keys(*terms.session_keys)
    channel = node_channel(frames)
    try:
        enter_network(terms.network_of)
        server = NodeServer(terms, channel, build)
        server.run()
        server.close()
    except BatonError as exc:
        channel.send(Failed(describe_error(exc)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # At an orderly exit NIXL's libraries crash, and Mooncake's threads may hang.
        os._exit(0)


def build_transport(command: Build, context: BackendContext) -> Backend:
    """Build a registered transport; see `BuildBackend`.

    Raises:
        ConfigError: the command asks for something else, or the options are wrong.
    """
    if command.kind != "transport":
        raise ConfigError(f"this node has transports only, no {command.name!r}")
    return TransportBackend(command.name, command.options, context)


def _measure_self_timed(backend: SelfTimed, command: Measure) -> Measured:
    begin_cpu_s = _spent_cpu_s()
    end = time.perf_counter() + command.budget_s
    batches = [backend.time_moves(command.workload)]
    while time.perf_counter() < end and len(batches) < command.max_samples:
        batches.append(backend.time_moves(command.workload))
    cpu_s = _spent_cpu_s() - begin_cpu_s
    samples = tuple(batch.move_s for batch in batches)
    return Measured(samples, sum(batch.num_moves for batch in batches), cpu_s)


def _spent_cpu_s() -> float:
    """User and system time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def describe_error(error: Exception) -> str:
    """One line; with the type's name where it is none of ours."""
    text = " ".join(str(error).split())
    named = text if isinstance(error, BatonError) and text else f"{type(error).__name__}: {text}"
    return named[:MAX_REASON_CHARS]


if __name__ == "__main__":
    run_node(build_transport)
