"""Another host, as far as the network is concerned: a namespace at the end of a cable.

Needs CAP_NET_ADMIN and iproute2; without them it raises `NoNamespaceError`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

CARRIER_TIMEOUT_S: Final = 5.0
_NUMBERS: Final = itertools.count()


class NoNamespaceError(Exception):
    """This user cannot make a network namespace here."""


@dataclass(frozen=True, slots=True)
class FarHost:
    """A network namespace `name` with `address`; `link` is this side's end of the cable."""

    name: str
    address: str
    near_address: str
    link: str
    far_link: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command begins with that is to run there."""
        return ("ip", "netns", "exec", self.name)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Pull the cable: what is sent meanwhile is lost, without an error."""
        run("ip", "link", "set", self.link, "down")
        try:
            yield
        finally:
            run("ip", "link", "set", self.link, "up")
            _wait_for_carrier(self.link)

    @contextmanager
    def limited(self, rate_bytes: int) -> Iterator[None]:
        """So many bytes a second in each direction."""
        ends = ((("tc",), self.link), (("tc", "-n", self.name), self.far_link))
        limit = ("tbf", "rate", f"{rate_bytes * 8}bit", "burst", "64kb", "latency", "100ms")
        for command, device in ends:
            run(*command, "qdisc", "replace", "dev", device, "root", *limit)
        try:
            yield
        finally:
            for command, device in ends:
                run(*command, "qdisc", "del", "dev", device, "root")


@contextmanager
def far_host() -> Iterator[FarHost]:
    """Gone, with its cable, at the end; so are processes' connections to it.

    Raises:
        NoNamespaceError: see there.
    """
    number = next(_NUMBERS)
    name = f"bt{os.getpid() % 10_000}-{number}"
    # Four addresses of those that RFC 2544 keeps for measuring. Several hosts may be there, also of
    # other processes whose tests run at this time.
    network, first = f"198.18.{os.getpid() % 250}", number % 63 * 4
    near_address, far_address = f"{network}.{first + 1}", f"{network}.{first + 2}"
    try:
        run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as exc:
        stderr = exc.stderr.decode(errors="replace") if hasattr(exc, "stderr") else str(exc)
        raise NoNamespaceError(f"cannot make a network namespace: {stderr.strip()}") from exc
    near, far = f"{name}n", f"{name}f"
    try:
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        run("ip", "addr", "add", f"{near_address}/30", "dev", near)
        run("ip", "-n", name, "addr", "add", f"{far_address}/30", "dev", far)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", far, "up")
        run("ip", "link", "set", near, "up")
        _wait_for_carrier(near)
        yield FarHost(name, far_address, near_address, near, far)
    finally:
        # A connection that no process has any more, with bytes that a cut cable keeps it from
        # sending, keeps its namespace, and so the cable, for minutes.
        with suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", near)
        run("ip", "netns", "del", name)


def _wait_for_carrier(link: str) -> None:
    """The kernel notices it a little later; until then it is as if there were no route."""
    state = Path(f"/sys/class/net/{link}/operstate")
    deadline = time.monotonic() + CARRIER_TIMEOUT_S  # noqa: TID251 -- a real cable, real time
    while state.read_text(encoding="ascii").strip() != "up" or _has_tentative_address(link):
        if time.monotonic() > deadline:  # noqa: TID251 -- see above
            raise NoNamespaceError(f"the cable {link} does not come up")
        time.sleep(0.01)


def _has_tentative_address(link: str) -> bool:
    command = ("ip", "-6", "-o", "addr", "show", "dev", link, "tentative")
    return bool(run(*command))


def run(*command: str) -> bytes:
    """Run one of iproute2's commands; what it prints.

    Raises:
        OSError, subprocess.CalledProcessError: it is not there, or it failed.
    """
    done = subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - ours
    return done.stdout
