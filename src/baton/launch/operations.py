"""What an operator may change in a launch that serves: how many workers, and which code they run.

scale up    start ─► ready ─► in the members file ─► each gateway uses it
scale down  draining in the members file ─► no gateway uses it ─► SIGTERM ─► out of the file
upgrade     for each worker both, the new one first where there is room; then the gateway
"""

from __future__ import annotations

import asyncio
import platform
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from baton import __version__
from baton.errors import BatonError
from baton.launch.child import Child, ChildExited, describe_exit
from baton.launch.errors import FleetError
from baton.launch.fleet import COUNTED, FleetSize, FleetStatus
from baton.launch.gateways import count_requests, until_unused, until_used
from baton.launch.plan import LOOPBACK, WorkerPlan, another_worker, count_peer_ports
from baton.launch.ports import find_free_ports
from baton.launch.resources import has_room_for_another
from baton.launch.slots import GATEWAY, ChildFailedError, ProcessSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.config.sections import Role
    from baton.launch.supervisor import Supervisor

READY_TIMEOUT_S: Final = 900.0
"""For a worker: large models are loaded, and compiled for the machine."""
GATEWAY_READY_TIMEOUT_S: Final = 60.0
USED_TIMEOUT_S: Final = 30.0
UNUSED_TIMEOUT_S: Final = 10.0
OLD_GATEWAY: Final = "gateway-old"
FLAGS: Final[Mapping[Role, str]] = {
    "prefill": "--prefill",
    "decode": "--decode",
    "both": "--workers",
}
NOUNS: Final[Mapping[Role, str]] = {
    "prefill": "prefill",
    "decode": "decode",
    "both": "for both parts",
}


def decide_size(counts: Mapping[Role, int], size: FleetSize) -> dict[Role, int]:
    """How many workers of each role there are to be; `counts` has every role of the fleet.

    Raises:
        FleetError: the fleet has no such role, or could not answer any more.
    """
    asked: dict[Role, int | None] = {
        "prefill": size.prefill,
        "decode": size.decode,
        "both": size.both,
    }
    wanted = {role: count for role, count in asked.items() if count is not None}
    known = " and ".join(FLAGS[role] for role in counts)
    if not wanted:
        raise FleetError(f"how many workers are wanted? This fleet takes {known}")
    for role in wanted:
        if role not in counts:
            raise FleetError(
                f"{FLAGS[role]} does not fit this fleet, whose workers were started in other "
                f"roles: it takes {known}"
            )
    decided = {**counts, **wanted}
    if decided.get("decode", 0) + decided.get("both", 0) == 0:
        raise FleetError(
            "no worker would be left that generates answers: keep at least one, or end the fleet "
            "with `baton down`"
        )
    return decided


