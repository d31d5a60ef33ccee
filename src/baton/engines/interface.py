"""The contract between a worker process and the engine inside it.

Tokens go in, tokens come out: text, chat templates and OpenAI's JSON belong to the worker. The
engine runs on a thread of its own; it reports to the one `UpdateSink` it is started with.

An engine that brings a server of its own is an `EngineServer` instead: it answers OpenAI's API
itself, and Baton adds the process around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, Protocol, TypeAlias, runtime_checkable

import msgspec
from msgspec import Meta

from baton.kv.layout import KVLayout
from baton.protocol.worker_http import StoreLoads
from baton.registry import Registry
from baton.telemetry.metrics import HeldBlockSeconds
from baton.transfer.region import allocate_shared_region

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from baton.auth.credentials import Credentials
    from baton.auth.ticket import Ticket
    from baton.clock import Clock, Instant
    from baton.config.sections import Config
    from baton.errors import BatonError
    from baton.events.journal import CacheJournal
    from baton.handoff.interface import HandoffPort, SampledToken
    from baton.ids import Epoch, RequestId, TicketId, WorkerId
    from baton.telemetry.process_status import StatusReporter
    from baton.telemetry.trace import RequestSpan
    from baton.transfer.devices.extents import AllocateRegion
    from baton.transfer.interface import MemoryKind, PagedRegion
    from baton.transfer.peer_mappings import PeerMappings


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Checked by the worker before it arrives here.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch them off. `seed` None draws a random
    one at submission by the worker of the decode request; with a seed, token number i of the answer
    depends on (seed, i) and the logits alone. `num_logprobs` None reports none; 0 the chosen
    token's only. `stop_token_ids` and, unless `ignore_eos`, the model's own end tokens finish the
    answer, but not before `min_tokens`. `first_index` is the number, in the answer, of the first
    token that is chosen here: those before it are the last ones of the prompt, and count no more.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    num_logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    first_index: int = 0


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's checkpoint wants tokens chosen where a request names nothing."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0


@dataclass(frozen=True, slots=True)
class Colocated:
    """Prefill and decode here."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute the KV and the first token for the decode worker that the ticket names.

    In mode pull the answer comes when they are held for it, else when it has them. Where the ticket
    wants the first token early it comes at once, with a `finish` only if it ends the answer.
    """

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Receive the KV from the prefill worker that the ticket names, then decode."""

    ticket: Ticket


RequestKind: TypeAlias = Colocated | PrefillRequest | DecodeRequest


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt. `prompt_ids` has shape `[num_tokens]`, at least one token.

    `is_standby`: it computes its tokens and samples none, until `StandbyEngine.extend` has it
    generate.
    """

    id: RequestId
    prompt_ids: NDArray[np.int32]
    sampling: SamplingParams
    kind: RequestKind
    tenant_salt: str
    deadline: Instant
    trace: RequestSpan
    is_standby: bool = False


class FinishReason(StrEnum):
    """Why an answer ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token of an answer; `finish` is set on the last one.

    `hidden` marks a token that ended the answer and is not part of its text (an end token). A
    prefill request gets exactly one NewToken, with `finish` LENGTH unless it is an early one.
    """

    request: RequestId
    token: SampledToken
    num_cached_tokens: int
    finish: FinishReason | None = None
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """An answer ended without a finish reason."""

    request: RequestId
    error: BatonError


@dataclass(frozen=True, slots=True)
class TokensComputed:
    """A standby request has the KV of its first `num_tokens` tokens, which are all it knows."""

    request: RequestId
    num_tokens: int


EngineUpdate: TypeAlias = NewToken | RequestFailed | TokensComputed
UpdateSink: TypeAlias = Callable[[Sequence[EngineUpdate]], None]
"""Called on the engine's thread, once a step: must not block."""


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot for metrics and admission.

    Each token of a prompt counts once: as cached when the prompt is admitted, as received when it
    has landed, or as computed when the whole prompt is. Not what is computed again: after a
    preemption, or for a first token that did not come with the KV.

    `num_held_blocks` are those of prompts whose decode workers have yet to pull them; `num_sending`
    counts handoffs of all modes for which blocks are pinned here, `held_block_s` is of all modes,
    too, up to now but for what is held still. `store_loads` None: no store is ever asked.
    """

    num_waiting: int
    num_running: int
    num_awaiting_kv: int
    num_blocks: int
    num_free_blocks: int
    num_reserved_blocks: int
    num_quarantined_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    received_prompt_tokens: int
    output_tokens: int
    num_held_blocks: int = 0
    num_sending: int = 0
    num_exported_blocks: int = 0
    num_imported_blocks: int = 0
    held_block_s: HeldBlockSeconds = {}
    store_loads: StoreLoads | None = None


class EngineInfo(msgspec.Struct, frozen=True):
    """What a worker and its peers must know about a loaded model.

    `max_running`: requests that it works on at once, `max_step_tokens`: tokens of one step; None
    where it has no such limit. `num_landing_layers`: see `WorkerInfo`. `model_context_tokens`: the
    model's or the operator's context, for which there may be too little KV; None is
    `max_context_tokens`, for which there is enough.
    """

    engine: str
    model_path: str
    fingerprint: str
    layout: KVLayout
    num_blocks: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_running: int | None = None
    max_step_tokens: int | None = None
    num_landing_layers: int = 0
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    model_context_tokens: int | None = None


class Engine(Protocol):
    """A loaded model that answers requests. Thread-safe; nothing here blocks but `stop`.

    With `peer_mappings` it exports blocks of `region`, and attends over those of peers. `journal`
    records what its prefix cache holds.
    """

    info: EngineInfo
    region: PagedRegion
    peer_mappings: PeerMappings | None
    journal: CacheJournal

    def start(self, sink: UpdateSink, handoff: HandoffPort) -> None:
        """Start the engine's thread. Once."""
        ...

    def wake(self) -> None:
        """The handoff has events: look at `HandoffPort.poll` soon."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; updates follow through the sink until one that ends it.

        Raises:
            OverloadedError: the queue is full.
            ContextLengthError: prompt and max_tokens can never fit.
        """
        ...

    def cancel(self, request: RequestId) -> None:
        """Forget a request and free what it holds; no update follows. Unknown ids are ignored."""
        ...

    def commit_first_token(self, ticket: TicketId, token: SampledToken) -> SampledToken:
        """The first token of a decode request: this one, unless another was committed before.

        For tickets that want it early: the request goes on from what is returned.
        """
        ...

    def stats(self) -> EngineStats:
        """A snapshot, at most one step old."""
        ...

    def is_alive(self) -> bool:
        """Whether the engine's thread runs: False before `start`, after `stop`, and if it died."""
        ...

    def stop(self, timeout_s: float) -> None:
        """End the thread, failing what is unfinished; releases memory. Idempotent."""
        ...


