"""From a seed to a schedule. Small ones are likely: they are fast, and show more when they fail."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from baton.kv.copies import count_blocks
from baton.sim.handoff.memory import VOCABULARY
from baton.sim.handoff.plan import (
    GATEWAY,
    BreakTransport,
    Client,
    CorruptEntries,
    CorruptTransfers,
    Crash,
    CutConnections,
    DropRequest,
    DuplicateRequest,
    FailTransfers,
    Partition,
    Pause,
    ReplayMessages,
    Schedule,
    Slow,
    StorePlan,
    WorkerPlan,
)
from baton.sim.handoff.transport import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.auth.ticket import HandoffMode
    from baton.sim.handoff.plan import Fault, Host

REFERENCE_PROBABILITY: Final = 0.2
"""Of all schedules."""
PREFIX_PROBABILITY: Final = 0.5
"""Of those in which a prompt is pushed."""
_LEAVING_S: Final = 0.04
POOL_PROBABILITY: Final = 0.15
"""Of the others."""
MEMORY_PRESSURE_PROBABILITY: Final = 0.2
"""Of those."""
EXPORTING_KIND: Final = "sim-shared"
_EXPORT_MODE_MIXES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("reference",),
    ("reference",),
    ("reference", "push"),
    ("reference", "pull", "push"),
)
_POOL_MODE_MIXES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("pool",),
    ("pool",),
    ("pool", "push"),
    ("pool", "pull"),
)


def add_reference_mode(rng: Random, schedule: Schedule) -> Schedule:
    """The same schedule; of some, with workers that export, and requests in that mode."""
    if rng.random() >= REFERENCE_PROBABILITY:
        return schedule
    modes, kinds = rng.choice(_EXPORT_MODE_MIXES), schedule.kinds
    if EXPORTING_KIND not in kinds:
        kinds = (EXPORTING_KIND, *kinds[1:])
    size = rng.choice((2, 4, 4, 8))
    schedule = (
        _add_memory_pressure(rng, schedule)
        if rng.random() < MEMORY_PRESSURE_PROBABILITY
        else schedule
    )
    return replace(
        schedule,
        workers=tuple(_make_exportable(rng, worker, size) for worker in schedule.workers),
        kinds=kinds,
        clients=tuple(_ask(rng, client, modes) for client in schedule.clients),
    )


def add_pool_mode(rng: Random, schedule: Schedule) -> Schedule:
    """The same schedule; of some, with a store, and requests that are to go through it."""
    if rng.random() >= POOL_PROBABILITY or schedule.shares_blocks:
        return schedule
    modes = rng.choice(_POOL_MODE_MIXES)
    entry_faults = [
        CorruptEntries(rng.choice(schedule.clients).arrives_s + 0.02 * rng.random(), (how,) * count)
        for how in ("refuse", "lose", "flip", "cut", "swap")
        for count in (rng.choice((1, 1, 3)),)
        if rng.random() < 0.2  # noqa: PLR2004
    ]
    return replace(
        schedule,
        clients=_pool(rng, schedule.clients, modes),
        faults=tuple(sorted((*schedule.faults, *entry_faults), key=lambda fault: fault.at_s)),
        store=StorePlan(rng.choice((2, 4, 4, 8, 16)), rng.choice((1500, 4000, 100_000))),
    )


def _pool(
    rng: Random, clients: tuple[Client, ...], modes: tuple[HandoffMode, ...]
) -> tuple[Client, ...]:
    """Many prompts differ in their last token alone; many clients leave soon."""
    first = clients[0].prompt
    are_alike = rng.random() < 0.3  # noqa: PLR2004
    return tuple(
        replace(
            each,
            mode=rng.choice(modes),
            prompt=(*first[:-1], rng.randrange(VOCABULARY)) if are_alike else each.prompt,
            leaves_after_s=_LEAVING_S * rng.random()
            if rng.random() < 0.15  # noqa: PLR2004
            else each.leaves_after_s,
        )
        for each in clients
    )


def _add_memory_pressure(rng: Random, schedule: Schedule) -> Schedule:
    """Prefill is short of blocks, having exported many: more clients, and slower answers."""
    last = schedule.clients[-1]
    more = tuple(
        replace(
            last,
            arrives_s=last.arrives_s + 0.05 * rng.random(),
            prompt=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(16, 24))),
        )
        for _ in range(rng.choice((2, 3)))
    )
    slow = Slow(last.arrives_s, schedule.workers[-1].name, 2.0, rng.choice((10.0, 20.0)))
    faults = sorted((*schedule.faults, slow), key=lambda fault: fault.at_s)
    return replace(schedule, clients=(*schedule.clients, *more), faults=tuple(faults))


def _make_exportable(rng: Random, worker: WorkerPlan, block_size: int) -> WorkerPlan:
    """As a rule its pages can be exported: of the same size, not staged, more than one prompt's."""
    if rng.random() < 0.1:  # noqa: PLR2004
        return worker
    num_tokens = worker.num_blocks * worker.block_size
    factor = rng.choice((1, 2, 2)) if worker.is_prefill else 1
    num_blocks = factor * num_tokens // block_size
    return replace(worker, block_size=block_size, num_blocks=num_blocks, staging_pool=None)


