"""The hosts' network: connections that keep their bytes in order, until they break.

TCP loses no message in the middle: here a connection is cut (with what is under way lost, at any
byte), or stalls while its hosts are parted, and goes on afterwards. A cut may be silent: then no
end is notified.
"""

from __future__ import annotations

import selectors
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.sim.handoff.timeline import Timeline

LATENCY_S: Final = (0.0001, 0.002)
_NO_FILE: Final = -1


class Process(Protocol):
    """Who owns ends of connections: one life of a worker."""

    name: str
    is_alive: bool

    def wake(self) -> None:
        """Something came for it."""
        ...


class SimStream:  # noqa: PLR0904 -- a socket's methods, and what its peer needs
    """One end of a connection; implements `handoff.io_backend.NonBlockingSocket`."""

    def __init__(self, network: Network, owner: Process) -> None:
        self.owner = owner
        self.other: SimStream | None = None
        self.is_connected = self.is_closed = self.is_silent = False
        self.error: OSError | None = None
        self._network = network
        self._commands = bytearray()
        self._ends = False
        self._under_way: deque[bytes] = deque()
        self._last_s = 0.0

    @property
    def is_readable(self) -> bool:
        """Whether `recv` has something to report."""
        return bool(self._commands) or self._ends or self.error is not None

    @property
    def is_writable(self) -> bool:
        """Whether `send` has something to report."""
        return self.is_connected or self.error is not None

    def fileno(self) -> int:
        """There is no file."""
        return _NO_FILE

    def send(self, data: bytes | bytearray, /) -> int:
        """All of it fits."""
        if self.error is not None:
            raise self.error
        if not self.is_connected:
            raise BlockingIOError
        self._under_way.append(bytes(data))
        self._carry()
        return len(data)

    def recv(self, bufsize: int, /) -> bytes:
        """What came."""
        if self._commands:
            data = bytes(self._commands[:bufsize])
            del self._commands[:bufsize]
            return data
        if self.error is not None:
            raise self.error
        if self._ends:
            return b""
        raise BlockingIOError

    def accept(self) -> tuple[SimStream, object]:
        """It is no listener."""
        raise OSError("not a listener")

    def getsockopt(self, level: int, optname: int, /) -> int:  # noqa: ARG002 -- the contract
        """Whether connecting failed."""
        return 0 if self.error is None else 111

    def setsockopt(self, level: int, optname: int, value: int, /) -> None:
        """Everything is sent at once."""

    def settimeout(self, value: float | None, /) -> None:
        """It never blocks."""

    def getsockname(self) -> tuple[str, int]:
        """Of no use."""
        return self.owner.name, 0

    def close(self) -> None:
        """What is under way still arrives; then the other end is notified."""
        if not self.is_closed:
            self.is_closed = True
            self._network.forget(self)
            if self.other is not None and not self.is_silent:
                self._carry()

    def break_connection(self, *, silently: bool, num_kept: int) -> None:
        """Lose what this end sent and has not arrived, but for its first bytes."""
        pending = b"".join(self._under_way)
        self._under_way.clear()
        self.is_silent = True
        if self.other is not None and pending[:num_kept]:
            self.other.deliver(pending[:num_kept])
        if not silently:
            self.fail()

    def fail(self) -> None:
        """This end observes that the connection broke."""
        if not self.is_closed and self.error is None:
            self.error = ConnectionResetError("reset by peer")
            self.owner.wake()

    def deliver(self, data: bytes) -> None:
        """Bytes arrive here."""
        if self.is_closed:
            return
        self._commands += data
        self.owner.wake()

    def close_by_peer(self) -> None:
        """The other end was closed in order."""
        if not self.is_closed:
            self._ends = True
            self.owner.wake()

    def _carry(self) -> None:
        """Have one more segment (or the end) arrive, after what is under way."""
        network, other = self._network, self.other
        if other is None:
            return
        at_s = max(self._last_s, network.arrival_s(self.owner.name, other.owner.name))
        self._last_s = at_s
        network.timeline.at(at_s, self._arrive)

    def _arrive(self) -> None:
        other = self.other
        if other is None or self.is_silent:
            return
        partitioned_s = self._network.partitioned_s(self.owner.name, other.owner.name)
        if partitioned_s > 0:
            self._network.timeline.after(partitioned_s, self._arrive)
        elif self._under_way:
            data = self._under_way.popleft()
            if other.is_closed:
                self.fail()
            else:
                other.deliver(data)
        elif self.is_closed:
            other.close_by_peer()


