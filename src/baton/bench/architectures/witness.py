"""Who tells what happened on the servers under a load: did KV move, and where did the time go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.bench.architectures.tracing import fetch_traces, measure_stages, prove

if TYPE_CHECKING:
    from collections.abc import Sequence

    import aiohttp

    from baton.bench.architectures.results import Proof, Stages


@dataclass(frozen=True, slots=True)
class Testimony:
    """What is known of one cell. `proof` None: nobody was asked."""

    stages: Stages
    proof: Proof | None


class Witness(Protocol):
    """Asked before each load and after it. Raises nothing: what is not known is said so."""

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """A load is about to begin."""
        ...

    async def testify(
        self, session: aiohttp.ClientSession, names: Sequence[str], num_answered: int
    ) -> Testimony:
        """The load is over. `names`: all its requests'; `num_answered`: as the client counted."""
        ...


@dataclass(frozen=True, slots=True)
class TraceWitness:
    """See `Witness`: Baton's gateway has a trace of every request."""

    url: str

    async def begin(self, session: aiohttp.ClientSession) -> None:
        """See `Witness`: traces bear the requests' names, nothing is to be remembered."""

    async def testify(
        self, session: aiohttp.ClientSession, names: Sequence[str], num_answered: int
    ) -> Testimony:
        """See `Witness`."""
        traces = await fetch_traces(session, self.url, names)
        return Testimony(measure_stages(traces), prove(traces, num_answered))
