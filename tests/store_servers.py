"""Real servers for tiers on servers: Redis (Debian's package), and S3 (moto's server)."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from baton.errors import StoreFullError
from baton.testing.store_contract import name_of
from tests.free_ports import find_free_port

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from baton.store.interface import Body, EntryName, Tier

START_TIMEOUT_S = 30.0
S3_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
BUCKET = "baton-kv"


class StoreServer:
    """One process that listens on 127.0.0.1, ready when this returns."""

    def __init__(self, command: list[str], port: int) -> None:
        with_parent = shutil.which("setpriv")  # a test run that is killed leaves no server
        prefix = [with_parent, "--pdeathsig", "KILL"] if with_parent else []
        self.port, self._command = port, [*prefix, *command]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._listens():
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill it, and prove that nothing listens any more."""
        self.process.kill()
        self.process.wait(30)
        assert not self._listens()

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Stop the process for the length of a block; what it was sent is answered afterwards."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            deadline = time.monotonic() + 30
            while self._state() != "T":
                assert time.monotonic() < deadline, "it was not stopped"
                time.sleep(0.005)
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(30)

    def _state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True


class RedisServer(StoreServer):
    """`redis-server` without a disk."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None) -> None:
        port = port or find_free_port()
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        listening = () if "--tls-port" in arguments else ("--port", str(port))
        command = [program, *listening, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        super().__init__([*command, *arguments], port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


class S3Server(StoreServer):
    """moto's server, with one bucket. Clients need some credentials (`S3_CREDENTIALS`)."""

    def __init__(self) -> None:
        port = find_free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        super().__init__(command, port)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, object]:
        """Options of the tier `object`."""
        return {"url": f"s3://{BUCKET}/baton", "endpoint": self.endpoint, "region": "us-east-1"}

    def start(self) -> None:
        super().start()
        self.request("PUT", "")

    def request(
        self, method: str, key: str, body: bytes | None = None, storage_class: str | None = None
    ) -> bytes:
        """As another client of the bucket: an object's bytes, or nothing where it is missing."""
        scope = "test/20260101/us-east-1/s3/aws4_request"
        headers = {
            "Authorization": (
                f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
            ),
            "Content-Type": "application/octet-stream",  # else it is taken for a form's fields
        }
        if storage_class is not None:
            headers["x-amz-storage-class"] = storage_class
        url = f"{self.endpoint}/{BUCKET}/{key}".rstrip("/")
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as exc:
            with exc:
                if exc.code != 404:
                    raise
            return b""


def limit_memory(pid: int, more_bytes: int) -> None:
    """Let a process have so much more address space than it has now."""
    num_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + more_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def fill_memory(tier: Tier, body: Body) -> list[EntryName]:
    """Put an entry after the other until the tier's process has no memory for the next one."""
    stored: list[EntryName] = []
    try:
        for i in range(100):
            name = name_of(f"entry {i}")
            tier.put(name, body)
            stored.append(name)
    except StoreFullError as exc:
        assert "no memory" in str(exc)  # noqa: PT017 - how many were put before is asked for
        return stored
    raise AssertionError("its memory is not limited")


@contextmanager
def delayed(port: int, delay_s: float) -> Generator[int]:
    """A port of this machine behind which a server answers later: each piece sent to it waits."""
    with forwarded([port], delay_s) as listening_port:
        yield listening_port


@contextmanager
def forwarded(ports: Sequence[int], delay_s: float = 0.0) -> Generator[int]:
    """A port whose new connections lead to the last one of `ports`; old ones stay as they are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=_forward, args=(listener, ports, delay_s), daemon=True).start()
        yield listener.getsockname()[1]


def _forward(listener: socket.socket, ports: Sequence[int], delay_s: float) -> None:
    with suppress(OSError):  # until it is closed
        while True:
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", ports[-1]))
            for source, sink, wait_s in ((client, server, delay_s), (server, client, 0.0)):
                Thread(target=_copy, args=(source, sink, wait_s), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, wait_s: float) -> None:
    with suppress(OSError), source, sink:
        while data := source.recv(1 << 16):
            time.sleep(wait_s)
            sink.sendall(data)
