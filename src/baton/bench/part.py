"""One process of a pair: `python -m baton.bench.part --fd N`. Obeys the orders on a socket.

Its terms (the cluster key among them) are read from standard input, never from the command line.
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final, assert_never

import msgspec

from baton.auth.key import ClusterKey
from baton.bench.bare_worker import BareWorker
from baton.bench.building import build_contender
from baton.bench.channel import Channel, Frames, parts_end
from baton.bench.contender import Borrower, SelfTimed, Surroundings
from baton.bench.machine import describe_machine
from baton.bench.namespace import enter_new_network, join_network_of
from baton.bench.orders import (
    Answer,
    Begin,
    Begun,
    Dial,
    Digest,
    Done,
    Failed,
    Fingerprint,
    Join,
    Joined,
    Look,
    Measure,
    Measured,
    Meet,
    MoveOnce,
    Order,
    Rest,
    Rested,
    Serve,
    Survey,
    Surveyed,
    Wipe,
)
from baton.bench.pool import digest, view_bytes, wipe
from baton.bench.workload import Move, Workload, place_moves
from baton.clock import MachineClock
from baton.errors import BatonError, PeerLostError, ProtocolError
from baton.launch.cores import share_cores
from baton.ops.doctor.isolation import exit_with_parent
from baton.worker.process import pin_to

if TYPE_CHECKING:
    from baton.bench.contender import Contender, Role

ORDER_TIMEOUT_S: Final = 3600.0
MAX_REASON_CHARS: Final = 400


class Terms(msgspec.Struct, frozen=True):
    """What a part is told by who started it. `network_of`: None the host's, 0 a new one, a pid."""

    key_hex: str
    host: str
    network_of: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Part:
    """Owns one contender, from its `Begin` on. Owner thread: the process's only one."""

    def __init__(self, terms: Terms, channel: Channel[Answer, Order]) -> None:
        self._terms, self._channel = terms, channel
        self._clock = MachineClock()
        self._contender: Contender | None = None
        self._worker: BareWorker | None = None
        self._num_pages = 0
        self._role: Role = "owner"
        self._moves: dict[Workload, list[Move]] = {}

    def obey_all(self) -> None:
        """Obey until the conductor hangs up, or something fails."""
        while True:
            try:
                order = self._channel.hear(ORDER_TIMEOUT_S)
            except PeerLostError:
                return
            answer = self._try(order)
            if answer is not None:
                self._channel.say(answer)
            if isinstance(answer, Failed):
                return

    def _try(self, order: Order) -> Answer | None:
        try:
            return self._obey(order)
        except Exception as exc:  # noqa: BLE001 - a library may raise anything: that is the answer
            return Failed(_describe(exc))

    def _obey(self, order: Order) -> Answer | None:  # noqa: PLR0911, PLR0912 - a line for each
        match order:
            case Begin():
                return self._begin(order)
            case Meet(introduction):
                self._built.meet(introduction)
                self._rest_if_driving()
                return Done()
            case Serve():
                return self._serve()
            case Rest():
                raise ProtocolError("told to rest, and it did not serve")
            case Wipe() | Fingerprint() | Look():
                return self._look_after(order)
            case MoveOnce(workload, direction):
                self._built.prepare(self._first(workload), direction)()
                self._rest_if_driving()
                return Done()
            case Measure():
                return self._measure(order)
            case Join() | Dial() | Survey():
                return self._be_worker(order)
            case unknown:
                assert_never(unknown)

    @property
    def _built(self) -> Contender:
        if self._contender is None:
            raise ProtocolError("told to do something before there is a contender")
        return self._contender

    def _be_worker(self, order: Join | Dial | Survey) -> Answer:
        match order:
            case Join():
                machine = describe_machine()
                _take_a_core(order.role)
                key = ClusterKey.from_hex(self._terms.key_hex)
                self._worker = BareWorker(order, self._terms.host, key, self._clock)
                return Joined(self._worker.ref, self._worker.absent, machine)
            case Dial(ref):
                self._met.dial(ref)
                return Done()
            case Survey(direction, kinds, timeout_s):
                return Surveyed(self._met.wait_for_links(direction, kinds, timeout_s))
            case unknown:
                assert_never(unknown)

    @property
    def _met(self) -> BareWorker:
        if self._worker is None:
            raise ProtocolError("told to do something before there is an agent")
        return self._worker

    def _look_after(self, order: Wipe | Fingerprint | Look) -> Done | Digest:
        if isinstance(order, Look):
            return self._look()
        built, move = self._built, self._first(order.workload)
        if isinstance(order, Wipe):
            wipe(view_bytes(built.target), move)
            return Done()
        region = built.region if order.side == "src" else built.target
        return Digest(digest(region.memory, move, order.side))

    def _look(self) -> Digest:
        if not isinstance(self._built, Borrower):
            raise ProtocolError("told to look at pages that nobody can have lent")
        return Digest(self._built.digest_seen())

    def _begin(self, begin: Begin) -> Begun:
        machine = describe_machine()  # before a core is chosen: it counts them
        _take_a_core(begin.role)
        key, terms = ClusterKey.from_hex(self._terms.key_hex), self._terms
        around = Surroundings(
            begin.role, begin.num_pages, terms.host, key, self._clock, begin.page_bytes
        )
        self._contender = build_contender(begin, around)
        self._num_pages, self._role = begin.num_pages, begin.role
        introduction = self._contender.introduce()
        return Begun(self._contender.traits, introduction, machine)

    def _serve(self) -> Rested:
        begin_cpu_s = _spent_cpu_s()
        self._built.serve(_OrderWaiting(self._channel.fd))
        cpu_s = _spent_cpu_s() - begin_cpu_s
        if not isinstance(self._channel.hear(ORDER_TIMEOUT_S), Rest):
            raise ProtocolError("told something else than to rest")
        return Rested(cpu_s)

    def _measure(self, order: Measure) -> Measured:
        contender = self._built
        if isinstance(contender, SelfTimed):
            return _ask_for_times(contender, order)
        moves = self._moves_of(order.workload)
        actions = [contender.prepare(move, order.direction) for move in moves]
        samples: list[float] = []
        begin_cpu_s = _spent_cpu_s()
        actions[-1]()  # first uses (connections, page tables) are not what is measured
        now = time.perf_counter()
        end = now + order.budget_s
        while len(samples) < order.min_samples or (now < end and len(samples) < order.max_samples):
            action = actions[len(samples) % len(actions)]
            started = time.perf_counter()
            action()
            now = time.perf_counter()
            samples.append(now - started)
        cpu_s = _spent_cpu_s() - begin_cpu_s
        self._rest_if_driving()
        return Measured(tuple(samples), len(samples) + 1, cpu_s)

    def _rest_if_driving(self) -> None:
        if self._role == "driver":
            self._built.rest()

    def _moves_of(self, workload: Workload) -> list[Move]:
        if workload not in self._moves:
            self._moves = {workload: place_moves(workload, self._num_pages)}
        return self._moves[workload]

    def _first(self, workload: Workload) -> Move:
        return self._moves_of(workload)[0]

    def close(self) -> None:
        """Give back what the contender holds."""
        if self._contender is not None:
            self._contender.close()
        if self._worker is not None:
            self._worker.close()