class SimListener(SimStream):
    """Accepts connections of others."""

    def __init__(self, network: Network, owner: Process, address: tuple[str, int]) -> None:
        super().__init__(network, owner)
        self._address = address
        self._waiting: deque[SimStream] = deque()

    @property
    def is_readable(self) -> bool:
        """Whether somebody waits to be accepted."""
        return bool(self._waiting)

    def accept(self) -> tuple[SimStream, object]:
        """The next one."""
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.popleft(), None

    def getsockname(self) -> tuple[str, int]:
        """Where it listens."""
        return self._address

    def admit(self, stream: SimStream) -> None:
        """Somebody connects."""
        self._waiting.append(stream)
        self.owner.wake()


class SimWaker:
    """Implements `handoff.io_backend.Waker`."""

    def __init__(self, owner: Process) -> None:
        self._owner = owner
        self.is_readable = False
        self.is_writable = False

    def fileno(self) -> int:
        """There is no file."""
        return _NO_FILE

    def wake(self) -> None:
        """Have the agent take a step."""
        self.is_readable = True
        self._owner.wake()

    def clear(self) -> None:
        """It woke."""
        self.is_readable = False

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Path:
    """From one host to another."""

    partitioned_until_s: float = 0.0
    slow_until_s: float = 0.0
    factor: float = 1.0


