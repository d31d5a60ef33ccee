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


PUSH_ONLY: Final[frozenset[HandoffMode]] = frozenset({"push"})
"""What every worker knows."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One incarnation of a worker. `fingerprint` is its model's, `model` the name that clients use.

    `modes` are the ways of handing over that it takes part in. `load` None: not reported.
    `topology` is where it is (`router/topology.py`).
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
    topology: str = ""

    @property
    def id(self) -> WorkerId:
        """The worker's name, which survives a restart."""
        return self.ref.worker

    @property
    def host(self) -> str:
        """Where its peers reach it."""
        return self.ref.address.rpartition(":")[0]

    @property
    def decodes(self) -> bool:
        """Whether an answer can come from here."""
        return self.role is not Role.PREFILL

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
    `decode_protocols` is the decode workers', at hand because each request asks for it.
    """

    prefills: tuple[WorkerView, ...]
    decodes: tuple[WorkerView, ...]
    helpers: tuple[WorkerView, ...]
    decode_protocols: frozenset[WorkerProtocol]

    @classmethod
    def of(cls, workers: Iterable[WorkerView]) -> ModelWorkers:
        """Sort the workers of one model by their parts."""
        listed = tuple(workers)
        decodes = tuple(w for w in listed if w.decodes)
        return cls(
            prefills=tuple(w for w in listed if w.role is Role.PREFILL),
            decodes=decodes,
            helpers=tuple(w for w in listed if w.role is not Role.DECODE),
            decode_protocols=frozenset(w.protocol for w in decodes),
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers that have ever identified themselves, by the model that they serve."""

    models: dict[str, ModelWorkers] = field(default_factory=dict)

    @classmethod
    def of(cls, workers: Iterable[WorkerView]) -> Fleet:
        """Index the workers."""
        by_model: dict[str, list[WorkerView]] = {}
        for worker in workers:
            by_model.setdefault(worker.model, []).append(worker)
        return cls({model: ModelWorkers.of(served) for model, served in by_model.items()})

    def only(self, model: str, protocol: WorkerProtocol) -> Fleet:
        """A fleet of those workers of a model that speak `protocol`."""
        served = self.models[model]
        listed = (*served.prefills, *served.decodes)
        return Fleet({model: ModelWorkers.of(w for w in listed if w.protocol == protocol)})

    @property
    def can_decode(self) -> bool:
        """Whether any answer at all can be given."""
        return any(w.available for served in self.models.values() for w in served.decodes)
