"""What is done to a request's processes and connections, and the proof that it was done.

An `Injection` strikes while a request is under way (`Case`), and says what proves that it did; the
proof is asserted where it is made, so that no fault is a silent no-op. `settle` brings the case to
its end: it continues what is stopped and starts again what is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from tests.chaos.clients import Streaming
from tests.chaos.conftest import LIVENESS_TIMEOUT_S, freeze, port_of
from tests.chaos.connections import find_links, find_unix_connections, reset_link, shut_unix
from tests.chaos.process_state import TIMEOUT_S, is_stopped, until

if TYPE_CHECKING:
    import aiohttp

    from baton.testing.fleet import FleetProcess
    from tests.chaos.clients import ClientRequest, Reply
    from tests.chaos.conftest import ChaosCluster, Pair
    from tests.chaos.store_failpoints import StorePoint

Victim: TypeAlias = Literal["prefill", "decode", "gateway"]

END_S = 60.0
"""No request takes longer, on however busy a machine."""
STOPPED_S = LIVENESS_TIMEOUT_S + 0.7
"""How long a stopped process stays so: the others have noticed."""


@dataclass
class Case:
    """One request under way, and everything around it.

    What keeps it at its stage: decode is stopped, or a worker is held where it uses the store.
    """

    cluster: ChaosCluster
    session: aiohttp.ClientSession
    pair: Pair
    request: ClientRequest
    streaming: Streaming = field(default_factory=Streaming)
    asking: asyncio.Task[Reply] = field(init=False)
    keeps_decode_stopped: bool = False
    held_at: StorePoint | None = None

    def process(self, victim: Victim) -> FleetProcess:
        processes = {
            "prefill": self.pair.prefill,
            "decode": self.pair.decode,
            "gateway": self.pair.gateway,
        }
        return processes[victim]

    def release(self) -> None:
        """What kept the request where it is ends."""
        self.resume_store()
        self.resume_decode()

    def resume_decode(self) -> None:
        """Decode goes on, if it was stopped to keep the request from it."""
        if self.keeps_decode_stopped:
            self.pair.decode.send(signal.SIGCONT)
            self.keeps_decode_stopped = False

    def resume_store(self) -> None:
        """Whoever is held at the store goes on (if it is not stopped)."""
        if self.held_at is not None:
            self.held_at.release()
            self.held_at = None


class Injection(Protocol):
    """One kind of fault."""

    async def inject(self, case: Case) -> str:
        """Do it, and prove it; what proves it."""
        ...

    async def settle(self, case: Case) -> None:
        """Let the request end, then undo what was done: the pair is whole again."""
        ...


async def leave(asking: asyncio.Task[Reply]) -> None:
    asking.cancel()
    with contextlib.suppress(BaseException):
        await asking


async def _end(case: Case) -> None:
    await asyncio.wait([case.asking], timeout=END_S)
    assert case.asking.done(), "the request hangs"


async def _revive(case: Case, victim: Victim) -> None:
    pair = case.pair
    if victim == "gateway":
        await asyncio.to_thread(pair.start_gateway, port_of(pair.gateway.url))
    else:
        await asyncio.to_thread(pair.restart, victim)


@dataclass(frozen=True)
class Kill:
    """SIGKILL; the process comes back at its address when the request is over."""

    victim: Victim

    async def inject(self, case: Case) -> str:
        process = case.process(self.victim)
        process.kill()
        assert process.popen.returncode == -signal.SIGKILL
        return f"{process.name} ended by SIGKILL"

    async def settle(self, case: Case) -> None:
        case.release()
        await _end(case)
        await _revive(case, self.victim)


@dataclass(frozen=True)
class Restart:
    """SIGKILL, and another life at the same addresses while the request is under way."""

    victim: Victim

    async def inject(self, case: Case) -> str:
        process = case.process(self.victim)
        before = process.ready
        process.kill()
        if self.victim == "gateway":
            case.resume_decode()  # a gateway is not ready before it has seen a decode worker
        await _revive(case, self.victim)
        after = case.process(self.victim).ready
        assert before is not None
        assert after is not None
        assert after.url == before.url
        if self.victim != "gateway":
            assert after.handoff_address == before.handoff_address
            assert after.epoch != before.epoch
        return f"{process.name} lives again at {after.url}, {before.epoch} -> {after.epoch}"

    async def settle(self, case: Case) -> None:
        case.release()
        await _end(case)


@dataclass(frozen=True)
class Pause:
    """SIGSTOP until everybody has noticed, then SIGCONT."""

    victim: Victim

    async def inject(self, case: Case) -> str:
        process = case.process(self.victim)
        await freeze(process)
        return f"the kernel says that {process.name} is stopped"

    async def settle(self, case: Case) -> None:
        process = case.process(self.victim)
        case.resume_store()
        if self.victim != "decode":
            case.release()
        await asyncio.sleep(STOPPED_S)
        assert is_stopped(process), "it was stopped all the time"
        process.send(signal.SIGCONT)
        await _end(case)


@dataclass(frozen=True)
class OutliveDecode:
    """Prefill is stopped, decode dies and begins anew at its address; then prefill writes on.

    What it writes is for a life that is over.
    """

    victim: Victim = "prefill"

    async def inject(self, case: Case) -> str:
        writer, old = case.pair.prefill, case.pair.decode.ready
        await freeze(writer)
        case.pair.decode.kill()
        await _revive(case, "decode")
        new = case.pair.decode.ready
        assert old is not None
        assert new is not None
        assert new.handoff_address == old.handoff_address
        assert new.epoch != old.epoch
        assert is_stopped(writer)
        return f"{writer.name} was stopped while decode went from {old.epoch} to {new.epoch}"

    async def settle(self, case: Case) -> None:
        case.pair.prefill.send(signal.SIGCONT)
        await _end(case)


@dataclass(frozen=True)
class Leave:
    """The client closes its connection."""

    async def inject(self, case: Case) -> str:
        assert not case.asking.done()
        await leave(case.asking)
        assert case.asking.cancelled()

        async def noticed() -> bool:
            url = f"{case.pair.gateway.url}/debug/requests/{case.request.id}"
            async with case.session.get(url) as response:
                if response.status != 200:
                    return False
                leg = (await response.json())["gateway"]
                return "client left" in str(leg["outcome"])

        await until("the gateway knows that the client left", noticed, TIMEOUT_S)
        return "the gateway recorded that its client left"

    async def settle(self, case: Case) -> None:
        case.release()


@dataclass(frozen=True)
class CutLink:
    """The two agents' connection is reset, as by a middlebox: both processes live."""

    async def inject(self, case: Case) -> str:
        pair = case.pair
        assert pair.prefill.ready is not None
        port = port_of(pair.prefill.ready.handoff_address)
        links = find_links(pair.prefill.pid, port)
        assert links, "there is a link"
        inodes = {reset_link(pair.prefill.pid, link) for link in links}
        left = {link.inode for link in find_links(pair.prefill.pid, port)}
        assert not inodes & left, "a link that was cut is still established"
        return f"{len(links)} established connections to port {port} are no more"

    async def settle(self, case: Case) -> None:
        case.release()
        await _end(case)


@dataclass(frozen=True)
class CutData:
    """The connections over which KV goes are cut (of `shared`: its control connection)."""

    async def inject(self, case: Case) -> str:
        pair = case.pair
        assert pair.decode.ready is not None
        if pair.transport == "shared":
            connections = find_unix_connections(pair.decode.pid)
            assert connections
            for fd in connections:
                shut_unix(pair.decode.pid, fd)
            return f"{len(connections)} Unix connections were shut down"
        endpoints = {port_of(pair.decode.url), port_of(pair.decode.ready.handoff_address)}
        links = [
            link for link in find_links(pair.decode.pid, None) if link.local_port not in endpoints
        ]
        listening = {link.local_port for link in links}
        inodes = {reset_link(pair.decode.pid, link) for link in links}
        assert inodes, f"KV goes over TCP: {listening}"
        left = {link.inode for link in find_links(pair.decode.pid, None)}
        assert not inodes & left
        return f"{len(inodes)} established connections to {listening} are no more"

    async def settle(self, case: Case) -> None:
        case.release()
        await _end(case)
