"""How fast simulated workers are, and how much they hold."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e4)]
_Some: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e4)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class SimulatedCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds, tokens. A prompt takes `prefill_s`, and `prefill_token_s` for each uncached token.

    Attention adds `prefill_context_s` to a token for each token before it. A prompt is computed in
    equal pieces of about `chunk_tokens`, with a step between two of them:
    `step_s`, and `step_answer_s` for each answer beyond the first `step_free_answers` (below which
    reading the weights is what takes time). A handoff takes `handoff_s`, and
    `handoff_token_s` for each token that the decode worker has not cached. A worker holds the KV of
    `kv_tokens`, in blocks of `block_size`; gateways receive its events after `event_delay_s`,
    among them what its queued prompts will store if it `reports_queued`, as embedded workers do.
    All workers share `num_processors`: each is slower while more of them are busy; None: each has
    its own. Each `workers_per_device` of them share a device of one processor, and report that
    they do; None: that is not known of any. Each `workers_per_store` of them share a store of
    `store_tokens`; None: all share one. To load from it takes `load_s`, and `load_token_s` for each
    token. `jitter` is the standard deviation of the logarithm of what each piece and step takes,
    over its mean.
    """

    prefill_s: _Seconds = 0.0
    prefill_token_s: _Some = 2.2e-4
    prefill_context_s: _Seconds = 0.0
    chunk_tokens: _Count = 320
    step_s: _Some = 0.010
    step_answer_s: _Seconds = 0.0004
    step_free_answers: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    handoff_s: _Seconds = 0.010
    handoff_token_s: _Seconds = 1e-6
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 16
    kv_tokens: _Count = 1 << 18
    event_delay_s: _Seconds = 0.05
    reports_queued: bool = True
    num_processors: _Count | None = None
    workers_per_device: _Count | None = None
    store_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    workers_per_store: _Count | None = None
    load_s: _Seconds = 0.005
    load_token_s: _Seconds = 2e-5
    jitter: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.0

    @property
    def num_blocks(self) -> int:
        """That a worker holds."""
        return self.kv_tokens // self.block_size

    def step_takes_s(self, num_answers: int) -> float:
        """Seconds of a step of so many answers."""
        return self.step_s + self.step_answer_s * max(0, num_answers - self.step_free_answers)

    def prefill_takes_s(self, num_uncached: int, num_before: int) -> float:
        """Seconds to compute so many tokens behind so many others."""
        each_s = self.prefill_token_s + self.prefill_context_s * (num_before + num_uncached / 2)
        return self.prefill_s + each_s * num_uncached

    def load_takes_s(self, num_tokens: int) -> float:
        """Seconds to load so many tokens."""
        return self.load_s + self.load_token_s * num_tokens

    def count_blocks(self, num_tokens: int) -> int:
        """That so many tokens take."""
        return -(-num_tokens // self.block_size)
