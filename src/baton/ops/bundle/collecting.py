"""Runs all parts, each for a bounded time, and writes what came of them."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from baton.errors import BatonError
from baton.ops.bundle.archive import BundleContents, Manifest
from baton.ops.bundle.fleet import NUM_AT_ONCE, FleetCollector
from baton.ops.bundle.host import read_versions
from baton.ops.bundle.logs import read_log
from baton.ops.bundle.redaction import Redactor
from baton.ops.bundle.settings import find_secrets, show_settings
from baton.ops.doctor.reporting import check_host
from baton.ops.page_reader import open_pages

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from baton.clock import Clock
    from baton.config.resolve import Resolved
    from baton.ops.doctor.host import Host
    from baton.ops.gateway_pages import Gateway

MAX_LOGS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleOrder:
    """What is to be collected. `logs` by the names of their processes; `timeout_s` for pages."""

    gateways: tuple[Gateway, ...]
    resolved: Resolved
    environment: Mapping[str, str]
    logs: Mapping[str, Path]
    num_requests: int
    timeout_s: float
    worker_tls: ssl.SSLContext | None
    has_doctor: bool = True


def make_bundle(order: BundleOrder, path: Path, host: Host, clock: Clock) -> Manifest:
    """Collect everything and write the archive. Starts processes: call it before any thread.

    Raises:
        BundleError: the archive cannot be written.
    """
    started = clock.now()
    contents = BundleContents()
    redactor = Redactor(find_secrets(order.resolved, order.environment))
    parts = _LocalParts(order, contents, redactor, host, clock)
    parts.collect()
    asyncio.run(_collect_fleets(order, contents, redactor))
    manifest = Manifest(
        created_at=round(clock.unix_now()),
        duration_s=round(clock.now() - started, 3),
        gateways=tuple(gateway.url for gateway in order.gateways),
        files=contents.files,
        missing=contents.missing,
    )
    contents.write(path, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class _LocalParts:
    """What is known on this machine."""

    order: BundleOrder
    contents: BundleContents
    redactor: Redactor
    host: Host
    clock: Clock

    def collect(self) -> None:
        self._take("versions.json", self._versions)
        self._take("config.json", self._settings)
        if self.order.has_doctor:
            self._take("doctor.json", self._doctor)
        else:
            self.contents.miss("doctor.json", "it was not wanted (--no-doctor)")
        if not self.order.logs:
            self.contents.miss(
                "logs",
                "no fleet of that name has logs on this machine, or none were wanted; of fleets "
                "elsewhere: baton logs --on ray|kubernetes",
            )
        for name, log in sorted(self.order.logs.items())[:MAX_LOGS]:
            self._take(f"logs/{name}.log", partial(read_log, log))

    def _take(self, name: str, read: Callable[[], str | bytes]) -> None:
        """Add what `read` gives; text is redacted, bytes are already."""
        try:
            content = read()
        except (BatonError, OSError, ValueError, subprocess.SubprocessError) as exc:
            self.contents.miss(name, self.redactor.text(f"{type(exc).__name__}: {exc}"))
            return
        if isinstance(content, str):
            content = self.redactor.text(content).encode()
        self.contents.add(name, content)

    def _versions(self) -> bytes:
        return _formatted(read_versions(self.host))

    def _settings(self) -> bytes:
        shown = show_settings(self.order.resolved, self.order.environment, self.redactor)
        return _formatted(shown)

    def _doctor(self) -> bytes:
        report = check_host(self.host, self.order.resolved.to_config(), self.clock)
        return self.redactor.page(msgspec.json.encode(report))


async def _collect_fleets(order: BundleOrder, contents: BundleContents, redactor: Redactor) -> None:
    at_once = asyncio.Semaphore(NUM_AT_ONCE)
    async with open_pages(order.worker_tls) as pages:
        try:
            async with asyncio.timeout(order.timeout_s), asyncio.TaskGroup() as group:
                for number, gateway in enumerate(order.gateways):
                    folder = f"gateway-{number}"
                    fleet = FleetCollector(gateway, folder, pages, contents, redactor, at_once)
                    group.create_task(fleet.collect(order.num_requests))
        except TimeoutError:
            contents.miss("pages", f"not all were read within {order.timeout_s:g} s (--timeout-s)")


def _formatted(shown: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(shown))
