"""What handoffs cost, by the distance of the two workers: one learned line for each.

Seconds from a prompt's end at one worker to the first token from the other, by the tokens that are
handed over. Most of a handoff is hidden: its layers are sent while later ones are computed. What
stays exposed is at least the last layer (or, of a short prompt, all that goes in one batch), and
what the link moves more slowly than the engine computes.

A line that nothing was learned of yet is a guess: what an earlier gateway has learned, or else from
the links of this distance that workers have measured, or from a default. The guess takes over what
the lines of other distances show that links do not (engines' steps, messages); a default is never
below what a nearer line has learned, or above what a farther one has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from baton.router.learning import LearnedLine, PromptLine, WorkerCost
from baton.router.topology import Distance, Places

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from baton.ids import WorkerId
    from baton.router.fleet import WorkerView

CostSource: TypeAlias = Literal["default", "measured", "kept", "learned"]
"""What a cost rests on: nothing of this fleet, its links, what an earlier gateway learned of its
handoffs, or what this one did."""

TYPICAL_TOKENS: Final = 1000.0
MOST_PAIRS: Final = 1 << 16
"""Whose factors are remembered; beyond that, some or all are forgotten."""
MESSAGES_S: Final = 0.003
"""A guess: of a handoff, what does not depend on the link."""
BATCH_BYTES: Final = 4 << 20
"""`handoff.layer_batch_bytes`: so much is sent at once, and nothing before."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """`latency_s + bytes * byte_s`, of one direction between two workers.

    `encoding` is what the latest handoff's KV was written in, `encoded_byte_s` the seconds for a
    byte of raw KV that is encoded so, sent and decoded; None where KV goes raw.
    """

    latency_s: float
    byte_s: float
    transport: str = ""
    encoding: str = "raw"
    encoded_byte_s: float | None = None

    @property
    def kv_byte_s(self) -> float:
        """Seconds for a byte of KV, as it goes over this link."""
        return self.byte_s if self.encoded_byte_s is None else self.encoded_byte_s


@dataclass(frozen=True, slots=True)
class WorkerLinks:
    """What one worker has measured, by `(from, to)`, and `[latency_s, kv_byte_s]` by distance.

    Grouped once: with every new report of any worker all workers' are looked at.
    """

    links: Mapping[tuple[WorkerId, WorkerId], LinkCost]
    by_distance: Mapping[Distance, NDArray[np.float64]]


DEFAULTS: Final[Mapping[Distance, LinkCost]] = {
    Distance.SAME_DEVICE: LinkCost(20e-6, 1 / 20e9),
    Distance.SAME_HOST: LinkCost(30e-6, 1 / 8e9),
    Distance.SAME_RACK: LinkCost(150e-6, 1 / 2e9),
    Distance.SAME_ZONE: LinkCost(300e-6, 1 / 1e9),
    Distance.CROSS_ZONE: LinkCost(2e-3, 1 / 0.3e9),
}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a token's KV takes, of all `num_layers` layers. The default is that of Llama 3 8B."""

    bytes_per_token: int = 131_072
    num_layers: int = 32


def guess_exposed(link: LinkCost, shape: KVShape, prefill_token_s: float) -> tuple[float, float]:
    """Of a handoff, what prefill does not hide: fixed seconds, and for each token."""
    num = TYPICAL_TOKENS
    moved_s = num * shape.bytes_per_token * link.kv_byte_s
    batch_s = BATCH_BYTES * link.kv_byte_s
    least_s = min(moved_s, max(moved_s / shape.num_layers, batch_s))
    hidden_s = num * prefill_token_s * (shape.num_layers - 1) / shape.num_layers
    return MESSAGES_S + link.latency_s, max(least_s, moved_s - hidden_s) / num


def group_links(
    measured: Iterable[tuple[WorkerView, WorkerView, LinkCost]], places: Places
) -> WorkerLinks:
    """What one worker has measured: links from the one to the other."""
    links: dict[tuple[WorkerId, WorkerId], LinkCost] = {}
    found: dict[Distance, list[tuple[float, float]]] = {}
    for one, other, link in measured:
        links[one.id, other.id] = link
        alike = found.setdefault(places.distance(one.topology, other.topology), [])
        alike.append((link.latency_s, link.kv_byte_s))
    return WorkerLinks(links, {each: np.array(alike) for each, alike in found.items()})


