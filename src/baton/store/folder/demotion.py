"""Victims of one tier that are put into the tier below, some at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from baton.errors import StoreError
from baton.store.interface import NamedBody

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from baton.store.interface import EntryName, PutsEntries, TenantLabel

BATCH_BYTES: Final = 16 << 20
"""Of bodies in memory at once; one that is larger goes alone."""


class VictimBody(NamedTuple):
    """What of an entry goes to the tier below."""

    name: EntryName
    body: memoryview
    tenant: TenantLabel


def demote(
    victims: Iterable[VictimBody], below: PutsEntries, report: Callable[[StoreError], None]
) -> set[EntryName]:
    """Put victims into the tier below; those that it has now. It loses what it refuses.

    `victims` are read as they are needed. Each refusal is reported.
    """
    demoted: set[EntryName] = set()
    for batch in _batch(victims):
        entries = [NamedBody(victim.name, victim.body) for victim in batch]
        outcomes = below.put_many(entries, batch[0].tenant)
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                report(outcome)
            else:
                demoted.add(entry.name)
    return demoted


def _batch(victims: Iterable[VictimBody]) -> Iterator[list[VictimBody]]:
    """Consecutive victims of one tenant."""
    batch: list[VictimBody] = []
    num_bytes = 0
    for victim in victims:
        num_bytes += len(victim.body)
        if batch and (num_bytes > BATCH_BYTES or victim.tenant != batch[0].tenant):
            yield batch
            batch, num_bytes = [], len(victim.body)
        batch.append(victim)
    if batch:
        yield batch