@runtime_checkable
class StandbyEngine(Protocol):
    """What an `Engine` has besides, if it takes requests with `is_standby`."""

    def extend(self, request: RequestId, token_ids: Sequence[int], *, generates: bool) -> None:
        """Append tokens, at least one, to a standby request, as if it had sampled them.

        It computes them in its next step; no `NewToken` reports them. With `generates` it is no
        standby any more: what follows the last of them is sampled. Unknown ids are ignored.

        Raises:
            InvalidRequestError: the model has no such tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What every engine is built from, besides its own options.

    `allocate` makes the memory that peers on this host can map: its KV belongs there. With `memory`
    "cuda" KV belongs in the memory of the engine's GPU instead: peers reach nothing else.
    """

    model: Path
    clock: Clock
    allocate: AllocateRegion = allocate_shared_region
    memory: MemoryKind = "shared"


class EngineFactory(Protocol):
    """What an entry point of `baton.engines` builds from its options."""

    def __call__(self, context: EngineContext) -> Engine:
        """Load the model.

        Raises:
            ConfigError: the model cannot be served by this engine, with the reason and a remedy.
        """
        ...


ENGINES: Final[Registry[EngineFactory]] = Registry("baton.engines")


class ServerMembership(Protocol):
    """Announces a worker whose engine has a server of its own, and states whether it may serve."""

    def open(self, lease_file: Path) -> None:
        """Create the file from which agents read until when they may write (`LeaseFile`)."""
        ...

    def why_fenced(self) -> str | None:
        """Why the worker may serve nothing, now; None where it may."""
        ...

    async def run(
        self, worker: WorkerId, epoch: Epoch, url: str, on_fenced: Callable[[str], None]
    ) -> int:
        """Announce until cancelled. `on_fenced` gets the reason each time the worker is fenced.

        Returns where another epoch has the name: the exit code with which this process must end.
        """
        ...

    async def leave(self) -> None:
        """Report the end of the worker to gateways."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """What every engine server is built from, besides its own options.

    `listener` is bound to `url` and does not listen yet: whoever connects before the server is
    ready is refused. `run_directory` is this worker's alone, for sockets; it may not exist yet.
    `membership`: of a worker that announces itself.
    """

    config: Config
    model: Path
    credentials: Credentials
    listener: socket.socket
    url: str
    status_reporter: StatusReporter
    run_directory: Path
    membership: ServerMembership | None = None

    @property
    def served_model_name(self) -> str:
        """The model's name in the API."""
        return self.config.worker.served_model_name or self.model.name


class EngineServer(Protocol):
    """What an entry point of `baton.engine_servers` builds from its options."""

    def __call__(self, context: ServerContext) -> None:
        """Serve until SIGTERM or SIGINT, then drain. Blocks; belongs on the main thread.

        Announces loading, ready and draining. May leave the process by itself, with its exit code.

        Raises:
            ConfigError: the model cannot be served so, with the reason and a remedy.
            EngineError: the engine ended by itself.
        """
        ...


ENGINE_SERVERS: Final[Registry[EngineServer]] = Registry("baton.engine_servers")
