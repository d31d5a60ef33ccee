"""From a seed to a schedule. Small ones are likely: they are fast, and say more when they fail."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from baton.sim.handoff.drawing_modes import draw_lending, draw_pooling
from baton.sim.handoff.plan import (
    GATEWAY,
    Break,
    Client,
    Crash,
    Cut,
    FailTransfers,
    LoseCall,
    Part,
    Pause,
    RepeatCall,
    Replay,
    Schedule,
    Slow,
    Spoil,
    WorkerPlan,
)
from baton.sim.handoff.transport import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.authority.ticket import HandoffMode
    from baton.sim.handoff.plan import Fault, Host

MAX_PROMPT: Final = 24
MAX_OUTPUT: Final = 8
_VOCABULARY: Final = 1000
_FIRST_S: Final = 0.06
_BUSY_S: Final = 0.02
"""Within these, most requests are answered, and handed over, if nothing befalls them."""
_LEASES_S: Final = (0.7, 0.7, 1.0, 2.0, 10.0)
"""Three renewals of the shortest still fit between what the simulation calls now and then."""
_SLEEPERS: Final = 0.15
_CROWDS: Final = 0.03
_MIXTURES: Final[tuple[tuple[HandoffMode, ...], ...]] = (
    ("push",),
    ("pull",),
    ("pull",),
    ("push", "pull"),
)


def draw_schedule(seed: int) -> Schedule:
    """The schedule of a seed: always the same."""
    chance = Random(seed)  # noqa: S311 -- a seed's, not a secret
    sizes = (4, 4) if chance.random() < 0.6 else (chance.choice((2, 4, 8)), 4)  # noqa: PLR2004
    counts = chance.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    names = [f"p{n}" for n in range(counts[0])], [f"d{n}" for n in range(counts[1])]
    is_staged = tuple(chance.random() < 0.3 for _ in range(2))  # noqa: PLR2004
    workers = tuple(
        _draw_worker(chance, name, size, is_staged=staged)
        for side, size, staged in zip(names, sizes, is_staged, strict=True)
        for name in side
    )
    kinds = chance.sample(sorted(KINDS), chance.choice((1, 2, 2, 3)))
    clients = _draw_modes(Random(f"modes {seed}"), _draw_clients(chance))  # noqa: S311 -- as above
    hosts = [worker.name for worker in workers]
    num_faults = chance.choice((0, 1, 1, 2, 2, 3, 4, 6))
    moments = [_draw_moment(chance, clients) for _ in range(num_faults)]
    faults = [_draw_fault(chance, hosts, kinds, at_s) for at_s in moments]
    faults += _draw_sleeper(Random(f"sleeper {seed}"), clients)  # noqa: S311 -- as above
    schedule = Schedule(
        seed=seed,
        workers=workers,
        kinds=tuple(kinds),
        mover=chance.choice(("prefill", "decode")),
        clients=clients,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        lease_s=Random(f"lease {seed}").choice(_LEASES_S),  # noqa: S311 -- as above
    )
    schedule = draw_lending(Random(f"lending {seed}"), schedule)  # noqa: S311 -- as above
    schedule = draw_pooling(Random(f"pooling {seed}"), schedule)  # noqa: S311 -- as above
    crowding = Random(f"crowd {seed}")  # noqa: S311 -- as above
    return _crowd(crowding, schedule) if crowding.random() < _CROWDS else schedule


def _crowd(chance: Random, schedule: Schedule) -> Schedule:
    """Many are to be pulled by one slow worker with little room: they wait for several leases.

    Nobody is struck, and nobody leaves.
    """
    first, *_, last = schedule.workers
    prompts = [[chance.randrange(_VOCABULARY) for _ in range(MAX_PROMPT)] for _ in range(6)]
    size = last.block_size
    return replace(
        schedule,
        workers=(
            replace(first, num_blocks=2 * len(prompts) * first.num_blocks),
            replace(last, num_blocks=-(-(MAX_PROMPT + MAX_OUTPUT) // size)),
        ),
        clients=tuple(
            Client(0.03 * chance.random(), tuple(prompt), MAX_OUTPUT, None, "pull")
            for prompt in prompts
        ),
        faults=(Slow(0.0, last.name, 6.0, chance.uniform(10.0, 20.0)),),
        lease_s=min(_LEASES_S),
    )


def _draw_sleeper(chance: Random, clients: tuple[Client, ...]) -> list[Fault]:
    """A decode worker that oversleeps a lease while it reads, and is not told of its end."""
    if chance.random() > _SLEEPERS or not any(client.mode == "pull" for client in clients):
        return []
    at_s = chance.choice(clients).arrives_s + _BUSY_S * chance.random()
    return [Part(at_s, "p0", "d0", 2.0, both_ways=False), Pause(at_s, "d0", 0.95, replaced=False)]


def _draw_modes(chance: Random, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """All requests of many schedules in one mode, which says more when it fails."""
    modes = chance.choice(_MIXTURES)
    return tuple(replace(client, mode=chance.choice(modes)) for client in clients)


def _draw_worker(chance: Random, name: Host, block_size: int, *, is_staged: bool) -> WorkerPlan:
    most = -(-(MAX_PROMPT + MAX_OUTPUT) // block_size)  # blocks of the largest request
    return WorkerPlan(
        name=name,
        block_size=block_size,
        num_blocks=chance.choice((most, most + 2, 2 * most, 4 * most)),
        staging_pages=chance.choice((most, 2 * most)) if is_staged else None,
        offset_s=chance.uniform(0, 10_000),
        rate=chance.choice((1.0, 1.0, chance.uniform(0.98, 1.02))),
        unix_skew_s=chance.choice((0.0, 0.0, chance.uniform(-2.0, 2.0))),
    )


def _draw_clients(chance: Random) -> tuple[Client, ...]:
    shared = tuple(chance.randrange(_VOCABULARY) for _ in range(8))
    clients: list[Client] = []
    at_s = 0.0
    for _ in range(chance.choice((1, 1, 2, 2, 3, 4))):
        at_s += chance.choice((0.0, 0.003, 0.03)) * chance.random()
        length = chance.randint(1, MAX_PROMPT)
        own = tuple(chance.randrange(_VOCABULARY) for _ in range(length))
        likeness = chance.random()
        prompt = (shared + own)[:length] if likeness < 0.4 else own  # noqa: PLR2004
        if clients and likeness > 0.8:  # noqa: PLR2004
            prompt = clients[-1].prompt
        leaves = chance.random() < 0.15  # noqa: PLR2004
        clients.append(
            Client(
                arrives_s=at_s,
                prompt=prompt,
                num_output=chance.randint(1, 4),
                leaves_after_s=_FIRST_S * chance.random() if leaves else None,
            )
        )
    return tuple(clients)


def _draw_moment(chance: Random, clients: tuple[Client, ...]) -> float:
    """As a rule while a request is handed over."""
    if chance.random() < 0.2:  # noqa: PLR2004
        return (clients[-1].arrives_s + _FIRST_S) * chance.random()
    return chance.choice(clients).arrives_s + _BUSY_S * chance.random()


def _draw_fault(chance: Random, hosts: list[Host], kinds: list[str], at_s: float) -> Fault:
    worker = chance.choice(hosts)
    peers = [host for host in hosts if host[0] != worker[0]]
    another = chance.choice([*peers, *peers, GATEWAY])
    long_s = chance.choice((0.01, 0.1, 1.2, 4.0)) * (0.5 + chance.random())
    is_rare = chance.random() < 0.3  # noqa: PLR2004
    back_s = None if is_rare else 0.3 * chance.random()
    makers: tuple[Callable[[], Fault], ...] = (
        lambda: Crash(at_s, worker, is_rare, back_s),
        lambda: Pause(at_s, worker, long_s, is_rare),
        lambda: Slow(at_s, worker, long_s, chance.choice((3.0, 10.0, 40.0))),
        lambda: Cut(at_s, worker, chance.choice(peers), is_rare, chance.choice((0, 3, 40, 300))),
        lambda: Part(at_s, worker, another, long_s, is_rare),
        lambda: Spoil(
            at_s,
            tuple(
                chance.choice(("flip", "zero", "swap", "truncate", "repeat"))
                for _ in range(chance.choice((1, 1, 2, 6)))
            ),
        ),
        lambda: Break(at_s, worker, chance.choice(kinds), long_s),
        lambda: FailTransfers(at_s, chance.choice(kinds), chance.choice((1, 1, 2, 5))),
        lambda: LoseCall(at_s, worker, chance.choice(("request", "answer"))),
        lambda: RepeatCall(at_s, worker),
        lambda: Replay(at_s, worker, chance.choice((1, 3, 10))),
    )
    return chance.choice(makers)()
