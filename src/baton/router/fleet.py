"""A snapshot of the workers, as placement sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, Self

from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    `takes_prefixes`: it hands over, and takes, KV of a prompt's first tokens alone.
    `topology` is where it is (`router/topology.py`).
    `max_context_tokens`: of a prompt and its answer together, it has room for so many.
    `checkpoint` names what it loaded, as far as is known: a folder of its own, or a name in a hub.
    `max_step_tokens`: its engine computes so many in one step; None: not reported.
    `num_landing_layers`: its engine computes the rest of a prompt while KV lands, each of so many
    layers once that layer's KV is there; 0: when all has landed.
    `adapters`: names of the LoRA adapters that it serves the model with, too.
    `why_no_handoffs`: why it takes no part in handoffs; None: it does.
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
    takes_prefixes: bool = True
    topology: str = ""
    max_step_tokens: int | None = None
    num_landing_layers: int = 0
    adapters: frozenset[str] = frozenset()
    why_no_handoffs: str | None = None
    max_context_tokens: float = inf
    checkpoint: str = ""
    id: WorkerId = field(init=False)
    """The worker's name, which survives a restart. Each request asks for it many times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.ref.worker)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself: nothing in it changes, and policies know it by its identity."""
        return self

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

    def has_model_of(self, other: WorkerView) -> bool:
        """Whether token ids and weights are those of another worker that speaks alike.

        The fingerprint of a vLLM server is also of how it computes KV: of servers that differ in
        it, those are taken to differ in their models that name different ones.
        """
        if self.fingerprint == other.fingerprint:
            return True
        is_known = bool(self.checkpoint and other.checkpoint)
        return self.protocol == "vllm" and not (is_known and self.checkpoint != other.checkpoint)

    def why_not_from(self, prefill: WorkerView) -> str | None:
        """Why this decode worker cannot take KV from `prefill`; None if it can."""
        for worker in (prefill, self):
            if worker.why_no_handoffs is not None:
                return f"{worker.id} refuses handoffs: {worker.why_no_handoffs}"
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
    `trials`, the workers that are half-open, and the least of all workers' `max_context_tokens`.
    `is_part`: others serve the model, too, but not every request for it.
    """

    prefills: tuple[WorkerView, ...]
    decodes: tuple[WorkerView, ...]
    helpers: tuple[WorkerView, ...]
    decode_protocols: frozenset[WorkerProtocol]
    trials: tuple[WorkerView, ...] = ()
    is_part: bool = False
    least_context_tokens: float = inf

    @classmethod
    def of(cls, workers: Iterable[WorkerView], *, is_part: bool = False) -> ModelWorkers:
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
            is_part=is_part,
            least_context_tokens=min((w.max_context_tokens for w in listed), default=inf),
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """As of `WorkerView`."""
        return self

    def beginning_at(self, share: float) -> ModelWorkers:
        """See `Fleet.beginning_at`."""
        return self.of((*_rotate(self.prefills, share), *_rotate(self.decodes, share)))


def why_without(worker: WorkerView, adapter: str) -> str:
    """Why a worker has no part in requests of an adapter that it has not."""
    return f"{worker.id} has no adapter {adapter!r}"


def why_too_small(worker: WorkerView) -> str:
    """Why a worker has no part in a request of more tokens than it has room for."""
    return f"{worker.id} has room for {worker.max_context_tokens} tokens"


def _rotate(workers: tuple[WorkerView, ...], share: float) -> tuple[WorkerView, ...]:
    first = int(share * len(workers))
    return workers[first:] + workers[:first]


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers that have ever identified themselves, by the model that they serve.

    `absent_prefills`: a readable line for each listed prefill worker whose model is not known.
    `adapters`: the LoRA adapters that answers can come from, each with its model. A name that is
    several models' is that of the first worker that has it.
    """

    models: dict[str, ModelWorkers] = field(default_factory=dict)
    absent_prefills: tuple[str, ...] = ()
    adapters: dict[str, str] = field(default_factory=dict)
    _with_adapter: dict[tuple[str, str], Fleet | None] = field(default_factory=dict, compare=False)
    """By model and adapter; None where all workers of the model have the adapter."""

    @classmethod
    def of(cls, workers: Iterable[WorkerView], absent_prefills: tuple[str, ...] = ()) -> Fleet:
        """Index the workers."""
        by_model: dict[str, list[WorkerView]] = {}
        adapters: dict[str, str] = {}
        # Mostly all workers of a model have the same.
        added: set[tuple[str, frozenset[str]]] = set()
        for worker in workers:
            by_model.setdefault(worker.model, []).append(worker)
            own = worker.model, worker.adapters
            if worker.adapters and worker.decodes and own not in added:
                added.add(own)
                adapters = dict.fromkeys(worker.adapters, worker.model) | adapters
        models = {model: ModelWorkers.of(served) for model, served in by_model.items()}
        return cls(models, absent_prefills, adapters)

    def beginning_at(self, share: float) -> Fleet:
        """The same workers in an order that begins after this share of them, 0 to 1.

        Gateways that take the first of equal workers do not all take the same one then.
        """
        models = {model: served.beginning_at(share) for model, served in self.models.items()}
        return Fleet(models, self.absent_prefills, self.adapters)

    def only(self, model: str, protocol: WorkerProtocol) -> Fleet:
        """A fleet of those workers of a model that speak `protocol`."""
        return self._part(model, lambda worker: worker.protocol == protocol)

    def like(self, lost: WorkerView, *, must_resume: bool) -> Fleet:
        """A fleet of those workers that can go on with what `lost` began, or resume its stream."""
        return self._part(
            lost.model,
            lambda worker: (
                worker.protocol == lost.protocol
                and worker.has_model_of(lost)
                and (worker.resumes_streams or not must_resume)
            ),
        )

    def _part(self, model: str, is_in: Callable[[WorkerView], bool]) -> Fleet:
        served = self.models[model]
        listed = (*served.prefills, *served.decodes)
        kept = [worker for worker in listed if is_in(worker)]
        is_part = served.is_part or len(kept) < len(listed)
        return Fleet({model: ModelWorkers.of(kept, is_part=is_part)}, self.absent_prefills)

    def with_room(self, model: str, num_tokens: float) -> Fleet:
        """A fleet of those workers of a model whose context holds more than so many tokens.

        This one if all do, or none from which an answer can come.
        """
        served = self.models[model]
        if num_tokens < served.least_context_tokens:
            return self
        listed = (*served.prefills, *served.decodes)
        large = [w for w in listed if w.max_context_tokens > num_tokens]
        if not any(w.decodes for w in large):
            return self
        small = [why_too_small(w) for w in served.prefills if w.max_context_tokens <= num_tokens]
        having = ModelWorkers.of(large, is_part=True)
        return Fleet({model: having}, (*self.absent_prefills, *small))

    def with_adapter(self, model: str, adapter: str) -> Fleet:
        """A fleet of those workers of a model that have an adapter; this one if all have it."""
        key = model, adapter
        if key not in self._with_adapter:
            self._with_adapter[key] = self._find_with(model, adapter)
        return self._with_adapter[key] or self

    def _find_with(self, model: str, adapter: str) -> Fleet | None:
        served = self.models[model]
        listed = (*served.prefills, *served.decodes)
        having = ModelWorkers.of((w for w in listed if adapter in w.adapters), is_part=True)
        if len(having.prefills) + len(having.decodes) == len(listed):
            return None
        lacking = [why_without(w, adapter) for w in served.prefills if adapter not in w.adapters]
        return Fleet({model: having}, (*self.absent_prefills, *lacking))

    @property
    def can_decode(self) -> bool:
        """Whether any answer at all can be given."""
        return any(
            w.available or w.ejected for served in self.models.values() for w in served.decodes
        )