class HandoffCosts:
    """One model's. Owner: the gateway's thread. `prefill` is the model's line for prompts.

    `pairs` are the costs of those that were placed, by `(prefill, decode)`: only to be read.
    """

    def __init__(self, prefill: PromptLine) -> None:
        self._prefill, self._shape = prefill, KVShape()
        self.places = Places()
        self.links: Mapping[tuple[WorkerId, WorkerId], LinkCost] = {}
        self._measured: dict[Distance, LinkCost] = {}
        self._kept: dict[Distance, tuple[float, float]] = {}
        self.pairs: dict[tuple[WorkerId, WorkerId], WorkerCost] = {}
        self.lines = tuple(LearnedLine(self._guess(each)) for each in Distance)

    def note_links(self, measured: Iterable[WorkerLinks], shape: KVShape | None) -> None:
        """What workers have measured; replaces what was known.

        Of a pair that both have measured, the later one's link is taken; at their distance both
        count.
        """
        self._shape = shape or KVShape()
        links: dict[tuple[WorkerId, WorkerId], LinkCost] = {}
        found: dict[Distance, list[NDArray[np.float64]]] = {}
        for worker in measured:
            links.update(worker.links)
            for distance, alike in worker.by_distance.items():
                found.setdefault(distance, []).append(alike)
        self.links = links
        self._measured = {
            distance: LinkCost(*np.median(np.concatenate(alike), axis=0).tolist())
            for distance, alike in found.items()
        }
        self._guess_again()

    def begin_with(self, kept: Mapping[Distance, tuple[float, float]]) -> None:
        """What other gateways have learned, by distance; it counts until something is seen here."""
        self._kept |= kept
        self._guess_again()

    def distance(self, prefill: WorkerView, decode: WorkerView) -> Distance:
        """Between two workers."""
        return self.places.distance(prefill.topology, decode.topology)

    def source(self, distance: Distance) -> CostSource:
        """What the line of a distance rests on."""
        if self.lines[distance].num_seen:
            return "learned"
        if distance in self._kept:
            return "kept"
        return "measured" if distance in self._measured else "default"

    def measured_rate(self, distance: Distance) -> float | None:
        """Bytes of KV a second over links of this distance, as workers have measured them."""
        link = self._measured.get(distance)
        return None if link is None else 1 / link.byte_s

    def explain(self, prefill: WorkerView, decode: WorkerView) -> str:
        """What the cost between two workers follows from, for people."""
        distance = self.distance(prefill, decode)
        return f"{distance}, {self.source(distance)}"

    def predict_usual(self, num_tokens: float) -> float:
        """Exposed seconds at the distance at which most pairs have handed over."""
        most = max(Distance, key=lambda each: self.lines[each].num_workers)
        usual = most if self.lines[most].num_workers else Distance.SAME_HOST
        return self.lines[usual].predict(num_tokens)

    def expect(
        self, distances: NDArray[np.int8], num_tokens: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Exposed seconds over each of `distances` `[…, num]`, pairs' factors left out.

        `num_tokens` `[num]` are handed over.
        """
        expected = np.array([line.each for line in self.lines]).take(distances)
        expected *= num_tokens
        expected += np.array([line.fixed for line in self.lines]).take(distances)
        return expected

    def factors(self, pairs: Iterable[tuple[WorkerId, WorkerId]]) -> list[float]:
        """How much slower than their distance's mean these pairs are."""
        found = map(self.pairs.get, pairs)
        return [1.0 if cost is None else cost.factor for cost in found]

    def cost_of(self, prefill: WorkerView, decode: WorkerView) -> WorkerCost:
        """The pair's own cost: exposed seconds of one handoff. It learns by `observe`."""
        key = prefill.id, decode.id
        cost = self.pairs.get(key)
        if cost is None:
            if len(self.pairs) >= MOST_PAIRS:
                self._forget_unused()
            cost = self.pairs[key] = WorkerCost(self.lines[self.distance(prefill, decode)])
        return cost

    def predict_load(self, source: WorkerView, decode: WorkerView, num_tokens: float) -> float:
        """Seconds for KV that is cached at `source`: no computation hides a part of it."""
        pair, distance = (source.id, decode.id), self.distance(source, decode)
        cost = self.pairs.get(pair) or WorkerCost(self.lines[distance])
        link = self.links.get(pair) or self._link(distance)
        moved_s = num_tokens * self._shape.bytes_per_token * link.kv_byte_s
        if pair in self.links and not cost.line.num_seen:
            return cost.predict(0) + moved_s  # the line is a guess from other links, too
        return max(cost.predict(num_tokens), cost.predict(0) + moved_s)

    def observe(self, cost: WorkerCost, num_tokens: float, seconds: float) -> None:
        """A handoff between the workers of `cost` took so long, beyond the prompt's end."""
        cost.observe(num_tokens, seconds)
        self._guess_again()

    def forget_pairs(self) -> None:
        """A worker has moved, or names are those of incarnations that are over."""
        for cost in self.pairs.values():
            cost.leave()
        self.pairs.clear()

    def forget(self, workers: frozenset[WorkerId]) -> None:
        """These are gone, and with them the costs of their pairs."""
        for pair in [pair for pair in self.pairs if not workers.isdisjoint(pair)]:
            self.pairs.pop(pair).leave()
        self.links = {p: link for p, link in self.links.items() if workers.isdisjoint(p)}

    def _forget_unused(self) -> None:
        self.pairs = {pair: cost for pair, cost in self.pairs.items() if cost.num_seen}
        if len(self.pairs) > MOST_PAIRS // 2:
            self.forget_pairs()

    def _guess_again(self) -> None:
        for distance, guess in self._kept.items():
            self.lines[distance].guess_again(guess)
        known = [each for each in Distance if self.source(each) in {"learned", "kept"}]
        for distance in Distance:
            if distance not in known:
                nearest = min(known, key=lambda other: abs(other - distance), default=None)
                self.lines[distance].guess_again(self._guess(distance, nearest))

    def _guess(self, distance: Distance, learned: Distance | None = None) -> tuple[float, float]:
        """By its link, and by what a known line has beyond what its own link explains."""
        own = self._guess_by_link(distance)
        if learned is None:
            return own
        line, its = self.lines[learned], self._guess_by_link(learned)
        found = []
        for mine, seen, explained in zip(own, (line.fixed, line.each), its, strict=True):
            guess = max(0.0, mine + seen - explained)
            if distance not in self._measured:
                guess = max(guess, seen) if distance > learned else min(guess, seen)
            found.append(guess)
        return found[0], found[1]

    def _guess_by_link(self, distance: Distance) -> tuple[float, float]:
        token_s = self._prefill.each * self._prefill.work(TYPICAL_TOKENS) / TYPICAL_TOKENS
        return guess_exposed(self._link(distance), self._shape, token_s)

    def _link(self, distance: Distance) -> LinkCost:
        return self._measured.get(distance, DEFAULTS[distance])
