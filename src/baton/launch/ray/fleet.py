"""What an operator may ask of a running fleet on Ray."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.config.environment import read_environment
from baton.config.resolve import CommandLine, resolve
from baton.errors import UNDECODABLE
from baton.launch.errors import FleetError, UnplacedError
from baton.launch.fleet import COUNTED, FleetMember, FleetStatus, MemberRole
from baton.launch.folder import ray_folder, remove_monitor
from baton.launch.operations import READY_TIMEOUT_S
from baton.launch.ray.connection import CONNECT_TIMEOUT_S, check_ray, connected, find_address
from baton.launch.ray.hosts import path_of
from baton.launch.ray.members_file import read_member
from baton.launch.ray.plan import NAMES, ProcessGroup, RayPlan, number_of, read_plan, role_of
from baton.launch.ray.process import START_TIMEOUT_S, LogLines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection

    from baton.launch.fleet import FleetControl, FleetSize
    from baton.launch.ray.actors import FleetActors

CALL_TIMEOUT_S: Final = 5.0
STOP_MARGIN_S: Final = 15.0
"""How much longer than its drain timeout the answer of a process that is stopped may take."""
GATEWAYS_TIMEOUT_S: Final = 10.0
FOLLOW_INTERVAL_S: Final = 0.5
DECODERS: Final = frozenset[MemberRole]({"decode", "both"})
URLS: Final = frozenset[str]
_IsSo: TypeAlias = "Callable[[frozenset[str]], bool]"
"""Of the workers that a gateway uses, by their addresses."""


class RayFleet:
    """See `FleetControl`. Owned by one event loop; Ray is connected as long as it is used.

    `timeout_s`: for Ray to find a host for a process that is added.
    """

    def __init__(self, supervisors: FleetActors, plan: RayPlan, timeout_s: float) -> None:
        self._supervisors, self._plan, self._timeout_s = supervisors, plan, timeout_s

    async def status(self) -> FleetStatus:
        """See `FleetControl`."""
        names = sorted(await self._list_names(), key=_order)
        members = await asyncio.gather(*(self._report(name) for name in names))
        return FleetStatus(
            fleet=self._plan.fleet,
            backend="ray",
            version=self._plan.version,
            members=tuple(members),
        )

    async def scale(self, size: FleetSize) -> AsyncIterator[str]:
        """See `FleetControl`. Other commands change no workers of these roles meanwhile."""
        sizes: dict[MemberRole, int | None] = {
            "prefill": size.prefill,
            "decode": size.decode,
            "both": size.both,
        }
        wanted = {role: count for role, count in sizes.items() if count is not None}
        for role, count in wanted.items():
            self._group_of(role)
            if role in DECODERS and count == 0:
                raise FleetError(f"no worker would decode any more: keep at least one {role}")
        async with self._supervisors.changing(wanted, CALL_TIMEOUT_S):
            for role, count in wanted.items():
                async for line in self._resize(role, count):
                    yield line

    async def _resize(self, role: MemberRole, count: int) -> AsyncIterator[str]:
        names = await self._list_names()
        members = await self._report_all(role, names)
        current = [member for member in members if member.state in COUNTED]
        others = [member.name for member in members if member.state not in COUNTED]
        async for line in self._add(self._group_of(role), count - len(current), names):
            yield line
        # Those that do not serve go first: one whose host is lost is "starting" without limit.
        newest_first = current[::-1]
        leaving = sorted(newest_first, key=lambda member: member.state == "ready")
        for member in leaving[: max(0, len(current) - count)]:
            async for line in self._take_out(member.name):
                yield line
        for name in others:  # else it, or its next life on another host, were one too many
            yield await self._end(name)

    async def drain(self, worker: str) -> AsyncIterator[str]:
        """See `FleetControl`. Other commands change no processes of its role meanwhile."""
        names = await self._list_names()
        if worker not in names:
            raise FleetError(
                f"the fleet {self._plan.fleet!r} has no process {worker!r}; it has "
                f"{', '.join(sorted(names, key=_order))}"
            )
        role = role_of(worker)
        async with self._supervisors.changing([role], CALL_TIMEOUT_S):
            if role in DECODERS | {"gateway"} and not await self._has_another(worker, role):
                raise FleetError(
                    f"{worker} is the last {role} of this fleet, as no other one is ready; start "
                    "another one first, or end the fleet with `baton down`"
                )
            async for line in self._take_out(worker):
                yield line

    async def _has_another(self, worker: str, role: MemberRole) -> bool:
        """Whether another one is ready; for one that is not ready one that starts will do."""
        names = await self._list_names()
        states = {each.name: each.state for each in await self._report_all(role, names)}
        needed = {"ready"} if states.pop(worker, None) == "ready" else COUNTED
        return any(state in needed for state in states.values())

    async def upgrade(self) -> AsyncIterator[str]:
        """See `FleetControl`.

        A worker's successor is started first. Where Ray finds no host for it, as without a free
        GPU, the worker is drained first, if another one serves in its role. One that does not start
        ends the upgrade. A gateway's next process starts beside the old one, on the same sockets.
        Other commands change nothing meanwhile: they would count a successor as one too many.
        """
        roles = [group.role for group in self._plan.groups]
        async with self._supervisors.changing(roles, CALL_TIMEOUT_S):
            async for line in self._replace_all():
                yield line

    async def _replace_all(self) -> AsyncIterator[str]:
        for name in sorted(await self._list_names(), key=_order):
            if role_of(name) != "gateway":
                async for line in self._succeed(name):
                    yield line
        for name in _of_role("gateway", await self._list_names()):
            yield f"{name}: another process starts on the same sockets"
            timeout_s = START_TIMEOUT_S + self._stop_timeout_s(name)
            await self._call(name, "replace", timeout_s=timeout_s)
            await self._until_ready([name])
            yield f"{name}: serves again"

    async def down(self) -> AsyncIterator[str]:
        """See `FleetControl`."""
        from baton.launch.ray.start import remove_all  # noqa: PLC0415 - imports Ray

        names = await self._list_names()
        gateways = _of_role("gateway", names)
        for step in (gateways, sorted(names - set(gateways), key=_order)):
            for line in await asyncio.gather(*(self._end(name) for name in step)):
                yield line
        await remove_all(self._supervisors, self._plan, ())
        remove_monitor(ray_folder(self._plan.fleet, read_environment()))

    async def logs(self, member: str, num_lines: int, *, follow: bool) -> AsyncIterator[str]:
        """See `FleetControl`."""
        last = await self._lines(member, -max(1, num_lines))
        for line in last.lines if num_lines > 0 else ():
            yield line
        since = last.next_number
        while follow:
            await asyncio.sleep(FOLLOW_INTERVAL_S)
            new = await self._lines(member, since)
            for line in new.lines:
                yield line
            since = new.next_number

    async def _list_ready(self, role: MemberRole, names: Collection[str]) -> list[str]:
        """Processes of a role that serve, the oldest first."""
        members = await self._report_all(role, names)
        return [member.name for member in members if member.state == "ready"]

    async def _report_all(self, role: MemberRole, names: Collection[str]) -> list[FleetMember]:
        """Processes of a role, the oldest first; without an answer they are "starting"."""
        return await asyncio.gather(*(self._report(name) for name in _of_role(role, names)))

    # Adding

    async def _add(
        self,
        group: ProcessGroup,
        num_processes: int,
        names: Collection[str],
        near: str | None = None,
    ) -> AsyncIterator[str]:
        """Start workers, and wait until all gateways have them; none is left if one fails.

        `near`: the path of a host; they start there, or as near to it as there is room.
        """
        from baton.launch.ray.start import create_supervisor, wait_until_placed  # noqa: PLC0415

        first = max((number_of(name) for name in _of_role(group.role, names)), default=-1) + 1
        added = [f"{NAMES[group.role]}-{first + each}" for each in range(num_processes)]
        if not added:
            return
        yield f"{', '.join(added)}: starting"
        created: list[str] = []  # a name that is taken is another command's worker
        try:
            for name in added:
                create_supervisor(self._plan, group, name, near=near)
                created.append(name)
            await wait_until_placed(
                self._supervisors, self._plan, added, key="", timeout_s=self._timeout_s
            )
            members = await self._until_ready(added)
        except BaseException:
            for name in created:
                await self._supervisors.remove(name, CALL_TIMEOUT_S)
            raise
        urls = {member.url for member in members if member.url is not None}
        late = await self._until_gateways(lambda used: urls <= used)
        for member in members:
            yield f"{member.name}: ready at {member.url}"
        for name in late:
            yield f"{name} does not use them yet; `baton logs {name}` may give the reason"

    async def _until_ready(self, names: list[str]) -> list[FleetMember]:
        from baton.launch.ray.start import wait_until_ready  # noqa: PLC0415 - imports Ray

        return await wait_until_ready(
            self._supervisors,
            names,
            timeout_s=self._timeout_s,
            on_waiting=lambda _: None,
            ready_timeout_s=READY_TIMEOUT_S,
        )

    # Taking out

    async def _take_out(self, name: str) -> AsyncIterator[str]:
        yield f"{name}: draining"
        with suppress(FleetError):  # its host is away: no gateway can move its streams
            url = (await self._report(name)).url
            await self._call(name, "mark_draining")
            if url is not None:
                await self._until_gateways(lambda used: url not in used)
        yield await self._end(name)

    async def _end(self, name: str) -> str:
        """Drain and end one process, and have Ray forget it: what is to be reported."""
        try:
            ended = await self._call(name, "stop", timeout_s=self._stop_timeout_s(name))
        except FleetError as exc:
            ended = f"removed without draining: {exc}"
        await self._supervisors.remove(name, CALL_TIMEOUT_S)
        return f"{name}: {ended}"

    async def _succeed(self, name: str) -> AsyncIterator[str]:
        group, names = self._group_of(role_of(name)), await self._list_names()
        labels = (await self._report(name)).labels
        near = path_of(labels) if group.assignments and "host" in labels else None
        is_drained = False
        try:
            async for line in self._add(group, 1, names, near):
                yield line
        except UnplacedError as exc:  # what does not start ends the upgrade: nothing is lost by it
            if await self._list_ready(group.role, names) == [name]:
                raise FleetError(
                    f"the upgrade ends here, and {name} serves as before: there is no room for its "
                    f"successor, and no other worker serves in its role. {exc}"
                ) from exc
            yield f"{name}: no room for its successor beside it; draining it first"
            async for line in self._take_out(name):
                yield line
            is_drained = True
            async for line in self._add(group, 1, names, near):
                yield line
        except FleetError as exc:
            raise FleetError(
                f"the upgrade ends here, and {name} serves as before: its successor did not start. "
                f"{exc}. Where the two cannot run at once (a port of their own, memory), replace "
                f"it by `baton drain {name}` and `baton scale`, and upgrade the others again"
            ) from exc
        if not is_drained:
            async for line in self._take_out(name):
                yield line

    # Asking

    async def _list_names(self) -> frozenset[str]:
        return await self._supervisors.list_names(CALL_TIMEOUT_S)

    async def _call(self, name: str, method: str, timeout_s: float = CALL_TIMEOUT_S) -> object:
        return await self._supervisors.call(name, method, timeout_s=timeout_s)

    async def _report(self, name: str) -> FleetMember:
        try:
            return read_member(await self._call(name, "status"))
        except FleetError as exc:
            return FleetMember(
                name=name, role=role_of(name), state="starting", host="", reason=str(exc)
            )

    async def _lines(self, name: str, since: int) -> LogLines:
        answer = await self._supervisors.call(name, "lines", since, timeout_s=CALL_TIMEOUT_S)
        try:
            return msgspec.json.decode(answer if isinstance(answer, bytes) else b"", type=LogLines)
        except UNDECODABLE as exc:
            raise FleetError(f"{name} sends lines that cannot be read: {exc}") from exc

    async def _until_gateways(self, is_so: _IsSo) -> list[str]:
        """Until it is so of what each gateway uses: the gateways of which it is not, in time."""
        gateways = _of_role("gateway", await self._list_names())
        waits = [asyncio.create_task(self._until_gateway(name, is_so)) for name in gateways]
        _, late = await asyncio.wait(waits, timeout=GATEWAYS_TIMEOUT_S) if waits else ((), ())
        for wait in late:
            wait.cancel()
        return [name for name, wait in zip(gateways, waits, strict=True) if wait in late]

    async def _until_gateway(self, gateway: str, is_so: _IsSo) -> None:
        while True:
            with suppress(FleetError, msgspec.MsgspecError):
                answer = await self._call(gateway, "list_used")
                used = msgspec.json.decode(answer if isinstance(answer, bytes) else b"", type=URLS)
                if is_so(used):
                    return
            await asyncio.sleep(FOLLOW_INTERVAL_S / 2)

    def _group_of(self, role: MemberRole) -> ProcessGroup:
        group = self._plan.group_of(role)
        if group is None:
            known = ", ".join(group.role for group in self._plan.groups if group.role != "gateway")
            raise FleetError(f"this fleet has no workers of the role {role}: it has {known}")
        return group

    def _stop_timeout_s(self, name: str) -> float:
        return self._plan.drain_s(role_of(name)) + STOP_MARGIN_S


def _of_role(role: MemberRole, names: Collection[str]) -> list[str]:
    """Those of one role, the oldest first."""
    return sorted((name for name in names if role_of(name) == role), key=number_of)


def _order(name: str) -> tuple[int, int]:
    """Gateways, prefill, decode, both; by their numbers."""
    return list(NAMES).index(role_of(name)), number_of(name)


async def find_plan(supervisors: FleetActors, fleet: str) -> RayPlan:
    """The plan of a fleet that runs, from any of its supervisors.

    Raises:
        FleetError: it does not run, or no supervisor answers.
    """
    names = await supervisors.list_names(CALL_TIMEOUT_S)
    if not names:
        running = await supervisors.list_fleets(CALL_TIMEOUT_S)
        raise FleetError(
            f"no fleet {fleet!r} runs on this Ray; running: {', '.join(running) or 'none'}. Start "
            f"it with `baton up --on ray --fleet {fleet}`"
        )
    calls = (supervisors.call(name, "plan", timeout_s=CALL_TIMEOUT_S) for name in names)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, bytes):
            return read_plan(answer)
    raise FleetError(f"no supervisor of the fleet {fleet!r} answers: {answers[0]}")


class RayBackend:
    """The backend `ray` of `baton status`, `baton scale` and the others."""

    @asynccontextmanager
    async def connect(self, fleet: str) -> AsyncGenerator[FleetControl]:
        """A running fleet, for as long as the block runs.

        Raises:
            ConfigError: Ray is not installed, too old, or would be used without a token.
            FleetError: Ray cannot be reached, or has no such fleet.
        """
        environment = read_environment()
        section = resolve(CommandLine(), environment).to_config().ray
        check_ray(environment, insecure=section.insecure)
        from baton.launch.ray.actors import FleetActors  # noqa: PLC0415 - imports Ray

        connect_s = min(CONNECT_TIMEOUT_S, section.timeout_s)
        with connected(find_address(section.address, environment), fleet, connect_s):
            supervisors = FleetActors(fleet)
            plan = await find_plan(supervisors, fleet)
            yield RayFleet(supervisors, plan, section.timeout_s)


BACKEND: Final = RayBackend()
