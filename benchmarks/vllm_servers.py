"""Pairs of real vLLM servers, one for each KV connector that is compared, ended on the way out.

A pair that is not being measured is stopped with SIGSTOP: some connectors keep a core busy while
they wait, and would slow the others.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from completion_client import ServerError

from baton.testing.fleet import sigterm_as_ctrl_c

if TYPE_CHECKING:
    from collections.abc import Sequence

START_TIMEOUT_S = 180.0


@dataclass
class Server:
    """One vLLM API server. `log` gets all it prints."""

    name: str
    port: int
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        """Block until /health answers 200."""
        deadline = time.perf_counter() + START_TIMEOUT_S
        while True:
            if self.popen.poll() is not None or time.perf_counter() > deadline:
                raise ServerError(f"{self.name} did not start: {self.last_error()}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.2)
            finally:
                connection.close()

    def last_error(self) -> str:
        """The last line of the log that names an error."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "Error:" in line and "Engine core" not in line]
        return errors[-1][-300:] if errors else "no error in its log"

    def cpu_seconds(self) -> float:
        """User and system time of it and of its children that still live."""
        return sum(map(_cpu_seconds, list_group(self.popen.pid)))

    def send(self, number: signal.Signals) -> None:
        """Signal it and its children."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, number)


@dataclass
class Servers:
    """All servers of a benchmark. Use as a context manager."""

    folder: Path
    model: Path
    dtype: str
    kv_bytes: int = 448 << 20
    max_model_len: int = 2304
    python_path: str = ""
    arguments: tuple[str, ...] = ("--no-enable-prefix-caching",)
    started: list[Server] = field(default_factory=list)
    ending: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Self:
        self.ending.enter_context(sigterm_as_ctrl_c())
        self.ending.callback(self.close)
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.close()

    def close(self) -> None:
        """End all servers."""
        self.end(self.started)

    def end(self, servers: Sequence[Server]) -> None:
        """End these: one that did not come up would take the cores of the others."""
        for server in servers:
            server.send(signal.SIGCONT)
            server.send(signal.SIGTERM)
        for server in servers:
            try:
                server.popen.wait(20)
            except subprocess.TimeoutExpired:
                server.send(signal.SIGKILL)
                server.popen.wait()

    def start(
        self,
        name: str,
        cores: int | str,
        transfer: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Server:
        """Start a server on `cores`, not waiting for it; `transfer` is its KV transfer config."""
        port = find_free_port()
        command = [
            "taskset", "-c", str(cores), sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", "model", "--host", "127.0.0.1",
            "--port", str(port), "--dtype", self.dtype, "--enforce-eager",
            "--kv-cache-memory-bytes", str(self.kv_bytes),
            "--max-model-len", str(self.max_model_len), *self.arguments,
        ]  # fmt: skip
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        full = dict(
            os.environ,
            VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
        )  # fmt: skip
        if self.python_path:
            full["PYTHONPATH"] = self.python_path
        full |= environment or {}
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            popen = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=full, start_new_session=True,
            )  # fmt: skip
        server = Server(name, port, popen, log)
        self.started.append(server)
        return server


def find_free_port() -> int:
    """A TCP port of the loopback that nothing listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def list_group(leader: int) -> list[int]:
    """Processes of a group that live."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader:
            members.append(int(stat.parent.name))
    return members


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