class FleetOperations:
    """Changes one launch, with `report` for each step. Owned by the launcher's event loop."""

    def __init__(self, fleet: str, supervisor: Supervisor) -> None:
        self._fleet, self._supervisor = fleet, supervisor
        self._like: dict[Role, list[WorkerPlan]] = {}
        for worker in supervisor.plan.workers:
            self._like.setdefault(worker.role, []).append(worker)
        self._num_named = Counter({role: len(plans) for role, plans in self._like.items()})

    def status(self) -> FleetStatus:
        """All processes and their states."""
        now, host = self._supervisor.context.clock.now(), platform.node()
        return FleetStatus(
            fleet=self._fleet,
            backend="local",
            version=__version__,
            members=tuple(s.describe(now, host) for s in self._supervisor.slots.values()),
        )

    async def scale(self, size: FleetSize, report: Callable[[str], None]) -> None:
        """Start or drain workers until each role that `size` names has so many.

        Raises:
            FleetError: refused, or a worker did not start; those that did serve.
        """
        self._require_members_file()
        counts = {role: len(self._counted(role)) for role in self._like}
        decided = decide_size(counts, size)
        roles = [role for role in decided if getattr(size, role) is not None]
        plans = [
            self._next_plan(role) for role in roles for _ in range(decided[role] - counts[role])
        ]
        await self._grow(plans, report)
        surplus = [  # with failed ones that serve again meanwhile
            slot
            for role in roles
            for slot in await self._find_idle(role, len(self._counted(role)) - decided[role])
        ]
        failed = [each for role in roles for each in self._workers(role) if each.has_failed]
        await self._retire([*surplus, *failed], report)
        found = [f"{len(self._counted(role))} {NOUNS[role]}" for role in self._like]
        report(f"serving: {', '.join(found)}")

    async def drain(self, name: str, report: Callable[[str], None]) -> None:
        """Take one worker out.

        Raises:
            FleetError: there is no such worker, or it is the last one that generates answers.
        """
        self._require_members_file()
        slot = self._find(name)
        self._require_another(slot, "start another one first, with `baton scale`")
        await self._retire([slot], report)

    async def upgrade(self, report: Callable[[str], None]) -> None:
        """Replace each process by one with the installed code and the present configuration.

        Raises:
            FleetError: a new process did not start; those that were not replaced serve on.
        """
        self._require_members_file()
        for slot in [slot for role in self._like for slot in self._workers(role)]:
            if slot.is_leaving:  # its machine has been taken meanwhile, or will be
                continue
            try:
                await self._upgrade_worker(slot, report)
            except BatonError as exc:
                raise FleetError(f"the upgrade stopped at {slot.name}: {exc}") from exc
        await self._replace_gateway(report)
        report("every process runs the installed code and the present configuration")

    # Within

    def _require_members_file(self) -> None:
        if self._supervisor.context.members is None:
            raise FleetError(
                "this launch's gateway has a fixed list of workers: end it with `baton down`, and "
                "start it again as it is wanted"
            )

    def _workers(self, role: Role) -> list[ProcessSlot]:
        """The workers of a role that are to stay, the oldest first."""
        slots = self._supervisor.slots.values()
        return [slot for slot in slots if slot.plan and slot.role == role and not slot.is_leaving]

    def _counted(self, role: Role) -> list[ProcessSlot]:
        """Those of them that serve or start, and so are counted."""
        return [slot for slot in self._workers(role) if slot.state in COUNTED]

    def _find(self, name: str) -> ProcessSlot:
        slot = self._supervisor.slots.get(name)
        if slot is not None and slot.plan is not None:
            return slot
        known = [each.name for each in self._supervisor.slots.values() if each.plan is not None]
        raise FleetError(f"there is no worker {name!r}; there are {', '.join(known)}")

    def _require_another(self, slot: ProcessSlot, remedy: str) -> None:
        """Refuse to take out the last worker that generates answers.

        Another one must be ready; for one that is not ready itself one that starts will do.
        """
        if slot.role == "prefill":  # decode workers compute prompts, too
            return
        generating = [*self._workers("decode"), *self._workers("both")]
        needed = {"ready"} if slot.state == "ready" else COUNTED
        if all(each is slot or each.state not in needed for each in generating):
            raise FleetError(
                f"{slot.name} is the last worker that generates answers, as no other one is ready: "
                f"{remedy}"
            )

    def _next_plan(self, role: Role, like: WorkerPlan | None = None) -> WorkerPlan:
        config, index = self._supervisor.plan.config, self._num_named[role]
        port = None
        if count_peer_ports(config):
            (port,) = find_free_ports(LOOPBACK, 1)
        elif config.store.options.get("host", {}).get("listen") is not None:
            raise FleetError(
                "store.options.host.listen is one address, and a second worker would listen there: "
                "leave it out, and with tiers host and peer each worker gets its own"
            )
        self._num_named[role] += 1
        return another_worker(like or self._like[role][index % len(self._like[role])], index, port)

    async def _find_idle(self, role: Role, num_workers: int) -> list[ProcessSlot]:
        """So many workers of a role that may go.

        First those that do not serve, then those with the fewest requests; of these the newest.
        """
        if num_workers <= 0:
            return []
        busy = await count_requests(self._supervisor.metrics_urls)
        newest_first = reversed(self._counted(role))
        by_use = sorted(newest_first, key=lambda slot: (slot.state == "ready", busy[slot.name]))
        return by_use[:num_workers]

    async def _grow(self, plans: Sequence[WorkerPlan], report: Callable[[str], None]) -> None:
        """Start workers beside those that there are, all at once.

        Raises:
            FleetError: of the first one that does not serve; those that do stay.
        """
        slots: list[ProcessSlot] = []
        failures: list[BaseException] = []
        for plan in plans:
            report(f"{plan.name} starts")
            try:
                slots.append(await self._supervisor.add(plan))
            except FleetError as exc:
                failures.append(exc)
        brought_up = [self._bring_up(slot, report) for slot in slots]
        outcomes = await asyncio.gather(*brought_up, return_exceptions=True)
        failures += [each for each in outcomes if isinstance(each, BaseException)]
        if failures:
            raise failures[0]

    async def _bring_up(self, slot: ProcessSlot, report: Callable[[str], None]) -> None:
        """Wait until a worker that was started is used; else it is removed.

        Raises:
            FleetError: as of `_until_used`.
        """
        try:
            url = await self._until_used(slot)
        except Exception:  # if cancelled it stays: the launch ends, and drains all that it has
            await self._supervisor.remove(slot)
            raise
        self._supervisor.restart_when_ended(slot)
        report(f"{slot.name} serves at {url}")

    async def _until_used(self, slot: ProcessSlot) -> str:
        """Until a worker is ready, listed, and used: its URL.

        Raises:
            FleetError: it ended before that, takes too long, or cannot be listed.
        """
        supervisor = self._supervisor
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                ready = await slot.until_ready()
        except TimeoutError as exc:
            raise FleetError(
                f"{slot.name} was not ready after {READY_TIMEOUT_S:g} s, and was ended; "
                f"`baton logs {slot.name}` shows what it did"
            ) from exc
        except ChildFailedError as exc:
            raise FleetError(str(exc)) from exc
        slot.is_draining = False
        supervisor.publish_members()
        if not await until_used(supervisor.metrics_urls, ready.url, USED_TIMEOUT_S):
            raise FleetError(
                f"{slot.name} was ready, but the gateway did not use it after {USED_TIMEOUT_S:g} "
                "s, and it was ended; `baton logs gateway` gives the reason"
            )
        return ready.url

    async def _retire(self, slots: Sequence[ProcessSlot], report: Callable[[str], None]) -> None:
        """Take workers out, all at once: none gets a stream of another one that ends too."""
        await self._take_out(slots, report)

        async def end(slot: ProcessSlot) -> None:
            how = await self._supervisor.end(slot)
            await self._supervisor.remove(slot)
            report(f"{slot.name} ended ({how})")

        await asyncio.gather(*(end(slot) for slot in slots))

    async def _take_out(self, slots: Sequence[ProcessSlot], report: Callable[[str], None]) -> None:
        if not slots:
            return
        for slot in slots:
            slot.is_draining = True
        try:
            self._supervisor.publish_members()
        except FleetError:  # the gateways use them as before, and the next change may take them out
            for slot in slots:
                slot.is_draining = False
            raise
        for slot in slots:
            report(f"{slot.name} drains")
        for slot in slots:
            url = slot.url or ""
            if not await until_unused(self._supervisor.metrics_urls, url, UNUSED_TIMEOUT_S):
                report(f"a gateway lists {slot.name} still; it ends nevertheless")

    async def _upgrade_worker(self, slot: ProcessSlot, report: Callable[[str], None]) -> None:
        config = self._supervisor.plan.config
        has_own_address = "listen" in config.store.options.get("host", {})
        if (
            not count_peer_ports(config)
            and not has_own_address
            and slot.plan is not None
            and await asyncio.to_thread(has_room_for_another, slot.child.pid)
        ):
            await self._grow([self._next_plan(slot.plan.role, slot.plan)], report)
            await self._retire([slot], report)
            return
        self._require_another(
            slot,
            "there is no room for a second one beside it (memory, a device or an address), and "
            "requests would fail without it",
        )
        report(f"{slot.name}: there is no room for a second one beside it")
        await self._take_out([slot], report)
        await self._supervisor.end(slot)
        if slot.name not in self._supervisor.slots:  # its machine has been taken meanwhile
            return
        try:
            await self._supervisor.start_again(slot)
        except FleetError:
            await self._supervisor.remove(slot)
            raise
        await self._bring_up(slot, report)

    async def _replace_gateway(self, report: Callable[[str], None]) -> None:
        """Start another gateway on the same sockets, then drain the old one."""
        supervisor = self._supervisor
        slot = supervisor.slots[GATEWAY]
        report("another gateway starts on the same sockets")
        new = await supervisor.spawn_next(slot)
        try:
            await _until_gateway_ready(new)
            await slot.stop_restarting()
        except BaseException:
            new.kill()
            raise
        old = replace(slot, name=OLD_GATEWAY, is_draining=True)
        supervisor.slots[OLD_GATEWAY] = old
        slot.child, slot.started_at = new, supervisor.context.clock.now()
        supervisor.restart_when_ended(slot)
        report("the new gateway serves; the old one finishes what it has")
        how = await supervisor.end(old)
        del supervisor.slots[OLD_GATEWAY]
        report(f"the old gateway ended ({how})")


async def _until_gateway_ready(child: Child) -> None:
    try:
        async with asyncio.timeout(GATEWAY_READY_TIMEOUT_S):
            ready = await child.wait_until_ready()
    except TimeoutError as exc:
        raise FleetError(
            f"the new gateway was not ready after {GATEWAY_READY_TIMEOUT_S:g} s, and was ended; "
            "the old one serves on. `baton logs gateway` shows what it did"
        ) from exc
    if isinstance(ready, ChildExited):
        lines = "\n".join(f"    {line}" for line in child.last_lines)
        raise FleetError(
            f"the new gateway ended ({describe_exit(ready.returncode)}); the old one serves on. "
            f"Its last lines:\n{lines}"
        )