def _ask(rng: Random, client: Client, modes: tuple[HandoffMode, ...]) -> Client:
    """Answers long enough for something to befall them."""
    num_output = rng.choice((client.num_output, 6, 8))
    return replace(client, mode=rng.choice(modes), num_output=num_output)


MAX_PROMPT: Final = 24
MAX_OUTPUT: Final = 8
_VOCABULARY: Final = 1000
_FIRST_S: Final = 0.06
_BUSY_S: Final = 0.02
"""Within these, most requests are answered, and handed over, if nothing befalls them."""
_LEASES_S: Final = (0.7, 0.7, 1.0, 2.0, 10.0)
"""Three renewals of the shortest still fit between what the simulation calls now and then."""
_PAUSED_READER_PROBABILITY: Final = 0.15
_OVERLOAD_PROBABILITY: Final = 0.03
_MODE_MIXES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("push",),
    ("pull",),
    ("pull",),
    ("push", "pull"),
)


def generate_schedule(seed: int) -> Schedule:
    """The schedule of a seed: always the same."""
    rng = Random(seed)  # noqa: S311 -- a seed's, not a secret
    sizes = (4, 4) if rng.random() < 0.6 else (rng.choice((2, 4, 8)), 4)  # noqa: PLR2004
    counts = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    names = [f"p{n}" for n in range(counts[0])], [f"d{n}" for n in range(counts[1])]
    is_staged = tuple(rng.random() < 0.3 for _ in range(2))  # noqa: PLR2004
    workers = tuple(
        _generate_worker(rng, name, size, is_staged=staged)
        for side, size, staged in zip(names, sizes, is_staged, strict=True)
        for name in side
    )
    kinds = rng.sample(sorted(KINDS), rng.choice((1, 2, 2, 3)))
    clients = _generate_modes(Random(f"modes {seed}"), _generate_clients(rng))  # noqa: S311 -- as above
    hosts = [worker.name for worker in workers]
    num_faults = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    times = [_generate_time(rng, clients) for _ in range(num_faults)]
    faults = [_generate_fault(rng, hosts, kinds, at_s) for at_s in times]
    faults += _generate_paused_reader(Random(f"sleeper {seed}"), clients)  # noqa: S311 -- as above
    schedule = Schedule(
        seed=seed,
        workers=workers,
        kinds=tuple(kinds),
        op=rng.choice(("WRITE", "READ")),
        clients=clients,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        lease_s=Random(f"lease {seed}").choice(_LEASES_S),  # noqa: S311 -- as above
    )
    schedule = add_reference_mode(Random(f"lending {seed}"), schedule)  # noqa: S311 -- as above
    schedule = add_pool_mode(Random(f"pooling {seed}"), schedule)  # noqa: S311 -- as above
    schedule = _add_prefixes(Random(f"prefixes {seed}"), schedule)  # noqa: S311 -- as above
    overload_rng = Random(f"crowd {seed}")  # noqa: S311 -- as above
    return (
        _overload(overload_rng, schedule)
        if overload_rng.random() < _OVERLOAD_PROBABILITY
        else schedule
    )


def _add_prefixes(rng: Random, schedule: Schedule) -> Schedule:
    """The same schedule; in some, of prompts that are pushed a beginning is handed over alone.

    As a rule prefill is slow: else all layers are computed before the first one is asked for.
    """
    is_pushed = any(client.mode == "push" for client in schedule.clients)
    if not is_pushed or rng.random() >= PREFIX_PROBABILITY:
        return schedule
    size, faults = schedule.workers[-1].block_size, schedule.faults
    if rng.random() < 0.7:  # noqa: PLR2004
        slow = Slow(0.0, schedule.workers[0].name, 1.0, rng.choice((5.0, 10.0, 30.0)))
        faults = (slow, *faults)
    clients = tuple(_cut(rng, client, size) for client in schedule.clients)
    return replace(schedule, clients=clients, faults=faults)


