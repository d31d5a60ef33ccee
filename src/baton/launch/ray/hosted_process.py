"""One process of a fleet on the host where Ray placed it: its key, its settings, its reports."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.config.cluster_key import KEY_VARIABLE
from baton.config.environment import run_directory
from baton.config.resolve import CommandLine, resolve
from baton.errors import ConfigError, PeerUnreachableError
from baton.launch.errors import FleetError
from baton.launch.fleet import FleetMember, MemberState
from baton.launch.gateways import find_up, get
from baton.launch.plan import Ports, WorkerPlan, command_line
from baton.launch.ray.hosts import path_of
from baton.launch.ray.members_file import MembersFileWriter, Supervisors
from baton.launch.ray.plan import RayPlan, role_of, settings_file
from baton.launch.ray.process import LogLines, SupervisedProcess
from baton.launch.slots import KILL_MARGIN_S
from baton.launch.sockets import GatewaySockets, open_gateway_sockets
from baton.protocol.gateway_http import READY_PATH
from baton.protocol.worker_http import METRICS_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from baton.clock import Clock
    from baton.config.sections import GatewaySection

READY: Final = b'{"status":"ready"}'
MAX_REASON_CHARS: Final = 500
KEY_INTERVAL_S: Final = 1.0
PORT_INTERVAL_S: Final = 1.0
DISK_INTERVAL_S: Final = 1.0
HIDDEN_VARIABLES: Final = ("RAY_", "BATON_CONFIG", "OMP_NUM_THREADS", KEY_VARIABLE)
"""Beginnings of variables that a process does not inherit from its supervisor: an engine that uses
Ray itself is not to take its supervisor's actor for its own, and Ray gives actors one thread."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayHost:
    """The host that Ray chose: its address, as other hosts reach it, and its labels."""

    address: str
    labels: Mapping[str, str]

    @property
    def topology(self) -> str:
        """`zone/rack/host` of its labels; what they do not name stays empty."""
        return path_of(self.labels)


