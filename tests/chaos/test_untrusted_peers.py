"""Who does not belong: forged tickets straight to a worker, garbage at every port it listens on."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from baton.auth.credentials import Credentials
from baton.auth.key import ClusterKey
from baton.auth.ticket import Ticket, WorkerRef, seal
from baton.ids import Epoch, WorkerId, new_epoch, new_ticket_id
from tests.chaos.clients import ClientRequest, check_error
from tests.chaos.conftest import KEY, SEED, ChaosCluster, Pair, run_on_both
from tests.chaos.process_state import (
    read_abstract_names,
    read_footprint,
    read_listening_ports,
    until_footprint,
    until_idle,
)
from tests.tickets import issue

if TYPE_CHECKING:
    from collections.abc import Sequence

    import aiohttp

    from baton.testing.fleet import FleetProcess

Address: TypeAlias = tuple[str, int] | bytes

REFUSE_WITHIN_S = 20.0
"""A connection that has not proved itself within 2 s is closed (docs/wire/handoff.md)."""


async def read_ref(session: aiohttp.ClientSession, worker: FleetProcess) -> WorkerRef:
    async with session.get(f"{worker.url}/baton/v1/info") as response:
        info = await response.json()
    return WorkerRef(WorkerId(info["worker"]), Epoch(info["epoch"]), info["handoff_address"])


async def use(
    session: aiohttp.ClientSession, worker: FleetProcess, request: ClientRequest, sealed: str
) -> tuple[int, str | None]:
    """Ask a worker with a ticket: the status, and the error's code."""
    body = request.body | {"kv_transfer_params": {"baton_ticket": sealed}}
    async with session.post(f"{worker.url}/v1/completions", json=body) as response:
        answer = await response.json()
        return response.status, check_error(answer) if response.status != 200 else None


def test_tickets_that_are_not_good(cluster: ChaosCluster) -> None:
    async def scenario(session: aiohttp.ClientSession, pair: Pair) -> None:
        prefill, decode = (
            await read_ref(session, pair.prefill),
            await read_ref(session, pair.decode),
        )
        good = Ticket(
            id=new_ticket_id(),
            request_id="stranger",
            prefill=prefill,
            decode=decode,
            mode="push",
            issue=issue(60),
        )
        key, stranger = (
            Credentials.of(ClusterKey.from_hex(KEY)),
            Credentials.of(ClusterKey.from_hex("cd" * 32)),
        )
        sealed = seal(good, key)
        request = ClientRequest(cluster.prompts.make(100))
        damaged = sealed[:40] + ("A" if sealed[40] != "A" else "B") + sealed[41:]
        past_life = msgspec.structs.replace(decode, epoch=new_epoch())
        past = seal(msgspec.structs.replace(good, decode=past_life, prefill=past_life), key)
        for worker in (pair.prefill, pair.decode):
            for bad in (seal(good, stranger), damaged, "", "?", "A" * 5000):
                status, code = await use(session, worker, request, bad)
                assert status == 403, (bad[:20], code)
            assert await use(session, worker, request, past) == (409, "stale_ticket")
        await until_idle(session, pair.prefill, pair.decode, within_s=20.0)

        # The very same ticket, unharmed, is good once.
        sent, received = await asyncio.gather(
            use(session, pair.prefill, request, sealed), use(session, pair.decode, request, sealed)
        )
        assert (sent, received) == ((200, None), (200, None))
        for worker in (pair.prefill, pair.decode):
            status, _ = await use(session, worker, request, sealed)
            assert status == 409
        late = msgspec.structs.replace(
            good.issue, number=good.issue.number + 1, at=good.issue.at - 61
        )
        expired = seal(msgspec.structs.replace(good, id=new_ticket_id(), issue=late), key)
        for worker in (pair.prefill, pair.decode):
            assert await use(session, worker, request, expired) == (409, "stale_ticket")
        await until_idle(session, pair.prefill, pair.decode, within_s=20.0)

    run_on_both(cluster, scenario)


def make_garbage(rng: random.Random) -> Sequence[bytes]:
    return (
        b"",  # says nothing, for ever
        rng.randbytes(16),  # half a challenge
        rng.randbytes(16) + rng.randbytes(32),  # the challenge, with a wrong proof
        rng.randbytes(64 * 1024),
        b"\xff" * 4096,  # frames of four gigabytes
        b"GET / HTTP/1.1\r\nhost: baton\r\n\r\n",
    )


def send_garbage(family: socket.AddressFamily, address: Address, garbage: bytes) -> None:
    """Connect and send garbage; returns when the other side has closed the connection."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(REFUSE_WITHIN_S)
        sock.connect(address)
        try:
            sock.sendall(garbage)
            answered = 0
            while data := sock.recv(65_536):
                answered += len(data)
        except (ConnectionResetError, BrokenPipeError):
            return
        assert answered <= 48, "more than a challenge was said to a stranger"


def test_garbage_at_every_port(cluster: ChaosCluster) -> None:
    rng = random.Random(SEED)

    async def scenario(session: aiohttp.ClientSession, pair: Pair) -> None:
        await cluster.check_handoff(session, pair)
        pids = {worker: worker.pid for worker in (pair.prefill, pair.decode)}
        before = {worker: read_footprint(worker) for worker in pids}
        endpoints: list[tuple[socket.AddressFamily, Address]] = []
        for worker in pids:
            http_port = int(worker.url.rpartition(":")[2])
            ports = read_listening_ports(worker.pid) - {http_port}
            names = read_abstract_names(worker.pid)
            assert len(ports) == (1 if pair.transport == "shared" else 2)
            assert len(names) == (1 if pair.transport == "shared" else 0)
            endpoints += [(socket.AF_INET, ("127.0.0.1", port)) for port in sorted(ports)]
            endpoints += [(socket.AF_UNIX, b"\0" + os.fsencode(name)) for name in names]
        attacks = [(*endpoint, garbage) for endpoint in endpoints for garbage in make_garbage(rng)]
        with ThreadPoolExecutor(len(attacks)) as crowd:
            garbage_task = [crowd.submit(send_garbage, *attack) for attack in attacks]
            for _ in range(3):  # others do not notice
                await cluster.check_handoff(session, pair)
            for attack in garbage_task:
                await asyncio.wrap_future(attack)
        for worker in pids:
            assert worker.is_alive
            await until_footprint(worker, before[worker], within_s=20.0)
        await until_idle(session, *pids, within_s=20.0)

    run_on_both(cluster, scenario)