def _cut(rng: Random, client: Client, block_size: int) -> Client:
    """As a rule whole blocks, so that the rest can be computed while they land."""
    num_tokens = len(client.prompt)
    if client.mode != "push" or rng.random() < 0.2:  # noqa: PLR2004
        return client
    num_prefix = rng.randint(1, num_tokens + 1)
    if rng.random() < 0.8 and num_tokens > block_size:  # noqa: PLR2004
        num_prefix = block_size * rng.randint(1, (num_tokens - 1) // block_size)
    return replace(client, num_prefix_tokens=num_prefix)


def _overload(rng: Random, schedule: Schedule) -> Schedule:
    """Many are to be pulled by one slow worker with little room: they wait for several leases.

    No worker is struck, and no client leaves.
    """
    first, *_, last = schedule.workers
    prompts = [[rng.randrange(_VOCABULARY) for _ in range(MAX_PROMPT)] for _ in range(6)]
    size = last.block_size
    return replace(
        schedule,
        workers=(
            replace(first, num_blocks=2 * len(prompts) * first.num_blocks),
            replace(last, num_blocks=count_blocks(MAX_PROMPT + MAX_OUTPUT, size)),
        ),
        clients=tuple(
            Client(0.03 * rng.random(), tuple(prompt), MAX_OUTPUT, None, "pull")
            for prompt in prompts
        ),
        faults=(Slow(0.0, last.name, 6.0, rng.uniform(10.0, 20.0)),),
        lease_s=min(_LEASES_S),
    )


def _generate_paused_reader(rng: Random, clients: tuple[Client, ...]) -> list[Fault]:
    """A decode worker that oversleeps a lease while it reads, and is not notified of its end."""
    if rng.random() > _PAUSED_READER_PROBABILITY or not any(
        client.mode == "pull" for client in clients
    ):
        return []
    at_s = rng.choice(clients).arrives_s + _BUSY_S * rng.random()
    return [
        Partition(at_s, "p0", "d0", 2.0, both_ways=False),
        Pause(at_s, "d0", 0.95, replaced=False),
    ]


def _generate_modes(rng: Random, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """All requests of many schedules in one mode, which shows more when it fails."""
    modes = rng.choice(_MODE_MIXES)
    return tuple(replace(client, mode=rng.choice(modes)) for client in clients)


def _generate_worker(rng: Random, name: Host, block_size: int, *, is_staged: bool) -> WorkerPlan:
    most = count_blocks(MAX_PROMPT + MAX_OUTPUT, block_size)  # blocks of the largest request
    worker = WorkerPlan(
        name=name,
        block_size=block_size,
        num_blocks=rng.choice((most, most + 2, 2 * most, 4 * most)),
        staging_pool=rng.choice((most, 2 * most)) if is_staged else None,
        offset_s=rng.uniform(0, 10_000),
        rate=rng.choice((1.0, 1.0, rng.uniform(0.98, 1.02))),
        unix_skew_s=rng.choice((0.0, 0.0, rng.uniform(-3600.0, 3600.0))),
    )
    # Not drawn: that would change all schedules that were known before.
    return replace(worker, copies_late=is_staged and worker.offset_s % 2 < 1)


def _generate_clients(rng: Random) -> tuple[Client, ...]:
    shared = tuple(rng.randrange(_VOCABULARY) for _ in range(8))
    clients: list[Client] = []
    at_s = 0.0
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        at_s += rng.choice((0.0, 0.003, 0.03)) * rng.random()
        length = rng.randint(1, MAX_PROMPT)
        own = tuple(rng.randrange(_VOCABULARY) for _ in range(length))
        similarity = rng.random()
        prompt = (shared + own)[:length] if similarity < 0.4 else own  # noqa: PLR2004
        if clients and similarity > 0.8:  # noqa: PLR2004
            prompt = clients[-1].prompt
        leaves = rng.random() < 0.15  # noqa: PLR2004
        clients.append(
            Client(
                arrives_s=at_s,
                prompt=prompt,
                num_output=rng.randint(1, 4),
                leaves_after_s=_FIRST_S * rng.random() if leaves else None,
            )
        )
    return tuple(clients)


def _generate_time(rng: Random, clients: tuple[Client, ...]) -> float:
    """As a rule while a request is handed over."""
    if rng.random() < 0.2:  # noqa: PLR2004
        return (clients[-1].arrives_s + _FIRST_S) * rng.random()
    return rng.choice(clients).arrives_s + _BUSY_S * rng.random()


def _generate_fault(rng: Random, hosts: list[Host], kinds: list[str], at_s: float) -> Fault:
    worker = rng.choice(hosts)
    peers = [host for host in hosts if host[0] != worker[0]]
    another = rng.choice([*peers, *peers, GATEWAY])
    long_s = rng.choice((0.01, 0.1, 1.2, 4.0)) * (0.5 + rng.random())
    is_rare = rng.random() < 0.3  # noqa: PLR2004
    back_s = None if is_rare else 0.3 * rng.random()
    makers: tuple[Callable[[], Fault], ...] = (
        lambda: Crash(at_s, worker, is_rare, back_s),
        lambda: Pause(at_s, worker, long_s, is_rare),
        lambda: Slow(at_s, worker, long_s, rng.choice((3.0, 10.0, 40.0))),
        lambda: CutConnections(
            at_s, worker, rng.choice(peers), is_rare, rng.choice((0, 3, 40, 300))
        ),
        lambda: Partition(at_s, worker, another, long_s, is_rare),
        lambda: CorruptTransfers(
            at_s,
            tuple(
                rng.choice(("flip", "zero", "swap", "truncate", "repeat"))
                for _ in range(rng.choice((1, 1, 2, 6)))
            ),
        ),
        lambda: BreakTransport(at_s, worker, rng.choice(kinds), long_s),
        lambda: FailTransfers(at_s, rng.choice(kinds), rng.choice((1, 1, 2, 5))),
        lambda: DropRequest(at_s, worker, rng.choice(("request", "reply"))),
        lambda: DuplicateRequest(at_s, worker),
        lambda: ReplayMessages(at_s, worker, rng.choice((1, 3, 10))),
    )
    return rng.choice(makers)()