class _OrderWaiting:
    """See `CallWaiting`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def __call__(self) -> bool:
        return bool(self._poll.poll(0))


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    fd: int = parser.parse_args().fd
    exit_with_parent()
    terms = msgspec.json.decode(sys.stdin.buffer.read(), type=Terms)
    frames = Frames(socket.socket(fileno=fd), MachineClock())
    channel = parts_end(frames)
    try:
        _enter_network(terms.network_of)
        part = Part(terms, channel)
        part.obey_all()
        part.close()
    except BatonError as exc:
        channel.say(Failed(_describe(exc)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # At an orderly exit NIXL's libraries crash, and Mooncake's threads may hang.
        os._exit(0)


def _ask_for_times(contender: SelfTimed, order: Measure) -> Measured:
    begin_cpu_s = _spent_cpu_s()
    end = time.perf_counter() + order.budget_s
    laps = [contender.time_moves(order.workload)]
    while time.perf_counter() < end and len(laps) < order.max_samples:
        laps.append(contender.time_moves(order.workload))
    cpu_s = _spent_cpu_s() - begin_cpu_s
    samples = tuple(lap.move_s for lap in laps)
    return Measured(samples, sum(lap.num_moves for lap in laps), cpu_s)


def _spent_cpu_s() -> float:
    """User and system time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _enter_network(network_of: int | None) -> None:
    if network_of == 0:
        enter_new_network()
    elif network_of is not None:
        join_network_of(network_of)


def _take_a_core(role: Role) -> None:
    """A core of its own where there are two: the first of each half."""
    halves = share_cores(sorted(os.sched_getaffinity(0)), 2)
    pin_to(halves[0 if role == "driver" else 1][:1])


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    named = text if isinstance(error, BatonError) and text else f"{type(error).__name__}: {text}"
    return named[:MAX_REASON_CHARS]


if __name__ == "__main__":
    main()
