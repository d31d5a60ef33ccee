"""A snapshot of the workers, as placement sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.auth.ticket import HandoffMode, WorkerRef
    from baton.ids import WorkerId
    from baton.protocol.worker_http import WorkerLoad, WorkerProtocol
    from baton.router.health import SlowStart

PUSH_ONLY: Final[frozenset[HandoffMode]] = frozenset({"push"})
"""What every worker knows."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One incarnation of a worker. `fingerprint` is its model's, `model` the name that clients use.

    `modes` are the ways of handing over that it takes part in. `load` None: not reported.
    `available`: it may be given requests. `half_open`: it may get a trial request.
    `ejected`: it is up, but only used where there is no other. `slow_start` None: it is over.
    `takes_unsigned_tickets`: its connections to a gateway prove what that is.
    `resumes_streams`: it goes on from the token ids of an answer's beginning.
    `topology` is where it is (`router/topology.py`).
    `max_step_tokens`: its engine computes so many in one step; None: not reported.
    """

    ref: WorkerRef
    role: Role
    model: str
    fingerprint: str
    transports: frozenset[str]
    available: bool
    protocol: WorkerProtocol = "baton"
    modes: frozenset[HandoffMode] = PUSH_ONLY
    load: WorkerLoad | None = None
    tokenizer: str | None = None
    half_open: bool = False
    ejected: bool = False
    slow_start: SlowStart | None = None
    takes_unsigned_tickets: bool = False
    resumes_streams: bool = True
    topology: str = ""
    max_step_tokens: int | None = None
    id: WorkerId = field(init=False)
    """The worker's name, which survives a restart. Each request asks for it many times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.ref.worker)

    @property
    def host(self) -> str:
        """Where its peers reach it."""
        return self.ref.address.rpartition(":")[0]

    @property
    def decodes(self) -> bool:
        """Whether an answer can come from here."""
        return self.role is not Role.PREFILL

    def share(self, now: float) -> float:
        """Of the requests that it would get otherwise, up to 1: less after its return."""
        return 1.0 if self.slow_start is None else self.slow_start.share(now)

    def why_not_from(self, prefill: WorkerView) -> str | None:
        """Why this decode worker cannot take KV from `prefill`; None if it can."""
        if prefill.fingerprint != self.fingerprint:
            return f"{prefill.id} and {self.id} loaded models of different fingerprints"
        if not prefill.transports & self.transports:
            return f"{prefill.id} and {self.id} have no transport in common"
        return None


@dataclass(frozen=True, slots=True)
class ModelWorkers:
    """The workers that serve one model, in the order in which the operator listed them.

    `helpers` may prefill what another worker answers: prefill workers, and those of both roles.
    `decode_protocols` is the decode workers', at hand because each request asks for it; so are
    `trials`, the workers that are half-open.
    """

    prefills: tuple[WorkerView, ...]
    decodes: tuple[WorkerView, ...]
    helpers: tuple[WorkerView, ...]
    decode_protocols: frozenset[WorkerProtocol]
    trials: tuple[WorkerView, ...] = ()

    @classmethod
    def of(cls, workers: Iterable[WorkerView]) -> ModelWorkers:
        """Sort the workers of one model by their parts."""
        listed = tuple(workers)
        decodes = tuple(w for w in listed if w.decodes)
        helpers = tuple(w for w in listed if w.role is not Role.DECODE)
        return cls(
            prefills=tuple(w for w in listed if w.role is Role.PREFILL),
            decodes=decodes,
            helpers=decodes if helpers == decodes else helpers,
            decode_protocols=frozenset(w.protocol for w in decodes),
            trials=tuple(w for w in listed if w.half_open),
        )

    def beginning_at(self, share: float) -> ModelWorkers:
        """See `Fleet.beginning_at`."""
        return self.of((*_rotate(self.prefills, share), *_rotate(self.decodes, share)))


def _rotate(workers: tuple[WorkerView, ...], share: float) -> tuple[WorkerView, ...]:
    first = int(share * len(workers))
    return workers[first:] + workers[:first]


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers that have ever identified themselves, by the model that they serve.

    `absent_prefills`: a readable line for each listed prefill worker whose model is not known.
    """

    models: dict[str, ModelWorkers] = field(default_factory=dict)
    absent_prefills: tuple[str, ...] = ()

    @classmethod
    def of(cls, workers: Iterable[WorkerView], absent_prefills: tuple[str, ...] = ()) -> Fleet:
        """Index the workers."""
        by_model: dict[str, list[WorkerView]] = {}
        for worker in workers:
            by_model.setdefault(worker.model, []).append(worker)
        models = {model: ModelWorkers.of(served) for model, served in by_model.items()}
        return cls(models, absent_prefills)

    def beginning_at(self, share: float) -> Fleet:
        """The same workers in an order that begins after this share of them, 0 to 1.

        Gateways that take the first of equal workers do not all take the same one then.
        """
        models = {model: served.beginning_at(share) for model, served in self.models.items()}
        return Fleet(models, self.absent_prefills)

    def only(self, model: str, protocol: WorkerProtocol) -> Fleet:
        """A fleet of those workers of a model that speak `protocol`."""
        served = self.models[model]
        listed = (*served.prefills, *served.decodes)
        spoken = ModelWorkers.of(w for w in listed if w.protocol == protocol)
        return Fleet({model: spoken}, self.absent_prefills)

    @property
    def can_decode(self) -> bool:
        """Whether any answer at all can be given."""
        return any(
            w.available or w.ejected for served in self.models.values() for w in served.decodes
        )
