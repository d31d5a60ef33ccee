"""A model that computes KV and tokens which can be distinguished from all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.engines.interface import PrefillRequest
from baton.handoff.interface import SampledToken
from baton.sim.handoff.memory import NUM_LAYERS, extend_chain, next_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engines.transformers.scheduler import Work
    from baton.handoff.interface import HandoffPort
    from baton.ids import RequestId
    from baton.sim.handoff.process import SimProcess

LAYER_S: Final = 0.002


class KilledError(BaseException):
    """The process that computes is gone."""


class SimComputer:
    """Stands where `engines.transformers.model_runner.ModelRunner` does. One for each life."""

    def __init__(self, process: SimProcess, handoff: HandoffPort) -> None:
        self._process, self._handoff = process, handoff
        self._chains: dict[RequestId, list[int]] = {}

    def compute(self, step: list[Work]) -> list[SampledToken | None]:
        """Attend to what is there, write the KV of this step, layer by layer."""
        process = self._process
        for work in step:
            chain = self._chain(work)
            process.checker.on_attend(process, work.sequence, chain, work.sequence.num_computed)
        sends = [
            (work.sequence.kind.ticket.id, work.stop)
            for work in step
            if isinstance(work.sequence.kind, PrefillRequest)
        ]
        for layer in range(NUM_LAYERS):
            process.spend_time(LAYER_S * process.world.rng.random())
            for work in step:
                sequence = work.sequence
                chain = self._chain(work)[: work.stop]
                process.checker.on_compute(process, work)
                process.pages.write(
                    layer,
                    sequence.blocks,
                    start=sequence.num_computed,
                    chain=chain,
                    incarnation=process.incarnation,
                )
            if sends:
                self._handoff.layer_ready(sends, layer)
        return [
            SampledToken(next_token(self._chain(work)[work.stop - 1])) if work.samples else None
            for work in step
        ]

    def forget(self, request: RequestId) -> None:
        """A request is over."""
        self._chains.pop(request, None)

    def _chain(self, work: Work) -> list[int]:
        chain = self._chains.setdefault(work.sequence.request.id, [])
        if len(chain) < work.stop:
            extend_chain(chain, work.sequence.token_ids(0, work.stop).tolist())
        return chain


class SamePages:
    """The engine's pages are the region's: nothing is to be taken over."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process

    def load_blocks(self, blocks: list[int]) -> None:
        """See `loop.EnginePages`."""

    def open_peer_mappings(self) -> None:
        """See `loop.EnginePages`: `Pages` looks at them as soon as there are some."""

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """See `loop.EnginePages`."""
        process = self._process
        process.checker.exports.on_copy(process, source, target)
        process.pages.copy(source, target)
