"""Workers as processes of their own, for tests: started, announced, spoken to, ended.

`python -m tests.integration.worker_process OPTIONS` runs one: those of `starting`, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import HandoffMode, Ticket, WorkerRef, seal
from baton.config.sections import HandoffSection, StoreSection, TransferSection, WorkerSection
from baton.ids import Epoch, WorkerId, new_ticket_id
from baton.worker.options import ProcessOptions
from baton.worker.process import run_worker
from tests.preloaded import TORCH, PreloadedProcess
from tests.tickets import issue

if TYPE_CHECKING:
    from collections.abc import Generator


KEY = Credentials.of(ClusterKey(b"k" * 32))
SECTIONS = {"handoff": HandoffSection, "transfer": TransferSection, "store": StoreSection}
ENGINE_OPTIONS = {"num_threads": 1, "num_blocks": 256, "dtype": "float32"}


@dataclass
class WorkerProcess:
    """A worker's process. `ready` is what it announced, once it was waited for."""

    popen: PreloadedProcess
    ready: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(
            WorkerId(self.ready["worker"]),
            Epoch(self.ready["epoch"]),
            self.ready["handoff_address"],
        )

    def wait_until_ready(self) -> None:
        self.ready = self.next_event()
        while self.ready["event"] != "ready":
            self.ready = self.next_event()

    def next_event(self) -> dict[str, Any]:
        stdout: IO[bytes] = self.popen.stdout  # type: ignore[assignment]
        line = stdout.readline()
        if not line:
            raise AssertionError(f"the worker ended with {self.popen.wait(30)}")
        return dict(json.loads(line))

    def end(self) -> int:
        """SIGTERM, then its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(30)


@contextmanager
def starting(name: str, **options: Any) -> Generator[WorkerProcess]:
    """A worker that is starting; it is gone afterwards."""
    given = {"name": name, "engine_options": ENGINE_OPTIONS} | options
    command = (TORCH, __name__, [json.dumps(given)], os.environ)
    with open(2, "wb", closefd=False) as stderr:
        popen = PreloadedProcess(*command, stderr)
    try:
        yield WorkerProcess(popen, {})
    finally:
        popen.send_signal(signal.SIGKILL)
        popen.wait(30)
        if popen.stdout is not None:
            popen.stdout.close()


def make_ticket(
    prefill: WorkerRef,
    decode: WorkerRef,
    tenant_salt: str = "",
    mode: HandoffMode = "push",
    *,
    early: bool = False,
    distance: str = "",
) -> tuple[Ticket, str]:
    """A ticket as the gateway would sign it, and its text."""
    ticket = Ticket(
        new_ticket_id(),
        "req-test",
        prefill,
        decode,
        mode,
        issue(60),
        tenant_salt,
        early,
        distance=distance,
    )
    return ticket, seal(ticket, KEY)


def main() -> None:
    given = json.loads(sys.argv[1])
    own = {name: given.pop(name) for name in ("engine_options", "parent_pid") if name in given}
    own |= {name: given.pop(name) for name in SECTIONS if name in given}
    for name, section in SECTIONS.items():
        own[name] = msgspec.convert(own.get(name, {}), section)
    section = msgspec.convert(given, WorkerSection)
    run_worker(ProcessOptions(**msgspec.structs.asdict(section), credentials=KEY, tls="off", **own))


if __name__ == "__main__":
    main()
