"""The question that is put to a placement policy, and its two answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, runtime_checkable

from baton.protocol.worker_http import Role
from baton.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from baton.auth.ticket import HandoffMode
    from baton.ids import WorkerId
    from baton.router.fleet import Fleet, WorkerView
    from baton.router.load import FleetLoad
    from baton.router.modes import ModeSetting

Mode: TypeAlias = Literal["push", "pull", "pool", "reference", "colocated"]


class NonDisaggregableField(StrEnum):
    """The field of a request for which a vLLM decode worker does not take KV from another worker.

    It computes the prompt again (the logprobs of a prompt need its forward pass), or makes several
    requests of one, of which a ticket could serve the first only.
    """

    USE_BEAM_SEARCH = "use_beam_search"
    ECHO = "echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PROMPT_EMBEDS = "prompt_embeds"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement may look at. `avoid` and `failed_modes` have just failed this request.

    `num_prompt_tokens` is an estimate where the prompt could not be tokenized, `at` the time on the
    clock by which `FleetLoad` is kept. `failed_modes` may name modes that are not for this request.
    `cached`: tokens of the prompt that workers have, from the first on; others have none, as far as
    is known. `stored`: those that they can load from their stores. `full`: workers that are not
    chosen while others are left. `ttft_s` and `tpot_s`: the request's own limits, None where the
    policy's hold; `itl_s`: of the gaps between tokens, None where there is none.
    `is_tokenized`: the number of tokens is no estimate.
    """

    model: str
    avoid: frozenset[WorkerId] = frozenset()
    non_disaggregable: NonDisaggregableField | None = None
    num_prompt_tokens: int = 0
    failed_modes: frozenset[HandoffMode] = frozenset()
    at: float = 0.0
    cached: Mapping[WorkerId, int] = field(default_factory=dict)
    stored: Mapping[WorkerId, int] = field(default_factory=dict)
    full: frozenset[WorkerId] = frozenset()
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    is_tokenized: bool = True

    def count_uncached(self, worker: WorkerId) -> int:
        """Tokens that a worker would have to compute: at least one, for the answer's first."""
        cached = self.cached.get(worker, 0) if self.cached else 0
        return max(1, self.num_prompt_tokens - cached) if cached else self.num_prompt_tokens

    def count_stored(self, worker: WorkerView) -> int:
        """Tokens that a worker has not cached, and could load: one is computed in any case."""
        stored = self.stored.get(worker.id, 0)
        if not stored:
            return 0
        return max(0, min(stored, self.num_prompt_tokens - 1) - self.cached.get(worker.id, 0))


@dataclass(frozen=True, slots=True)
class Placement:
    """Who serves a request.

    `prefill` is None where the decode worker prefills too; `reasons` then gives why, one readable
    line for each cause, and is empty where that is what the operator set up. `non_disaggregable` is
    set where the request itself wants it so, which is no failure of anybody. `handoff` is how KV
    gets from one to the other, `why` the policy's lines on that; `is_degraded`: another way was
    wanted. `num_prefix_tokens` above 0: `prefill` hands over the KV of so many first tokens of the
    prompt, and the decode worker computes the others. `prefill` has them cached, but for
    `num_split_tokens`, which it computes at the same time.
    `num_stored_tokens`: so many more than it has cached is `computing` expected to load from its
    store.
    """

    prefill: WorkerView | None
    decode: WorkerView
    reasons: tuple[str, ...] = ()
    non_disaggregable: NonDisaggregableField | None = None
    handoff: HandoffMode = "push"
    why: tuple[str, ...] = ()
    is_degraded: bool = False
    num_prefix_tokens: int = 0
    num_stored_tokens: int = 0
    num_split_tokens: int = 0

    @property
    def computing(self) -> WorkerView:
        """Who computes the prompt, or what of it is not handed over."""
        return self.decode if self.prefill is None or self.num_prefix_tokens else self.prefill

    @property
    def mode(self) -> Mode:
        """How KV gets to the decode worker."""
        return "colocated" if self.prefill is None else self.handoff


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No worker can serve a request now; `reason` is for people."""

    reason: str


class PlacementPolicy(Protocol):
    """Chooses workers. Deterministic: the same calls in the same order give the same answers.

    `uses_prefixes`: it looks at `PlacementRequest.cached`, so that prompts are tokenized for it.
    """

    uses_prefixes: bool

    def place(
        self, fleet: Fleet, request: PlacementRequest, load: FleetLoad
    ) -> Placement | Unplaceable:
        """Choose for one request. Only available workers of its model that it does not avoid."""
        ...


@runtime_checkable
class RemembersWorkers(Protocol):
    """A policy that keeps something for each worker, by its name."""

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """These are gone."""
        ...


PolicyFactory: TypeAlias = "Callable[[ModeSetting], PlacementPolicy]"
"""Builds a policy that knows the operator's word on how KV is handed over."""

POLICIES: Final[Registry[PolicyFactory]] = Registry("baton.policies", "router.options")


def find_first_share(policy: str, index: int, num_gateways: int) -> float:
    """Where in the workers' order gateway `index` of several begins (`Fleet.beginning_at`).

    With `prefix` all begin alike: a beginning that no worker has goes to the first of equal
    workers, and by their common order gateways agree on it.
    """
    return 0.0 if policy == "prefix" else index / num_gateways


def choose_policy(named: str | None, roles: Sequence[Role]) -> str:
    """The name of the policy for workers of these roles: the `named` one, if there is one.

    Else `cost` where there are several and some do both parts. Prefill and decode workers take
    turns: each request is handed over, as whoever set them up expects.
    """
    if named is not None:
        return named
    return "cost" if len(roles) > 1 and Role.BOTH in roles else "round_robin"
