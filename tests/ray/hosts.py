"""A Ray cluster of several hosts on this machine, each of which can lose power or its network.

A host is a network namespace (`network_namespaces.bridged_hosts`) with processes, mounts, hostname
and shared memory of its own. Its first process is killed as a power failure would: everything on it
is gone at once. Needs root, iproute2, util-linux and Ray.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.net.parent_process import exit_with_parent
from baton.testing.network_namespaces import BridgedHost, bridged_hosts, dropping_packets_from

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HEAD_PORT: Final = 6379
START_TIMEOUT_S: Final = 60.0
INIT_TIMEOUT_S: Final = 5.0
HEALTH_CHECKS: Final = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
"""A host that is away is noticed after some 3 s, and the head may be away for an hour; with Ray's
defaults, each of the two is a minute."""
FIXED_PORTS: Final = (
    "--node-manager-port=6701",
    "--object-manager-port=6702",
    "--runtime-env-agent-port=6703",
    "--dashboard-agent-listen-port=6704",
    "--metrics-export-port=6705",
    "--dashboard-agent-grpc-port=6706",
    "--min-worker-port=20000",
    "--max-worker-port=20099",
)
# The first process of a host: it takes over processes without a parent, and ends with a signal.
INIT: Final = (
    "mount -t tmpfs -o size=1g tmpfs /dev/shm; trap : TERM; while :; do sleep 3600 & wait $!; done"
)


@dataclass(eq=False)
class IsolatedHost:
    """One host. `environment` is that of all commands on it; `folder` is its own."""

    network: BridgedHost
    folder: Path
    labels: Mapping[str, str]
    environment: dict[str, str]
    first: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        """Where other hosts, and this process, reach it."""
        return self.network.address

    @property
    def first_pid(self) -> int:
        """Of its first process, as this process sees it."""
        children = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children")
        deadline = time.monotonic() + INIT_TIMEOUT_S
        while not (pids := children.read_text("ascii").split()):
            if time.monotonic() > deadline:
                raise AssertionError(f"the host {self.address} has no first process")
            time.sleep(0.01)
        return int(pids[0])

    def run(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command on it, to its end."""
        return subprocess.run(
            [*self._prefix, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command on it."""
        return subprocess.Popen(
            [*self._prefix, *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def _prefix(self) -> tuple[str, ...]:
        return ("nsenter", "-t", str(self.first_pid), "-n", "-p", "-m", "-u", "-i", "--")

    def cut_power(self) -> None:
        """End everything on it at once."""
        if self.first.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.first_pid, signal.SIGKILL)
            self.first.wait(INIT_TIMEOUT_S)

    def start_ray(self, head: IsolatedHost, *options: str) -> subprocess.Popen[str]:
        """Start to join the cluster, or to be its head; ends when that is done.

        `options` are further ones of `ray start`.
        """
        labels = ",".join(f"{name}={value}" for name, value in self.labels.items())
        part = (
            ("--head", f"--port={HEAD_PORT}", "--include-dashboard=false")
            if self is head
            else (f"--address={head.address}:{HEAD_PORT}",)
        )
        return self.start(
            str(Path(sys.executable).parent / "ray"),
            "start",
            *part,
            f"--node-ip-address={self.address}",
            f"--labels={labels}",
            "--num-cpus=2",
            f"--temp-dir={self.folder / 'ray'}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            *FIXED_PORTS,
            *options,
        )


@dataclass(frozen=True)
class RayCluster:
    """Hosts of one Ray cluster; the first is its head."""

    hosts: tuple[IsolatedHost, ...]

    @property
    def head(self) -> IsolatedHost:
        """The host of Ray's head."""
        return self.hosts[0]

    @property
    def address(self) -> str:
        """Ray's address, for processes on its hosts."""
        return f"{self.head.address}:{HEAD_PORT}"

    def start_ray(self, *head_options: str) -> None:
        """Start Ray on all hosts; `head_options` are further ones of the head's `ray start`.

        Raises:
            AssertionError: it did not start; what it printed is in the message.
        """
        for hosts in (self.hosts[:1], self.hosts[1:]):
            options = head_options if self.head in hosts else ()
            starts = [(host, host.start_ray(self.head, *options)) for host in hosts]
            for host, start in starts:
                printed, _ = start.communicate(timeout=START_TIMEOUT_S)
                if start.returncode:
                    raise AssertionError(f"Ray does not start on {host.address}:\n{printed}")

    @contextmanager
    def partitioned(self, host: IsolatedHost, *, both_ways: bool) -> Iterator[None]:
        """What one host sends to the others is lost; with `both_ways` also what they send to it.

        This process reaches all of them.
        """
        with ExitStack() as stack:
            for other in self.hosts:
                if other is not host and other.first.poll() is None:
                    cuts = [(other.network, host.network)]
                    if both_ways:
                        cuts.append((host.network, other.network))
                    for listener, speaker in cuts:
                        stack.enter_context(dropping_packets_from(listener, speaker))
            yield


@contextmanager
def ray_cluster(
    labels: Sequence[Mapping[str, str]], *, token: str | None = None
) -> Iterator[RayCluster]:
    """Hosts with these labels, on which Ray is not started yet. All is gone at the end.

    Raises:
        NoNamespaceError: this user cannot make namespaces here.
    """
    folder = Path(tempfile.mkdtemp(prefix="br", dir="/tmp"))
    try:
        token_file = folder / "token"
        fd = os.open(token_file, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(fd, "w") as opened:
            opened.write(token or secrets.token_hex(32))
        with bridged_hosts(len(labels)) as networks, ExitStack() as stack:
            hosts = []
            for number, (network, own) in enumerate(zip(networks, labels, strict=True)):
                host = _open_host(network, folder / f"h{number}", own, token_file)
                stack.callback(host.cut_power)
                hosts.append(host)
            yield RayCluster(tuple(hosts))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_host(
    network: BridgedHost, folder: Path, labels: Mapping[str, str], token_file: Path
) -> IsolatedHost:
    folder.mkdir(mode=0o700)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "BATON_"))},
        **HEALTH_CHECKS,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "XDG_RUNTIME_DIR": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    isolate = ("unshare", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child")
    first = subprocess.Popen(
        [*network.prefix, *isolate, "--mount-proc", "bash", "-c", INIT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(exit_with_parent, os.getpid()),  # noqa: PLW1509 - it takes no lock
    )
    return IsolatedHost(network, folder, labels, environment, first)
