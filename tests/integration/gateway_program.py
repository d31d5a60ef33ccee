"""A gateway as a process of its own, forked with its modules loaded: what a test may do with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.errors import BatonError
from baton.gateway.options import GatewayOptions, WorkerAddress
from baton.gateway.process import run_gateway
from baton.protocol.worker_http import Role
from tests.preloaded import TORCH, PreloadedProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

POLL_S = 0.005
TLS_FILES = frozenset({"tls_certificate", "tls_key"})


class GatewayProcess:
    """What is used of an `asyncio.subprocess.Process`; one event loop owns it.

    `options` are those of `GatewayOptions`, as JSON has them; its workers do both parts.
    """

    def __init__(
        self, worker_url: str, options: dict[str, Any], listen_fds: Sequence[int] = ()
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - until it is closed
        given = msgspec.json.encode([worker_url, options]).decode()
        self._popen = PreloadedProcess(
            TORCH, __name__, [given], os.environ, self._stderr, inherited=listen_fds
        )
        self.pid = self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    async def read_status(self) -> bytes:
        """The next line of what it announces."""
        pipe = self._popen.stdout
        assert pipe is not None
        return await asyncio.to_thread(pipe.readline)

    def send_signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        while (status := self.returncode) is None:
            await asyncio.sleep(POLL_S)
        return status

    def read_stderr(self) -> str:
        """What it said so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode()

    async def close(self) -> None:
        """It is gone, and so are the processes that it started."""
        self.kill()
        await self.wait()
        self._stderr.close()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def main() -> None:
    given, *listen_fds = sys.argv[1:]
    url, options = msgspec.json.decode(given)
    paths = {name: Path(options.pop(name)) for name in TLS_FILES & options.keys()}
    try:
        run_gateway(
            GatewayOptions(
                addresses=(WorkerAddress(url, Role.BOTH),),
                credentials=Credentials.of(ClusterKey(b"k" * 32)),
                listen_fds=tuple(map(int, listen_fds)),
                probe_interval_s=0.1,
                tls="off",
                **options,
                **paths,
            )
        )
    except BatonError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
