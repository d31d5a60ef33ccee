"""Where the state of a fleet on this machine is kept: one folder for each name, for one launch.

    lock            held by the launcher for as long as it runs; has its process id
    members.json    the workers, for the gateways
    control.sock    where the launcher takes requests of `baton status`, `scale`, …
    monitor/        an identity with which this user's programs may read the workers' metrics
    logs/NAME.log   what a process wrote; `launcher` is the launcher's own

What a killed launcher leaves is taken over by the next one: the kernel has released its lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.config.environment import state_directory
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

FLEET_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
MAX_PID_BYTES: Final = 20
NUM_LOCK_ATTEMPTS: Final = 10
LOCK_AGAIN_S: Final = 0.02
"""`find_launcher` holds the lock for microseconds: then it is taken at the second attempt."""


@dataclass(frozen=True, slots=True)
class FleetFolder:
    """The state folder of one fleet, which need not exist."""

    fleet: str
    path: Path

    @property
    def lock(self) -> Path:
        """See the module."""
        return self.path / "lock"

    @property
    def members(self) -> Path:
        """See the module."""
        return self.path / "members.json"

    @property
    def socket(self) -> Path:
        """See the module."""
        return self.path / "control.sock"

    @property
    def monitor(self) -> Path:
        """See the module. Only while a launch runs whose identities come from a cluster key."""
        return self.path / "monitor"

    @property
    def logs(self) -> Path:
        """See the module."""
        return self.path / "logs"


def fleet_folder(fleet: str, environment: Mapping[str, str]) -> FleetFolder:
    """The folder of one of this user's fleets.

    Raises:
        ConfigError: `fleet` is no name of a fleet.
    """
    if not FLEET_NAME.fullmatch(fleet):
        raise ConfigError(
            f"--fleet {fleet!r} is no name: use up to 63 lower-case letters, digits and hyphens"
        )
    return FleetFolder(fleet, _fleets_directory(environment) / fleet)


def ray_folder(fleet: str, environment: Mapping[str, str]) -> FleetFolder:
    """Where this user's part of a fleet on Ray is kept: only `monitor`.

    Raises:
        ConfigError: `fleet` is no name of a fleet.
    """
    name = fleet_folder(fleet, environment).fleet
    return FleetFolder(name, state_directory(environment) / "ray" / name)


def running_fleets(environment: Mapping[str, str]) -> list[str]:
    """Names of this user's fleets whose launcher runs, sorted."""
    try:
        paths = sorted(_fleets_directory(environment).iterdir())
    except OSError:
        return []
    return [p.name for p in paths if find_launcher(FleetFolder(p.name, p)) is not None]


def find_launcher(folder: FleetFolder) -> int | None:
    """The process id of the launcher that holds the folder; None: there is none."""
    try:
        lock = os.open(folder.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(lock)
    else:
        return None
    finally:
        os.close(lock)


@contextmanager
def claim(folder: FleetFolder) -> Generator[None]:
    """Be the one launch of this name, for as long as the block runs.

    Raises:
        ConfigError: a fleet of this name runs, or the folder cannot be made or locked.
    """
    try:
        _make(folder)
        lock = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(
            f"cannot keep the fleet's state in {folder.path}: {exc.strerror}; set XDG_STATE_HOME "
            "to a directory that this user can write"
        ) from exc
    try:
        _lock(lock, folder)
        _remove(folder.socket, folder.members, *folder.logs.iterdir())
        remove_monitor(folder)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:  # before the lock is released: the next launch makes its own
            _remove(folder.socket, folder.members)
            remove_monitor(folder)
    finally:
        os.close(lock)


def _lock(lock: int, folder: FleetFolder) -> None:
    for attempt in range(NUM_LOCK_ATTEMPTS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt < NUM_LOCK_ATTEMPTS - 1:
                time.sleep(LOCK_AGAIN_S)
        except OSError as exc:
            raise ConfigError(
                f"cannot lock {folder.lock}: {exc.strerror}; set XDG_STATE_HOME to a directory on "
                "a local disk"
            ) from exc
        else:
            return
    raise ConfigError(
        f"a fleet named {folder.fleet} runs already (its launcher is pid {_read_pid(lock)}): end "
        f"it with `baton down --fleet {folder.fleet}`, or give this one another name with --fleet"
    )


def _fleets_directory(environment: Mapping[str, str]) -> Path:
    return state_directory(environment) / "fleets"


def _make(folder: FleetFolder) -> None:
    """Make it, for this user alone.

    Raises:
        ConfigError: it is another user's.
        OSError: it cannot be made.
    """
    for path in (folder.path, folder.logs):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(f"{path} is not a directory of this user: remove it")
        path.chmod(0o700)


def remove_monitor(folder: FleetFolder) -> None:
    """Forget the identity of a fleet that has ended, if there is one."""
    with suppress(OSError):
        _remove(*folder.monitor.iterdir())
        folder.monitor.rmdir()


def _remove(*paths: Path) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _read_pid(lock: int) -> int:
    """0: its holder has not written it yet."""
    text = os.pread(lock, MAX_PID_BYTES, 0)
    return int(text) if text.isdigit() else 0
