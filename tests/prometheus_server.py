"""Debian's Prometheus, scraping targets of a test."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from tests.free_ports import find_free_port

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

PROGRAM = shutil.which("prometheus")
START_TIMEOUT_S = 60.0
SCRAPE_INTERVAL_S = 1


@dataclass(frozen=True)
class Job:
    """Targets that are scraped alike: `HOST:PORT`s, and the directory of an identity for TLS."""

    name: str
    targets: Sequence[str]
    identity: Path | None = None

    def config(self) -> dict[str, object]:
        found: dict[str, object] = {
            "job_name": self.name,
            "static_configs": [{"targets": list(self.targets)}],
        }
        if self.identity is not None:
            found |= {
                "scheme": "https",
                "tls_config": {
                    "server_name": "worker.baton.internal",
                    "ca_file": str(self.identity / "ca.crt"),
                    "cert_file": str(self.identity / "tls.crt"),
                    "key_file": str(self.identity / "tls.key"),
                },
            }
        return found


@dataclass(frozen=True)
class Prometheus:
    """One that runs."""

    url: str

    def query(self, expr: str) -> list[dict[str, object]]:
        """The lines of an instant query; an assertion fails with its error."""
        asked = urllib.parse.urlencode({"query": expr})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=30) as reply:
                return json.load(reply)["data"]["result"]
        except urllib.error.HTTPError as exc:
            raise AssertionError(f"{expr}: {exc.read().decode()}") from exc

    def wait_for(self, expr: str) -> None:
        """Until a query has a line."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.query(expr):
            if time.monotonic() >= deadline:
                raise AssertionError(f"{expr} has no data; not up: {self.query('up == 0')}")
            time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, jobs: Sequence[Job]) -> Generator[Prometheus]:
    """Start it on a free port of loopback; ready when the block begins."""
    config, port = folder / "prometheus.yml", find_free_port()
    scrape = [job.config() for job in jobs]
    interval = f"{SCRAPE_INTERVAL_S}s"
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": interval}, "scrape_configs": scrape})
    )
    address = f"127.0.0.1:{port}"
    command = [
        str(PROGRAM),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_ready(f"http://{address}/-/ready", process, folder / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
