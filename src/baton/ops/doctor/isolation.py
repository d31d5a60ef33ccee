"""Runs probes in processes of their own, several at once, each for a bounded time.

A fork and not a thread: a library that crashes, hangs or writes to the terminal while it is tried
does that in a process that can be thrown away. Call it before anything starts a thread.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Final, NoReturn

import msgspec

from baton.net.parent_process import exit_with_parent
from baton.ops.doctor.finding import Finding, Probe, write_seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from baton.clock import Clock
    from baton.ops.doctor.host import Host

NUM_AT_ONCE: Final = 6
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_OUTPUT_BYTES: Final = 4096
MAX_OUTPUT_CHARS: Final = 160
REAP_TRIES: Final = 50
REAP_PAUSE_S: Final = 0.01
_READ_BYTES: Final = 1 << 16


@dataclass(slots=True)
class _Running:
    """A probe's process. It leads a process group, so that its own children end with it."""

    probe: Probe
    pid: int
    result_fd: int
    output: IO[bytes]
    deadline: float
    text: bytearray = field(default_factory=bytearray)
    is_silent: bool = False

    @property
    def has_result(self) -> bool:
        return self.text.endswith(b"\n")

    def is_over(self, clock: Clock) -> bool:
        is_too_long = len(self.text) > MAX_ANSWER_BYTES
        is_late = clock.now() >= self.deadline
        return self.has_result or self.is_silent or is_too_long or is_late


def run_probes(probes: Sequence[Probe], host: Host, clock: Clock) -> list[Finding]:
    """Run all probes, several at once; their findings in the order of the probes.

    Where one crashes, hangs or answers nonsense, a finding that reports this stands in its place.
    """
    waiting = deque(enumerate(probes))
    running: dict[int, _Running] = {}
    findings: dict[int, list[Finding]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < NUM_AT_ONCE:
                place, probe = waiting.popleft()
                running[place] = _start(probe, host, clock)
            _wait(running.values(), clock)
            for place, one in [(p, one) for p, one in running.items() if one.is_over(clock)]:
                del running[place]
                findings[place] = _conclude(one, _end(one))
    finally:
        for one in running.values():
            _end(one)
    return [finding for place in sorted(findings) for finding in findings[place]]


def _start(probe: Probe, host: Host, clock: Clock) -> _Running:
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _end
    read_fd, write_fd = os.pipe()
    deadline = clock.now() + probe.timeout_s
    parent_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(read_fd)
        _report_and_exit(probe, host, write_fd, output.fileno(), parent_pid=parent_pid)
    os.close(write_fd)
    with suppress(OSError):  # the child does the same: whoever comes first
        os.setpgid(pid, pid)
    return _Running(probe, pid, read_fd, output, deadline)


def _report_and_exit(
    probe: Probe, host: Host, result_fd: int, output: int, *, parent_pid: int
) -> NoReturn:
    """In the child. Never returns, and runs nothing that was meant for the parent's end."""
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        with suppress(AttributeError):  # not on Linux
            exit_with_parent(parent_pid)
        _redirect(output)
        text = msgspec.json.encode(probe.check(host)) + b"\n"
        while text:
            text = text[os.write(result_fd, text) :]
        os._exit(0)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent reads it
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(1)


def _redirect(output: int) -> None:
    """Nothing to read, and what is written goes into a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def _wait(running: Collection[_Running], clock: Clock) -> None:
    """Read what there is, until one process has answered, ended, or run out of time."""
    nearest = min(one.deadline for one in running)
    by_fd = {one.result_fd: one for one in running}
    for fd in select.select(list(by_fd), [], [], max(0.0, nearest - clock.now()))[0]:
        more = os.read(fd, _READ_BYTES)
        by_fd[fd].text += more
        by_fd[fd].is_silent = not more


def _end(one: _Running) -> int | None:
    """End a probe's whole process group; its exit code, None if it had to be killed.

    One that cannot die now (a driver holds it) is left to the kernel: nothing waits for it long.
    """
    os.close(one.result_fd)
    # One that is silent closed its end of the pipe by dying.
    status = os.waitpid(one.pid, 0)[1] if one.is_silent else None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(one.pid, signal.SIGKILL)
    if status is not None:
        return os.waitstatus_to_exitcode(status)
    _reap(one.pid)
    return None


def _reap(pid: int) -> None:
    for _ in range(REAP_TRIES):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        select.select([], [], [], REAP_PAUSE_S)


def _conclude(one: _Running, returncode: int | None) -> list[Finding]:
    output = _last_line(one.output)
    one.output.close()
    if one.has_result:
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(one.text, type=list[Finding])
    probe, found = one.probe, _describe_failure(one, returncode)
    return [
        Finding(
            area=probe.area,
            name=probe.name,
            level=probe.level_if_broken,
            found=f"{found}: {output}" if output else found,
            why="It was tried in a process of its own, so nothing else is harmed; "
            "but what hangs or crashes here does so in a worker too.",
        )
    ]


def _describe_failure(one: _Running, returncode: int | None) -> str:
    if one.has_result:
        return "the probe answered nonsense"
    if returncode is None:
        return f"no answer within {write_seconds(one.probe.timeout_s)}"
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)} while it was tried"
    return "the probe failed"


def _last_line(output: IO[bytes]) -> str:
    """The last line that is not empty: of a Python traceback, the exception."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
    lines = output.read().decode(errors="replace").split("\n")
    return next((line.strip()[:MAX_OUTPUT_CHARS] for line in reversed(lines) if line.strip()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
