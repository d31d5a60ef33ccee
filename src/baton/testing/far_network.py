"""Another host, as far as the network is concerned: a namespace at the end of a cable.

Needs CAP_NET_ADMIN and iproute2; who has neither is told why (`NoNamespaceError`).
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

NEAR_ADDRESS: Final = "10.213.77.1"
FAR_ADDRESS: Final = "10.213.77.2"
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

    def lift_limit(self) -> None:
        """As fast as it was."""
        run("tc", "qdisc", "del", "dev", self.link, "root")
        run("tc", "-n", self.name, "qdisc", "del", "dev", self.far_link, "root")

    def cut(self) -> None:
        """Pull the cable: what is sent from now on is lost, and nobody is told."""
        run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        """Plug it in again."""
        run("ip", "link", "set", self.link, "up")
        _wait_for_carrier(self.link)

    def limit_rate(self, rate_bytes: int) -> None:
        """So many bytes a second in each direction."""
        for command, device in (
            (("tc",), self.link),
            (("tc", "-n", self.name), self.far_link),
        ):
            verb = ("qdisc", "replace", "dev", device, "root", "tbf")
            run(*command, *verb, "rate", f"{rate_bytes * 8}bit", "burst", "64kb", "latency", "100ms")


@contextmanager
def far_host() -> Iterator[FarHost]:
    """Gone, with its cable, at the end; so are processes' connections to it.

    Raises:
        NoNamespaceError: see there.
    """
    name = f"bt{os.getpid() % 10_000}-{next(_NUMBERS)}"
    try:
        run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as exc:
        said = exc.stderr.decode(errors="replace") if hasattr(exc, "stderr") else str(exc)
        raise NoNamespaceError(f"cannot make a network namespace: {said.strip()}") from exc
    near, far = f"{name}n", f"{name}f"
    try:
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        run("ip", "addr", "add", f"{NEAR_ADDRESS}/24", "dev", near)
        run("ip", "-n", name, "addr", "add", f"{FAR_ADDRESS}/24", "dev", far)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", far, "up")
        run("ip", "link", "set", near, "up")
        _wait_for_carrier(near)
        run("sleep", "2")
        yield FarHost(name, FAR_ADDRESS, NEAR_ADDRESS, near, far)
    finally:
        # A connection that nobody has any more, with bytes that a cut cable keeps it from sending,
        # keeps its namespace, and so the cable, for minutes.
        subprocess.run(("ip", "link", "del", near), check=False, capture_output=True)
        run("ip", "netns", "del", name)


def _wait_for_carrier(link: str) -> None:
    """The kernel notices it a little later; until then it is as if there were no route."""
    state = Path(f"/sys/class/net/{link}/operstate")
    deadline = time.monotonic() + CARRIER_TIMEOUT_S  # noqa: TID251 -- a real cable, real time
    while state.read_text(encoding="ascii").strip() != "up":
        if time.monotonic() > deadline:  # noqa: TID251 -- see above
            raise NoNamespaceError(f"the cable {link} does not come up")
        time.sleep(0.01)


def run(*command: str) -> None:
    """Run one of iproute2's commands.

    Raises:
        OSError, subprocess.CalledProcessError: it is not there, or it failed.
    """
    subprocess.run(command, check=True, capture_output=True)
