"""`baton up --detach`: starts the same command in the background, and waits until it serves."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from baton.clock import MachineClock
from baton.errors import BatonError
from baton.launch.plan import command_line, flag_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.config.resolve import Resolved

SERVING_TIMEOUT_S: Final = 1800.0
"""Large models are loaded, and compiled for the machine."""
END_TIMEOUT_S: Final = 60.0
READ_BYTES: Final = 64 * 1024


class LaunchTimeoutError(BatonError):
    """A launch in the background did not serve in time; it was ended."""


def launch_in_background(resolved: Resolved, arguments: Sequence[str]) -> int:
    """Start `baton up --background` with the same settings, print what it announces: its exit code.

    Until it serves it shares the terminal: what it reports, and why it failed, is seen there. It
    has a session of its own, so that neither Ctrl-C nor the terminal's end reaches it later.

    Raises:
        LaunchTimeoutError: it does not serve.
    """
    command = [*command_line("up", resolved.file, flag_settings(resolved)), "--background"]
    process = subprocess.Popen(  # noqa: S603 - our own command
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        announced = _read_until_closed(process)
    except BaseException:
        _end(process)
        raise
    if announced:
        sys.stdout.write(announced.decode(errors="replace"))
        sys.stdout.flush()
        return 0
    return process.wait(END_TIMEOUT_S)


def _read_until_closed(process: subprocess.Popen[bytes]) -> bytes:
    """What it writes to standard output, until it closes that: it serves, or has ended."""
    assert process.stdout is not None  # noqa: S101 (for mypy)
    clock, fd, found = MachineClock(), process.stdout.fileno(), b""
    deadline = clock.now() + SERVING_TIMEOUT_S
    while select.select([fd], [], [], max(0.0, deadline - clock.now()))[0]:
        chunk = os.read(fd, READ_BYTES)
        if not chunk:
            return found
        found += chunk
    raise LaunchTimeoutError(
        f"it does not serve after {SERVING_TIMEOUT_S:g} s, and was ended; the lines above show "
        "what it waited for"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
        return
    process.kill()
    process.wait()
