"""An engine's turns in one thread, on small random models: no sleeping, no socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging as transformers_logging

from baton.auth.ticket import Ticket, WorkerRef
from baton.clock import Instant
from baton.engines.interface import (
    Colocated,
    FinishReason,
    GenerationRequest,
    NewToken,
    RequestFailed,
    SamplingParams,
)
from baton.engines.transformers.attention import register
from baton.engines.transformers.engine import TransformersEngine
from baton.engines.transformers.loading import LoadedModel, verify_paged_attention
from baton.engines.transformers.options import TransformersOptions
from baton.engines.transformers.shape import discover_shape
from baton.ids import Epoch, RequestId, TicketId, WorkerId
from baton.telemetry.trace import RequestSpan
from baton.testing.clocks import ManualClock
from tests.tickets import issue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from baton.engines.interface import EngineUpdate, RequestKind
    from baton.handoff.interface import (
        HandoffEvent,
        HandoffPort,
        PrefixStore,
        ReceiveOrder,
        SampledToken,
        SendOrder,
    )

transformers_logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny tensors: a second thread only waits

VOCAB_SIZE = 97
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LOCAL_AND_GLOBAL = {
    **_COMMON,
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts_per_tok": 2}
_PLAIN = {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}
FAMILIES: dict[str, Callable[[], object]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=8),
    "gemma2": lambda: Gemma2Config(**_LOCAL_AND_GLOBAL),
    "gemma3": lambda: Gemma3TextConfig(**_LOCAL_AND_GLOBAL),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=2
    ),
    "opt": lambda: OPTConfig(**_PLAIN, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_neox": lambda: GPTNeoXConfig(**_PLAIN),
    "mixtral": lambda: MixtralConfig(**_COMMON, **_EXPERTS, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, **_EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=24
    ),
    "gpt_oss": lambda: GptOssConfig(**_LOCAL_AND_GLOBAL, **_EXPERTS, num_local_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4},
        **_EXPERTS,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def make_model(family: str) -> torch.nn.Module:
    """A small model with weights large enough that its answers vary."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def generate(model: torch.nn.Module, prompt: NDArray[np.int32], num_tokens: int) -> list[int]:
    """What transformers itself answers, greedily, without ever stopping."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, len(prompt) :].tolist()


def prepare(model: torch.nn.Module, eos_token_ids: tuple[int, ...] = ()) -> LoadedModel:
    """What `load_model` makes of a folder, made of a model in memory."""
    register()
    shape = discover_shape(model)
    verify_paged_attention(model, shape, "float32")
    return LoadedModel(model, shape, "float32", "f" * 64, VOCAB_SIZE, 256, eos_token_ids)


@cache
def tiny_llama() -> LoadedModel:
    """One model that all tests of this folder share."""
    return prepare(make_model("llama"))


def make_prompt(num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    """Random token ids, `[num_tokens]`; a longer prompt of one seed begins with a shorter one."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, 200).astype(np.int32)[:num_tokens]


def make_ticket(number: int = 1) -> Ticket:
    """A ticket as the gateway gives out."""
    prefill, decode = (
        WorkerRef(WorkerId(name), Epoch(digit * 32), "127.0.0.1:1")
        for name, digit in (("prefill-0", "a"), ("decode-0", "b"))
    )
    return Ticket(
        TicketId(number.to_bytes(16, "big")), f"r{number}", prefill, decode, "push", issue(600)
    )