class HostedProcess:
    """Owned by one event loop; `run` is called once.

    `environment` is the host's. The cluster key comes from a file on the host, from `give_key`, or
    from another supervisor of the fleet, as after a restart on another host.
    """

    def __init__(
        self,
        name: str,
        plan: RayPlan,
        host: RayHost,
        *,
        supervisors: Supervisors,
        environment: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self.name, self.role = name, role_of(name)
        self._plan, self._host = plan, host
        self._supervisors, self._clock = supervisors, clock
        hidden = HIDDEN_VARIABLES
        self._environment = {k: v for k, v in environment.items() if not k.startswith(hidden)}
        self._directory = run_directory(environment) / f"ray-{plan.fleet}-{name}"
        self._key_given = asyncio.Event()
        self._key: str | None = None
        self._failure: str | None = None
        self._writer = MembersFileWriter(supervisors, self._members_path)
        self._sockets: GatewaySockets | None = None
        self._process = SupervisedProcess(name, self._command, self._environment, clock)

    async def run(self) -> None:
        """Run the process until it is stopped."""
        try:
            await self._find_key()
            await self._write_files()
            if self.role == "gateway":
                await self._run_gateway()
            else:
                await self._process.run()
        except Exception as exc:
            log.exception("%s cannot be run", self.name)
            self._failure = str(exc)

    async def _run_gateway(self) -> None:
        self._sockets = await self._open_sockets()
        self._process.inherited = self._sockets.fds
        polling = asyncio.create_task(self._writer.run())
        try:
            await self._process.run()
        finally:
            polling.cancel()
            self._sockets.close()

    async def _open_sockets(self) -> GatewaySockets:
        """As soon as the port is free: a gateway of before may be about to end."""
        while True:
            try:
                sockets = open_gateway_sockets(self._gateway_section())
            except ConfigError as exc:
                self._failure = str(exc)
                await asyncio.sleep(PORT_INTERVAL_S)
            else:
                self._failure = None
                return sockets

    def _gateway_section(self) -> GatewaySection:
        """As the gateway reads it, but for the host's address."""
        command_line = CommandLine(self._settings_path)
        section = resolve(command_line, self._environment).to_config().gateway
        if "gateway.host" in self._plan.settings:
            return section
        return msgspec.structs.replace(section, host=self._host.address)

    def give_key(self, key: str) -> None:
        """Take the cluster key. The first one stays."""
        if self._key is None:
            self._key = key
            self._environment[KEY_VARIABLE] = key
            self._key_given.set()

    @property
    def key(self) -> str | None:
        """The cluster key, if it came by a call."""
        return self._key

    async def _find_key(self) -> None:
        if self._plan.has_key_file:
            return
        while not self._key_given.is_set():
            await self._ask_for_key()
            try:
                async with asyncio.timeout(KEY_INTERVAL_S):
                    await self._key_given.wait()
            except TimeoutError:
                continue

    async def _ask_for_key(self) -> None:
        try:
            names = await self._supervisors.list_names(KEY_INTERVAL_S)
        except FleetError:
            return
        calls = [
            self._supervisors.call(name, "key", timeout_s=KEY_INTERVAL_S)
            for name in names - {self.name}
        ]
        for key in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(key, str) and key:
                self.give_key(key)

    # The process

    @property
    def _settings_path(self) -> Path:
        return self._directory / "settings.toml"

    @property
    def _members_path(self) -> Path:
        return self._directory / "members.json"

    async def _write_files(self) -> None:
        """What the process reads. A disk that is full is waited for."""
        while True:
            try:
                self._write_settings()
                if self.role == "gateway":
                    await self._writer.poll()
                    if self._writer.problem is not None:
                        raise self._writer.problem
            except OSError as exc:
                self._failure = (
                    f"cannot write into {self._directory}: {exc.strerror or exc}; make room there, "
                    "or set XDG_RUNTIME_DIR: it is tried again each second"
                )
                await asyncio.sleep(DISK_INTERVAL_S)
            else:
                self._failure = None
                return

    def _write_settings(self) -> None:
        for directory in (self._directory.parent, self._directory):
            directory.mkdir(mode=0o700, exist_ok=True)
            status = directory.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise ConfigError(
                    f"{directory} can be changed by other users: remove it, or set XDG_RUNTIME_DIR"
                )
        group = self._plan.group_of(self.role)
        settings = self._plan.settings | (group.settings if group else {})
        fd = os.open(self._settings_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as opened:
            opened.write(settings_file(settings))

    def _command(self, ports: Ports) -> tuple[str, ...]:
        if self.role == "gateway":
            return self._gateway_command()
        settings: dict[str, object] = {
            "worker.host": self._host.address,
            "worker.handoff_host": self._host.address,
        }
        if "worker.topology" not in self._plan.settings and self._host.topology:
            settings["worker.topology"] = self._host.topology
        return WorkerPlan(self.name, self.role, settings).command(self._settings_path, ports)

    def _gateway_command(self) -> tuple[str, ...]:
        settings: dict[str, object] = {"gateway.members": [f"file:{self._members_path}"]}
        inherited: tuple[str, ...] = ()
        if self._sockets is not None:
            settings |= {"gateway.host": self._sockets.host, "gateway.port": self._sockets.port}
            if self._sockets.management:
                settings["gateway.management_port"] = 0  # its own socket, whatever its port
            inherited = self._sockets.arguments()
        return (*command_line("gateway", self._settings_path, settings), *inherited)

    # What supervisors and operators ask

    async def report(self) -> FleetMember:
        """The process's state now."""
        process = self._process
        state, reason = await self._find_state()
        return FleetMember(
            name=self.name,
            role=self.role,
            state=state,
            host=self._host.address,
            url=process.url,
            pid=process.pid,
            num_restarts=process.num_restarts,
            up_s=process.up_s,
            labels=dict(self._host.labels),
            reason=reason,
        )

    async def _find_state(self) -> tuple[MemberState, str]:
        process = self._process
        if self._failure is not None:
            return "failed", self._failure
        if not (self._plan.has_key_file or self._key_given.is_set()):
            return "starting", "waits for the cluster key, which no other process of the fleet has"
        if process.state == "ready":
            if process.preempted is not None:
                return "draining", process.preempted
            for url in self._urls:
                if why_not := await asyncio.to_thread(find_why_not_ready, url):
                    return "starting", why_not
        return process.state, process.reason or process.phase or ""

    async def list_used(self) -> frozenset[str]:
        """URLs of the workers to which all processes of this gateway give requests.

        Raises:
            PeerUnreachableError: one of them does not answer.
        """
        found = [find_up(await asyncio.to_thread(get, url, METRICS_PATH)) for url in self._urls]
        return frozenset.intersection(*found) if found else frozenset()

    @property
    def _urls(self) -> tuple[str, ...]:
        """Where each process of this gateway answers this host."""
        url, sockets = self._process.url, self._sockets
        return () if url is None or sockets is None else sockets.metrics_urls(url)

    def lines(self, since: int) -> LogLines:
        """The process's lines from a number on; from a negative one, so many of the last."""
        lines = self._process.lines
        return lines.last(-since) if since < 0 else lines.since(since)

    def mark_draining(self) -> None:
        """See `SupervisedProcess`."""
        self._process.mark_draining()

    async def replace(self) -> None:
        """See `SupervisedProcess`."""
        await self._process.replace(self._plan.drain_s(self.role) + KILL_MARGIN_S)

    async def stop(self) -> str:
        """Drain and end the process: how it ended."""
        await self._process.stop(self._plan.drain_s(self.role) + KILL_MARGIN_S)
        return self._process.reason


def find_why_not_ready(url: str) -> str:
    """Why a gateway does not serve yet; empty if it does. Blocks for two seconds at most."""
    try:
        answer = get(url, READY_PATH)
    except PeerUnreachableError as exc:
        return str(exc)
    return "" if answer == READY else answer[:MAX_REASON_CHARS].decode(errors="replace")