class Network:
    """All connections, and the state of the roads between hosts."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._paths: dict[tuple[str, str], _Path] = {}
        self._listeners: dict[tuple[str, int], SimListener] = {}
        self._streams: dict[SimStream, None] = {}

    def latency_s(self, source: str, target: str) -> float:
        """How long a message takes, parted or not."""
        low, high = LATENCY_S
        seconds = low + (high - low) * self.timeline.rng.random()
        path = self._paths.get((source, target))
        if path is not None and path.slow_until_s > self.timeline.now_s:
            seconds *= path.factor
        return seconds

    def partitioned_s(self, source: str, target: str) -> float:
        """For how long nothing gets from here to there; 0 if it does."""
        path = self._paths.get((source, target))
        return 0.0 if path is None else max(0.0, path.partitioned_until_s - self.timeline.now_s)

    def arrival_s(self, source: str, target: str) -> float:
        """When a message that leaves now arrives."""
        latency_s = self.latency_s(source, target)
        return self.timeline.now_s + self.partitioned_s(source, target) + latency_s

    def partition(self, source: str, target: str, for_s: float) -> None:
        """Nothing gets from one host to another, for a while."""
        self._path(source, target).partitioned_until_s = self.timeline.now_s + for_s

    def slow_down(self, source: str, target: str, for_s: float, factor: float) -> None:
        """Everything from one host to another takes longer, for a while."""
        path = self._path(source, target)
        path.slow_until_s, path.factor = self.timeline.now_s + for_s, factor

    def cut(self, one: str, another: str, *, silently: bool, num_kept: int) -> int:
        """Break all connections between two hosts; how many ends were cut."""
        ends = [
            stream
            for stream in tuple(self._streams)
            if stream.other
            and (stream.owner.name, stream.other.owner.name)
            in {
                (one, another),
                (another, one),
            }
        ]
        for stream in ends:
            stream.break_connection(silently=silently, num_kept=num_kept)
        return len(ends)

    def kill(self, owner: Process, *, silently: bool) -> None:
        """A process is gone: its kernel resets its connections, or its host is gone with it."""
        for stream in [each for each in self._streams if each.owner is owner]:
            other = stream.other
            stream.break_connection(silently=True, num_kept=int(300 * self.timeline.rng.random()))
            stream.is_closed = True
            self.forget(stream)
            if other is not None and not silently:
                self.timeline.after(self.latency_s(owner.name, other.owner.name), other.fail)
        for address in [a for a, each in self._listeners.items() if each.owner is owner]:
            del self._listeners[address]

    def listen(self, owner: Process, host: str, port: int) -> SimListener:
        """A listener; who listened there before is not reached any more."""
        listener = self._listeners[host, port] = SimListener(self, owner, (host, port))
        return listener

    def connect(self, owner: Process, host: str, port: int) -> SimStream:
        """Begin to connect."""
        stream = SimStream(self, owner)
        self._streams[stream] = None
        self.timeline.at(
            self.arrival_s(owner.name, host), lambda: self._connect(stream, host, port)
        )
        return stream

    def forget(self, stream: SimStream) -> None:
        """An end is closed."""
        self._streams.pop(stream, None)

    def _connect(self, stream: SimStream, host: str, port: int) -> None:
        if stream.is_closed or not stream.owner.is_alive:
            return
        listener = self._listeners.get((host, port))
        if listener is None:
            stream.error = ConnectionRefusedError("connection refused")
            stream.owner.wake()
            return
        other = SimStream(self, listener.owner)
        self._streams[other] = None
        other.other, stream.other = stream, other
        other.is_connected = stream.is_connected = True
        listener.admit(other)
        stream.owner.wake()

    def _path(self, source: str, target: str) -> _Path:
        return self._paths.setdefault((source, target), _Path())


class SimSelector(selectors.BaseSelector):
    """Reports what is ready, and never sleeps: a process sleeps between its steps."""

    def __init__(self) -> None:
        self._keys: dict[object, selectors.SelectorKey] = {}

    def register(self, fileobj: object, events: int, data: object = None) -> selectors.SelectorKey:
        """See `BaseSelector`."""
        key = selectors.SelectorKey(fileobj, _NO_FILE, events, data)  # type: ignore[arg-type]
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: object) -> selectors.SelectorKey:
        """See `BaseSelector`."""
        return self._keys.pop(fileobj)

    def modify(self, fileobj: object, events: int, data: object = None) -> selectors.SelectorKey:
        """See `BaseSelector`."""
        known = self._keys[fileobj]
        return known if known.events == events else self.register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # noqa: ARG002
        """See `BaseSelector`; returns at once."""
        ready: list[tuple[selectors.SelectorKey, int]] = []
        for source, key in self._keys.items():
            if not isinstance(source, SimStream | SimWaker):
                continue
            mask = selectors.EVENT_READ if source.is_readable else 0
            if source.is_writable:
                mask |= selectors.EVENT_WRITE
            if mask & key.events:
                ready.append((key, mask & key.events))
        return ready

    def get_map(self) -> Mapping[object, selectors.SelectorKey]:  # type: ignore[override]
        """See `BaseSelector`."""
        return self._keys


@dataclass(frozen=True, slots=True)
class SimIoBackend:
    """Implements `handoff.io_backend.IoBackend` for one process."""

    network: Network
    owner: Process

    def clock_domain(self) -> str:
        """Each host has a clock of its own."""
        return self.owner.name

    def sleep(self, duration_s: float) -> None:
        """See `IoBackend`. Time goes on between steps alone."""

    def make_selector(self) -> SimSelector:
        """See `IoBackend`."""
        return SimSelector()

    def make_waker(self) -> SimWaker:
        """See `IoBackend`."""
        return SimWaker(self.owner)

    def connect(self, host: str, port: int) -> SimStream:
        """See `IoBackend`."""
        return self.network.connect(self.owner, host, port)

    def listen(self, host: str, port: int) -> SimListener:
        """See `IoBackend`."""
        return self.network.listen(self.owner, host, port)
