"""Whether this Ray may be used, and the connection of an operator's process to it."""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import re
import sys
import tempfile
import threading
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TextIO

from baton.errors import ConfigError
from baton.launch.errors import FleetError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

NAMESPACE_BEGINNING: Final = "baton-"
MAX_REASON_CHARS: Final = 1000
FIRST_VERSION: Final = (2, 60)
MODE_VARIABLE: Final = "RAY_AUTH_MODE"
TOKEN_VARIABLE: Final = "RAY_AUTH_TOKEN"  # noqa: S105 - a variable's name
TOKEN_FILE_VARIABLE: Final = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - a variable's name
DEFAULT_TOKEN_FILE: Final = Path(".ray/auth_token")
"""In the user's home."""
STANDARD_ERROR: Final = 2
RAYS_ERROR_THREAD: Final = "ray_listen_error_messages"
CONNECT_TIMEOUT_S: Final = 20.0
"""Within which a command of an operator reaches Ray."""

log = logging.getLogger(__name__)


def require_version(version: str) -> None:
    """Pass, or raise.

    Raises:
        ConfigError: Ray is older than what Baton was tested with.
    """
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < FIRST_VERSION:
        needed = ".".join(str(number) for number in FIRST_VERSION)
        raise ConfigError(
            f"Ray {version} is installed, and Baton needs {needed} or newer on all hosts: "
            "pip install --upgrade 'baton-kv[ray]'"
        )


def require_token(environment: Mapping[str, str], home: Path) -> None:
    """Pass, or raise: without a token, everybody who reaches a port of Ray runs code on its hosts.

    Raises:
        ConfigError: Ray is not set to use a token, or others can read it.
    """
    if not uses_tokens(environment):
        raise ConfigError(
            f"Ray without token authentication lets everybody who reaches its ports run code on "
            f"all hosts: start Ray on every host, and this command, with {MODE_VARIABLE}=token and "
            f"{TOKEN_FILE_VARIABLE}=FILE (make it with: umask 077; openssl rand -hex 32 > FILE); "
            "or give --insecure-ray, where no one else reaches this network"
        )
    if environment.get(TOKEN_VARIABLE):
        return
    path = Path(environment.get(TOKEN_FILE_VARIABLE) or home / DEFAULT_TOKEN_FILE)
    try:
        others = path.stat().st_mode & 0o077
    except OSError as exc:
        raise ConfigError(
            f"cannot read Ray's token {path}: {exc.strerror}; set {TOKEN_FILE_VARIABLE}"
        ) from exc
    if others:
        raise ConfigError(f"other users can read Ray's token: run `chmod 600 {path}`")


def uses_tokens(environment: Mapping[str, str]) -> bool:
    """Whether Ray, started in this environment, asks for a token."""
    return environment.get(MODE_VARIABLE, "").lower() == "token"


def check_ray(environment: Mapping[str, str], *, insecure: bool) -> None:
    """Pass, or raise, before Ray is imported.

    Raises:
        ConfigError: Ray is not installed, is too old, or would be used without a token.
    """
    try:
        require_version(importlib.metadata.version("ray"))
    except importlib.metadata.PackageNotFoundError as exc:
        raise ConfigError("Ray is not installed: pip install 'baton-kv[ray]'") from exc
    if not insecure:
        require_token(environment, Path.home())
    elif not uses_tokens(environment):
        log.warning(
            "Ray is used without token authentication: whoever reaches its ports can run code on "
            "all hosts of the fleet, and read the cluster key"
        )


@contextmanager
def connected(address: str, fleet: str, timeout_s: float) -> Generator[None]:
    """This process is connected to Ray for as long as the block runs.

    Raises:
        FleetError: no Ray answers there, or it does not accept this process's token.
    """
    import ray  # noqa: PLC0415 - a third of a second, and `check_ray` comes first

    failures: list[Exception] = []

    def connect() -> None:
        try:
            ray.init(
                address=address,
                namespace=namespace_of(fleet),
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is reported
            failures.append(exc)

    # Ray repeats a refused connection without a limit of its own.
    attempt = threading.Thread(target=connect, name="ray-connect", daemon=True)
    with _captured_standard_error() as captured:
        attempt.start()
        attempt.join(timeout_s)
        cause = _last_line(captured)
    if attempt.is_alive() or failures:
        if failures:
            cause = describe(failures[0])
        raise FleetError(
            f"cannot connect to Ray at {address!r} within {timeout_s:g} s: {cause}\n"
            "  check --ray-address (or RAY_ADDRESS), that this host is one of the cluster's, and "
            f"that {TOKEN_FILE_VARIABLE} names the token of that cluster"
        )
    try:
        with redirect_stdout(WithoutRaysErrors(sys.stdout)):
            yield
    finally:
        ray.shutdown()


class WithoutRaysErrors(io.TextIOBase):
    """Standard output, but what Ray prints of the cluster's errors goes to standard error.

    Ray's thread does so whatever `log_to_driver` is, also into the JSON of `baton status --json`.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> int:
        """Write to the one or the other."""
        is_rays = threading.current_thread().name == RAYS_ERROR_THREAD
        return (sys.stderr if is_rays else self._output).write(text)

    def flush(self) -> None:
        """What was written so far."""
        self._output.flush()

    def fileno(self) -> int:
        """Of standard output."""
        return self._output.fileno()

    def isatty(self) -> bool:
        """Whether standard output is a terminal."""
        return self._output.isatty()


@contextmanager
def _captured_standard_error() -> Generator[IO[bytes]]:
    """Ray's own code writes its errors to the descriptor: they are needed for ours."""
    saved = os.dup(STANDARD_ERROR)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), STANDARD_ERROR)
        try:
            yield captured
        finally:
            os.dup2(saved, STANDARD_ERROR)
            os.close(saved)


def _last_line(captured: IO[bytes]) -> str:
    with suppress(OSError):
        size = captured.seek(0, os.SEEK_END)
        captured.seek(max(0, size - 4096))
        lines = captured.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no answer")
    return "no answer"


def find_address(configured: str | None, environment: Mapping[str, str]) -> str:
    """Where Ray's head is: as configured, else RAY_ADDRESS, else the cluster of this host."""
    return configured or environment.get("RAY_ADDRESS") or "auto"


def namespace_of(fleet: str) -> str:
    """The Ray namespace in which a fleet's supervisors are."""
    return NAMESPACE_BEGINNING + fleet


def describe(exc: BaseException) -> str:
    """What went wrong, in a line: the last one of a remote traceback."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    text = lines[-1] if lines else "no answer in time"
    return text[:MAX_REASON_CHARS]
