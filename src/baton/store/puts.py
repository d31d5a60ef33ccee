"""Several puts one after the other, and one put as several: for tiers, and wrappers of tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.store.interface import (
        Body,
        EntryName,
        NamedBody,
        PutOutcome,
        PutResult,
        TenantLabel,
    )


def put_each(
    put: Callable[[EntryName, Body, TenantLabel], PutResult],
    entries: Sequence[NamedBody],
    tenant: TenantLabel,
) -> list[PutOutcome]:
    """Put entries one after the other; what became of each (see `PutsMany`)."""
    outcomes: list[PutOutcome] = []
    for name, body in entries:
        try:
            outcomes.append(put(name, body, tenant))
        except StoreError as exc:
            outcomes.append(exc)
    return outcomes


def take_one(outcomes: Sequence[PutOutcome]) -> PutResult:
    """What became of the one entry that was put.

    Raises:
        StoreError: it is not kept.
    """
    (outcome,) = outcomes
    if isinstance(outcome, StoreError):
        raise outcome
    return outcome
