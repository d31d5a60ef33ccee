"""KV of the simulation: every token's bytes name the token, and which incarnation computed them.

A token of a layer is 16 bytes: a hash of (layer, all tokens up to it), then the name of the life
that computed it. So whoever reads a page knows whose it is, and digests cover both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.engines.interface import PrefillRequest
from baton.engines.transformers.sequence import LayerLateError
from baton.handoff.interface import HandoffPort, SampledToken, StreamPosition
from baton.ids import RegionHandle, RequestId
from baton.kv.layout import KVLayout
from baton.transfer.interface import PageArray, PagedRegion
from baton.transfer.peer_mappings import PeerMappings
from baton.transfer.region import allocate_shared_region, release_region, view_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from numpy.typing import NDArray

    from baton.engines.transformers.scheduler import Work
    from baton.sim.handoff.process import SimProcess

TOKEN_BYTES: Final = 16
NUM_LAYERS: Final = 2
VOCABULARY: Final = 1000
_PRIME: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


@lru_cache
def make_layout(block_size: int) -> KVLayout:
    """A model of `NUM_LAYERS` layers with one latent vector of `TOKEN_BYTES` bytes a token."""
    return KVLayout.mla(NUM_LAYERS, TOKEN_BYTES, block_size=block_size, dtype="int8")


def extend_chain(chain: list[int], tokens: Sequence[int]) -> None:
    """Hashes of all prefixes of `tokens`: the missing ones are added to `chain`."""
    last = chain[-1] if chain else 0
    for token in tokens[len(chain) :]:
        last = ((last ^ (token + 1)) * _PRIME) & _MASK
        last ^= last >> 29
        chain.append(last)


def next_token(prefix: int) -> int:
    """What the model generates after a prefix, by its hash: never anything else."""
    return (prefix >> 17) % VOCABULARY


@dataclass(slots=True, eq=False)
class Pages:
    """The paged KV of one region: `words[layer]` is uint64 `[num_pages, block_size, 2]`.

    With `peer_mappings` pages of peers can be read as further ones.
    """

    region: PagedRegion
    block_size: int
    words: tuple[NDArray[np.uint64], ...]
    peer_mappings: PeerMappings | None = None

    @classmethod
    def share(cls, block_size: int, num_pages: int, rng: Random) -> Pages:
        """Zeroed pages in memory that peers map: the kernel's, as in production."""
        region = allocate_shared_region([(num_pages, block_size * TOKEN_BYTES)] * NUM_LAYERS)
        region = replace(region, handle=RegionHandle(rng.randbytes(16)))
        words = tuple(
            view_pages(region.memory, array).view(np.uint64).reshape(num_pages, block_size, 2)
            for array in region.arrays
        )
        return cls(region, block_size, words, PeerMappings(region))

    @classmethod
    def allocate(cls, block_size: int, num_pages: int, rng: Random) -> Pages:
        """Zeroed pages."""
        words = np.zeros((NUM_LAYERS, num_pages, block_size, 2), np.uint64)
        layer_bytes = num_pages * block_size * TOKEN_BYTES
        arrays = tuple(
            PageArray(layer * layer_bytes, block_size * TOKEN_BYTES, num_pages)
            for layer in range(NUM_LAYERS)
        )
        memory = words.reshape(-1).view(np.uint8).data
        region = PagedRegion(RegionHandle(rng.randbytes(16)), "host", memory, arrays)
        return cls(region, block_size, tuple(words))

    def write(
        self,
        layer: int,
        blocks: Sequence[int],
        *,
        start: int,
        chain: Sequence[int],
        incarnation: int,
    ) -> None:
        """KV of tokens `[start, len(chain))` is computed; `blocks` are the sequence's."""
        words, size = self.words[layer], self.block_size
        salt = layer * _PRIME & _MASK
        for at in range(start, len(chain)):
            words[blocks[at // size], at % size] = chain[at] ^ salt, incarnation

    def find_wrong(
        self, layer: int, blocks: Sequence[int], chain: Sequence[int], stop: int
    ) -> int | None:
        """The first of tokens `[0, stop)` whose KV is not its own; None if all are right."""
        found = self._read(layer, blocks)[:stop, 0]
        expected = np.array(chain[:stop], np.uint64) ^ np.uint64(layer * _PRIME & _MASK)
        if np.array_equal(found, expected):
            return None
        return int(np.flatnonzero(found != expected)[0])

    def incarnations(self, layer: int, blocks: Sequence[int], start: int, stop: int) -> set[int]:
        """Who computed tokens `[start, stop)`."""
        found = self._read(layer, blocks)[start:stop, 1]
        return set(found.tolist())

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Whole pages, the first ones peers' perhaps, into others of one's own, all layers."""
        for layer, words in enumerate(self.words):
            found = self._read(layer, source)
            words[list(target)] = found.reshape(len(source), self.block_size, 2)

    def close(self) -> None:
        """Give shared memory back to the kernel: no process reads it any more."""
        self.words = ()
        if self.peer_mappings is not None:
            self.peer_mappings.close()
            release_region(self.region)

    def _read(self, layer: int, blocks: Sequence[int]) -> NDArray[np.uint64]:
        """The words of some pages, `[num_tokens, 2]`: a copy."""
        if self.peer_mappings is None or not self.peer_mappings.is_open:
            return self.words[layer][list(blocks)].reshape(-1, 2)
        found = self.peer_mappings.view(layer)[list(blocks)]
        words: NDArray[np.uint64] = found.reshape(-1).view(np.uint64).reshape(-1, 2)
        return words


@dataclass(frozen=True, slots=True)
class SimStaging:
    """Implements `handoff.kv_views.Staging`: pages of another memory, with the same block size."""

    engine: Pages
    staged: Pages

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """See `Staging`."""
        self.staged.words[layer][staged] = self.engine.words[layer][blocks]

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> None:
        """See `Staging`."""
        self.engine.words[layer][blocks] = self.staged.words[layer][staged]


MAX_COPY_S: Final = 0.004


@dataclass(slots=True)
class SimCopy:
    """Implements `StreamPosition`: that behind a copy."""

    copied: bool = False

    def is_done(self) -> bool:
        """See `StreamPosition`."""
        return self.copied

    def wait(self) -> None:
        """See `StreamPosition`. No simulated thread waits for a GPU."""
        raise AssertionError("a thread waits for a copy")


class SimDeviceStaging:
    """`SimStaging` whose copies a GPU carries out: they take time, of which the agent learns later.

    Each moves its pages at its last instant: what changes until then is copied.
    """

    def __init__(self, pages: SimStaging, process: SimProcess) -> None:
        self._pages, self._process = pages, process
        self._ends_s = {"gather": 0.0, "scatter": 0.0}

    def gather(
        self,
        layer: int,
        blocks: NDArray[np.int64],
        staged: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> SimCopy:
        """See `Staging`."""
        return self._begin("gather", partial(self._pages.gather, layer, blocks, staged))

    def scatter(
        self,
        layer: int,
        staged: NDArray[np.int64],
        blocks: NDArray[np.int64],
        _after: StreamPosition | None = None,
    ) -> SimCopy:
        """See `Staging`."""
        return self._begin("scatter", partial(self._pages.scatter, layer, staged, blocks))

    def _begin(self, direction: str, move: Callable[[], None]) -> SimCopy:
        """Behind the copies in the same direction; of a process that dies, what is left is lost."""
        world, copy = self._process.world, SimCopy()
        took_s = MAX_COPY_S * world.rng.random()
        ends_s = max(self._ends_s[direction], world.timeline.now_s) + took_s
        self._ends_s[direction] = ends_s

        def end() -> None:
            if self._process.is_alive:
                move()
                copy.copied = True
                self._process.when_running(self._process.wake)

        world.timeline.at(ends_s, end)
        return copy


LAYER_S: Final = 0.002
MAX_LANDING_WAIT_S: Final = 1.0
"""As `model_runner`'s, which imports torch."""
LANDING_WAIT_S: Final = 0.0005
"""So often a step looks for a layer that lands: it sleeps in production until there is one."""


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
        began, landing = process.clock.now(), [work for work in step if work.sequence.landing]
        for work in step:
            if work.sequence.landing is None:
                self._attend(work, range(NUM_LAYERS))
        sends = [
            (work.sequence.kind.ticket.id, work.stop)
            for work in step
            if isinstance(work.sequence.kind, PrefillRequest)
        ]
        for layer in range(NUM_LAYERS):
            for work in landing:
                self._wait(work, layer, began + MAX_LANDING_WAIT_S)
            process.spend_time(LAYER_S * process.world.rng.random())
            for work in landing:
                self._attend(work, range(layer, layer + 1))
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

    def _attend(self, work: Work, layers: range) -> None:
        """The tokens before those of this step are looked at."""
        sequence = work.sequence
        self._process.checker.on_attend(
            self._process, sequence, self._chain(work), sequence.num_computed, layers=layers
        )

    def _wait(self, work: Work, layer: int, until: float) -> None:
        """As `LandingLayers.wait`: the rest of the world goes on."""
        process, layers = self._process, work.sequence.landing
        seen = process.checker.seen
        while layers is not None and layer >= layers.num:
            if layers.is_over or process.clock.now() >= until:
                seen["layer late"] += 1
                raise LayerLateError(f"layer {layer} has not landed")
            process.spend_time(LANDING_WAIT_S)
        seen["layer computed as it landed"] += 1

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

    lands_in_place = True

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