@dataclass
class RecordingHandoff:
    """A `HandoffPort` that writes down what it is told, and says what it is given to say."""

    calls: list[str] = field(default_factory=list)
    kept: list[TicketId] = field(default_factory=list)
    sends: list[SendOrder] = field(default_factory=list)
    receives: list[ReceiveOrder] = field(default_factory=list)
    ready: list[tuple[TicketId, int, int]] = field(default_factory=list)
    uncomputed: list[tuple[TicketId, ...]] = field(default_factory=list)
    first_tokens: dict[TicketId, SampledToken] = field(default_factory=dict)
    events: list[HandoffEvent] = field(default_factory=list)
    prefixes: PrefixStore | None = None

    def renew_lease(self, ticket: Ticket) -> None:
        self.kept.append(ticket.id)

    def start_receive(self, order: ReceiveOrder) -> None:
        self.calls.append("start_receive")
        self.receives.append(order)

    def start_send(self, order: SendOrder) -> None:
        self.calls.append("start_send")
        self.sends.append(order)

    def report_progress(self, prompts: Sequence[Ticket]) -> None:
        self.uncomputed.append(tuple(ticket.id for ticket in prompts))

    def layer_ready(
        self, tickets: Sequence[tuple[TicketId, int]], layer: int, after: object = None
    ) -> None:
        self.ready += [(ticket, stop, layer) for ticket, stop in tickets]

    def prefill_done(self, ticket: TicketId, first_token: SampledToken) -> None:
        self.calls.append("prefill_done")
        self.first_tokens[ticket] = first_token

    def decline(self, ticket: Ticket, reason: str) -> None:
        self.calls.append("decline")

    def abort(self, ticket: TicketId, reason: str) -> None:
        self.calls.append("abort")

    def cancel_oldest_ungranted(self, tickets: Sequence[TicketId], reason: str) -> None:
        self.calls.append("cancel_oldest_ungranted")

    def poll(self) -> list[HandoffEvent]:
        events, self.events = self.events, []
        return events


class Driver:
    """Submits to an engine's loop and turns it by hand."""

    def __init__(
        self, loaded: LoadedModel, handoff: HandoffPort | None = None, **options: object
    ) -> None:
        self.clock, self.tenant, self.loaded = ManualClock(), "tenant", loaded
        self.handoff = handoff or RecordingHandoff()
        self.engine = TransformersEngine(
            TransformersOptions(**{"num_blocks": 64, **options}),
            loaded,
            path="nowhere",
            clock=self.clock,
        )
        self.updates: list[EngineUpdate] = []
        self.loop = self.engine.build_loop(self.updates.extend, self.handoff)
        self.traces: dict[str, RequestSpan] = {}

    def submit(
        self,
        name: str,
        prompt: NDArray[np.int32],
        leg: RequestKind | None = None,
        *,
        timeout_s: float = 100.0,
        is_standby: bool = False,
        **sampling: object,
    ) -> None:
        """Queue a request; greedy, 8 tokens and no end token unless `sampling` says otherwise."""
        trace = RequestSpan(request_id=name, worker="w", epoch="e", role="colocated")
        self.traces[name] = trace
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
        deadline = Instant(self.clock.now() + timeout_s)
        self.loop.submit(
            GenerationRequest(
                RequestId(name),
                prompt,
                params,
                leg or Colocated(),
                self.tenant,
                deadline,
                trace,
                is_standby=is_standby,
            )
        )

    def step(self, num_steps: int = 1) -> None:
        """Some turns, each followed by a look at the scheduler's invariants."""
        for _ in range(num_steps):
            self.loop.step()
            self.loop.check_invariants()

    def run(self, max_steps: int = 500) -> None:
        """Turn until there is nothing to compute."""
        for _ in range(max_steps):
            if not self.loop.step():
                return
            self.loop.check_invariants()
        raise AssertionError(f"still busy after {max_steps} turns")

    def tokens(self, name: str) -> list[int]:
        """The answer so far."""
        return [u.token.token_id for u in self._of(name) if isinstance(u, NewToken)]

    def finish(self, name: str) -> FinishReason | None:
        """Why an answer ended, if it did."""
        reasons = [u.finish for u in self._of(name) if isinstance(u, NewToken)]
        return reasons[-1] if reasons else None

    def failure(self, name: str) -> Exception | None:
        """The error that ended an answer."""
        return next((u.error for u in self._of(name) if isinstance(u, RequestFailed)), None)

    def _of(self, name: str) -> list[EngineUpdate]:
        return [u for u in self.updates if u.request == name]

    def check_all_blocks_are_free(self) -> None:
        """Nothing is held: what is not free could be evicted."""
        stats = self.loop.stats()
        assert stats.num_free_blocks == stats.num_blocks, stats
