"""Several gateway processes on one port. They share nothing: the kernel spreads the connections.

    parent: binds the port ─► forks each process ─► reports ready when all are
            (or inherits a launcher's sockets, one for each process)
            a process ended ─► another one in its place, on the same socket; too often ─► ends all
            it cannot be started now ─► tried again, ever more seldom, while the others serve
            SIGTERM, SIGINT ─► all drain ──another signal──► all end at once

Each has its own tickets' issuer, placement, limits, quotas, retry budget and management listener
(`management_port` plus its index). They exchange announcements of workers with each other.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from baton.errors import BatonError, ProtocolError
from baton.net.http_server import bind_shared, ignore_relayed, inherit
from baton.net.parent_process import exit_with_parent
from baton.telemetry.process_status import Draining, Ready, StatusReporter, read_status

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from baton.clock import Clock, Instant
    from baton.gateway.options import GatewayOptions

MAX_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 60.0
RESTART_DELAY_S: Final = 0.5
MAX_RETRY_S: Final = 30.0
KILL_MARGIN_S: Final = 5.0
"""How much longer than its own drain timeout a process may take before it is killed."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

log = logging.getLogger(__name__)


class MemberFailedError(BatonError):
    """A gateway process ended as it started, or processes ended again and again."""


@dataclass(slots=True)
class _Member:
    """One process of the group: `index` is its place, which outlives it."""

    index: int
    listener: socket.socket
    pid: int


class ProcessGroup:
    """The parent: it serves nothing itself. Belongs on the main thread, before others start.

    `serve` is what each process runs to its end: with its own options and its listening socket.
    """

    def __init__(
        self,
        options: GatewayOptions,
        clock: Clock,
        serve: Callable[[GatewayOptions, socket.socket], None],
    ) -> None:
        self._options, self._clock, self._serve = options, clock, serve
        self._status_reporter = StatusReporter(options.status_fd)
        self._drain_limit_s = options.drain_timeout_s + KILL_MARGIN_S
        self._members: list[_Member] = []
        self._ended_at: deque[Instant] = deque(maxlen=MAX_RESTARTS)
        self._retry_s = RESTART_DELAY_S

    def run(self) -> None:
        """Serve until a signal. Blocks.

        Raises:
            ConfigError: the address cannot be listened on.
            MemberFailedError: processes ended and could not be replaced; all others were ended.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with ExitStack() as sockets:
                self._start(sockets)
                while (number := self._wait()) == signal.SIGCHLD:
                    self._restart_ended()
                log.info("signal %s: all processes drain", signal.Signals(number).name)
                self._status_reporter.report(Draining(self._drain_limit_s))
            # Their listeners are closed: what connects now is refused, not left to wait.
            self._stop(signal.SIGTERM)
        except BaseException:
            self._stop(signal.SIGKILL)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _start(self, sockets: ExitStack) -> None:
        options = self._options
        if options.listen_fds:
            listeners = tuple(inherit(fd) for fd in options.listen_fds)
        else:
            listeners = bind_shared(options.host, options.port, options.processes)
        for index, listener in enumerate(listeners):
            sockets.enter_context(closing(listener))
            self._members.append(_Member(index, listener, 0))
        pipes = [self._fork(member) for member in self._members]
        readies = [_read_ready(pipe) for pipe in pipes]
        self._status_reporter.report(Ready(readies[0].url))

    def _wait(self) -> int:
        """The next signal; SIGCHLD, too, when it is time to try again to start a process."""
        if all(member.pid for member in self._members):
            return signal.sigwait(SIGNALS)
        info = signal.sigtimedwait(SIGNALS, self._retry_s)
        return signal.SIGCHLD if info is None else info.si_signo

    def _restart_ended(self) -> None:
        while (ended := _reap()) is not None:
            pid, status = ended
            member = next((m for m in self._members if m.pid == pid), None)
            if member is None:
                continue
            member.pid = 0
            now = self._clock.now()
            code = os.waitstatus_to_exitcode(status)
            log.error("gateway process %d ended with %d; another one starts", member.index, code)
            if len(self._ended_at) == MAX_RESTARTS and now - self._ended_at[0] < RESTART_WINDOW_S:
                raise MemberFailedError(
                    f"gateway processes ended {MAX_RESTARTS + 1} times within "
                    f"{RESTART_WINDOW_S:g} s; the lines above give the reason"
                )
            self._ended_at.append(now)
            time.sleep(RESTART_DELAY_S)
        for member in self._members:
            if not member.pid:
                self._restart(member)

    def _restart(self, member: _Member) -> None:
        try:
            pipe = self._fork(member)
        except OSError as exc:  # no process, memory or descriptor is left: the others serve on
            self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
            log.error(  # noqa: TRY400
                "gateway process %d cannot be started (%s); next try within %g s",
                member.index,
                exc.strerror,
                self._retry_s,
            )
            return
        self._retry_s = RESTART_DELAY_S
        with suppress(MemberFailedError):  # then it is the next one to be replaced
            _read_ready(pipe)

    def _fork(self, member: _Member) -> int:
        """Start a process; where its status lines can be read."""
        reading, writing = os.pipe()
        parent = os.getpid()
        try:
            member.pid = os.fork()
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        if not member.pid:
            os.close(reading)
            self._run_member(member, writing, parent)
        os.close(writing)
        return reading

    def _run_member(self, member: _Member, status_fd: int, parent: int) -> NoReturn:
        """In the child: never returns."""
        code = 1
        try:
            _leave_terminal(parent)
            for other in self._members:
                if other is not member:
                    other.listener.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self._serve(self._options.of_process(member.index, status_fd), member.listener)
            code = 0
        except BatonError as exc:
            log.error("gateway process %d: %s", member.index, exc)  # noqa: TRY400
        except BaseException:
            log.exception("gateway process %d failed", member.index)
        finally:
            os._exit(code)

    def _stop(self, number: signal.Signals) -> None:
        """End all; a second signal, or too long a drain, kills what is left."""
        self._signal(number)
        deadline = self._clock.now() + self._drain_limit_s
        while any(member.pid for member in self._members):
            left_s = deadline - self._clock.now()
            info = signal.sigtimedwait(SIGNALS, max(0.0, left_s))
            received = signal.SIGKILL if info is None else info.si_signo
            if received != signal.SIGCHLD and not ignore_relayed(received):
                self._signal(signal.SIGKILL)
            while (ended := _reap()) is not None:
                for member in self._members:
                    member.pid = 0 if member.pid == ended[0] else member.pid

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members:
            if member.pid:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, number)


def _leave_terminal(parent: int) -> None:
    """Ctrl-C is the parent's to handle; its death is a process's end."""
    os.setpgid(0, 0)
    exit_with_parent(parent, signal.SIGTERM)


def _reap() -> tuple[int, int] | None:
    """A child that has ended and its wait status."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _read_ready(fd: int) -> Ready:
    """Wait until a process answers.

    Raises:
        MemberFailedError: it ended before that.
    """
    with os.fdopen(fd, "rb") as pipe:
        try:
            status = read_status(pipe.readline())
        except ProtocolError as exc:
            raise MemberFailedError("a gateway process ended as it started; see above") from exc
    if not isinstance(status, Ready):
        raise MemberFailedError("a gateway process reports another status than that it is ready")
    return status
