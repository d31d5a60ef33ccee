"""The engine as other threads use it: a thread that runs `EngineLoop`."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, assert_never

import torch

from baton.engines.first_tokens import FirstTokens
from baton.engines.gpu.device_region import allocate_device_region
from baton.engines.interface import EngineInfo, EngineStats
from baton.engines.transformers.attention import builds_scores
from baton.engines.transformers.loading import LoadedModel, load_model
from baton.engines.transformers.loop import EngineLoop
from baton.engines.transformers.model_runner import ModelRunner, PagedModel
from baton.engines.transformers.pages import allocate_pages
from baton.engines.transformers.scheduler import Limits, Scheduler
from baton.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    TransferError,
    mapped,
)
from baton.events.journal import CacheJournal
from baton.kv.copies import count_blocks
from baton.kv.pool import BlockPool
from baton.protocol.worker_http import MAX_SPLIT_TOKENS, SPLIT_UNIT
from baton.transfer.region import allocate_shared_region, release_region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.clock import Clock
    from baton.engines.interface import EngineContext, GenerationRequest, UpdateSink
    from baton.engines.transformers.options import TransformersOptions
    from baton.handoff.interface import HandoffPort, SampledToken
    from baton.ids import RequestId, TicketId
    from baton.transfer.devices.extents import AllocateRegion


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer this request."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Extend:
    """Append tokens to a standby request."""

    request: RequestId
    token_ids: tuple[int, ...]
    generates: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget this request."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Stop:
    """Fail what is unfinished and end."""


Command: TypeAlias = Submit | Extend | Cancel | Stop


class CommandQueue:
    """A queue of commands with one reader. Thread-safe, but submissions are put one at a time.

    A `SimpleQueue`, in which None only wakes: a `threading.Condition` costs ten times as much.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | None] = SimpleQueue()
        self._taken: list[Command] = []
        self._is_woken = False
        self._num_put = self._num_seen = 0

    @property
    def num_submissions(self) -> int:
        """Requests that the reader has not carried out yet: see `note_seen`."""
        return self._num_put - self._num_seen

    def put(self, command: Command) -> None:
        """Append a command and wake the reader."""
        if isinstance(command, Submit):
            self._num_put += 1
        self._queue.put(command)

    def wake(self) -> None:
        """Wake the reader for another reason than a command."""
        if not self._is_woken:
            self._is_woken = True
            self._queue.put(None)

    def take(self) -> list[Command]:
        """All commands, in order; does not wait."""
        self._is_woken = False  # first: who wakes the reader from now on wakes it again
        with suppress(Empty):
            while True:
                self._take(self._queue.get_nowait())
        commands, self._taken = self._taken, []
        return commands

    def note_seen(self) -> None:
        """The reader has carried out one submission that it took."""
        self._num_seen += 1

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there is a command, `wake` is called, or the timeout passes."""
        if self._is_woken:  # since `take` began, which may have taken the wake-up with it
            return
        limit_s = threading.TIMEOUT_MAX if timeout_s is None else timeout_s
        with suppress(Empty):
            self._take(self._queue.get(timeout=min(limit_s, threading.TIMEOUT_MAX)))

    def _take(self, command: Command | None) -> None:
        if command is not None:
            self._taken.append(command)


_log = logging.getLogger(__name__)


class TransformersEngine:
    """See `Engine`. Close every transport that exposes `region` before `stop`."""

    def __init__(
        self,
        options: TransformersOptions,
        loaded: LoadedModel,
        *,
        path: str,
        clock: Clock,
        allocate: AllocateRegion = allocate_shared_region,
    ) -> None:
        layout = loaded.shape.to_layout(options.block_size, loaded.dtype)
        num_blocks = options.num_blocks or options.kv_cache_bytes // layout.block_bytes
        if num_blocks == 0:
            raise ConfigError(
                f"kv_cache_bytes = {options.kv_cache_bytes}, but one block of this model takes "
                f"{layout.block_bytes} bytes; raise it or lower block_size"
            )
        max_context_tokens = _fit_context(options, loaded, num_blocks, layout.block_bytes)
        pages = allocate_pages(
            loaded.shape, layout, num_blocks, loaded.model.device, allocate=allocate
        )
        min_handoff_tokens = options.min_handoff_tokens or options.block_size
        # What gateways assume of workers that split a prompt: see `baton.router.split_prompts`.
        splits_prompts = (
            pages.lands_in_place
            and not builds_scores(loaded.model)
            and SPLIT_UNIT % options.block_size == 0
            and min_handoff_tokens <= SPLIT_UNIT
        )
        self.region, self.peer_mappings = pages.region, pages.peer_mappings
        self.info = EngineInfo(
            engine="transformers",
            model_path=path,
            fingerprint=loaded.fingerprint,
            layout=layout,
            num_blocks=num_blocks,
            max_context_tokens=max_context_tokens,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            max_running=options.max_num_seqs,
            max_step_tokens=options.max_batch_tokens,
            num_landing_layers=layout.num_layers if splits_prompts else 0,
            sampling_defaults=loaded.sampling_defaults,
            model_context_tokens=loaded.max_context_tokens,
        )
        self._options, self._clock = options, clock
        self._model = PagedModel(loaded.model, loaded.shape, pages, options.block_size)
        self._pages = pages
        self._memory = ExitStack()
        self._memory.callback(self._release_memory)
        self._command_queue = CommandQueue()
        self._first_tokens = FirstTokens()
        self._lock = threading.Lock()
        self._live: set[RequestId] = set()  # guarded by _lock
        self._thread: threading.Thread | None = None
        self._failure: EngineError | None = None
        self._stats = _zero_stats(num_blocks)
        self.journal = CacheJournal()
        self._scheduler = Scheduler(
            BlockPool(num_blocks, self.journal.add_removed),
            Limits(
                max_batch_tokens=options.max_batch_tokens,
                max_num_seqs=options.max_num_seqs,
                min_handoff_tokens=min_handoff_tokens,
                max_held_blocks=int(options.max_held_share * num_blocks),
                max_kept_blocks=int(options.max_kept_share * num_blocks),
                max_split_tokens=MAX_SPLIT_TOKENS if splits_prompts else 0,
            ),
            layout.layers,
            self.journal,
        )

    def build_loop(self, sink: UpdateSink, handoff: HandoffPort) -> EngineLoop:
        """The loop that `start` gives a thread; tests and simulations call its `step`."""
        return EngineLoop(
            info=self.info,
            runner=ModelRunner(self._model, handoff, self._clock, self.info.eos_token_ids),
            pages=self._pages,
            scheduler=self._scheduler,
            handoff=handoff,
            sink=sink,
            on_end=self._forget,
            first_tokens=self._first_tokens,
            clock=self._clock,
        )

    def start(self, sink: UpdateSink, handoff: HandoffPort) -> None:
        self._thread = threading.Thread(
            target=self._main,
            args=(self.build_loop(sink, handoff),),
            name="baton-engine",
            daemon=True,
        )
        self._thread.start()

    def is_alive(self) -> bool:
        return self._failure is None and self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        self._command_queue.wake()

    def submit(self, request: GenerationRequest) -> None:
        self._check(request)
        with self._lock:
            if self._failure is not None:
                raise EngineError(str(self._failure))
            if request.id in self._live:
                raise InvalidRequestError(f"a request {request.id} is being answered already")
            # In this order: one that is being taken into the scheduler counts twice, not nowhere.
            num_waiting = self._command_queue.num_submissions + self._scheduler.num_waiting
            if num_waiting >= self._options.max_waiting:
                raise OverloadedError(f"{self._options.max_waiting} requests are waiting already")
            self._live.add(request.id)
            self._command_queue.put(Submit(request))

    def extend(self, request: RequestId, token_ids: Sequence[int], *, generates: bool) -> None:
        if any(not 0 <= token < self.info.vocab_size for token in token_ids):
            raise InvalidRequestError(
                f"token ids go from 0 to {self.info.vocab_size - 1}", param="token_ids"
            )
        self._command_queue.put(Extend(request, tuple(token_ids), generates))

    def cancel(self, request: RequestId) -> None:
        self._command_queue.put(Cancel(request))

    def commit_first_token(self, ticket: TicketId, token: SampledToken) -> SampledToken:
        return self._first_tokens.commit(ticket, token)

    def stats(self) -> EngineStats:
        return self._stats

    def stop(self, timeout_s: float) -> None:
        self._set_failure(EngineError("the engine was stopped"))
        thread, self._thread = self._thread, None
        if thread is not None:
            self._command_queue.put(Stop())
            thread.join(timeout_s)
            if thread.is_alive():
                _log.error("the engine did not stop in %.1f s; its memory stays", timeout_s)
                return
        self._memory.close()

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what could never be answered, or would fail the others of its step."""
        vocab_size = self.info.vocab_size
        if not len(request.prompt_ids):
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= vocab_size:
            raise InvalidRequestError(f"token ids go from 0 to {vocab_size - 1}", param="prompt")
        if any(not 0 <= token < vocab_size for token in request.sampling.stop_token_ids):
            raise InvalidRequestError(
                f"token ids go from 0 to {vocab_size - 1}", param="stop_token_ids"
            )
        num_tokens = len(request.prompt_ids) + request.sampling.max_tokens
        if num_tokens > self.info.max_context_tokens:
            raise ContextLengthError(
                f"the prompt has {len(request.prompt_ids)} tokens and max_tokens is "
                f"{request.sampling.max_tokens}; together at most {self.info.max_context_tokens} "
                "are possible",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _release_memory(self) -> None:
        self._pages.release()
        del self._model, self._pages
        release_region(self.region)

    def _forget(self, request: RequestId) -> None:
        with self._lock:
            self._live.discard(request)

    def _main(self, loop: EngineLoop) -> None:
        """The engine's thread."""
        if self._options.num_threads is not None:
            torch.set_num_threads(self._options.num_threads)  # OpenMP counts them for each thread
        try:
            while self._run_commands(loop):
                was_busy = loop.step()
                self._stats = loop.stats()
                if not was_busy:
                    self._command_queue.wait(loop.compute_wait_timeout_s())
            loop.fail_all(EngineError("the worker is stopping"))
        except Exception:  # noqa: BLE001 - reported to all requests; the thread has no caller
            _log.exception("the engine's thread died")
            error = EngineError("the engine's thread died; restart the worker")
            self._set_failure(error)
            unseen = [c.request.id for c in self._command_queue.take() if isinstance(c, Submit)]
            loop.abandon(error, unseen)

    def _set_failure(self, error: EngineError) -> None:
        with self._lock:
            self._failure = error

    def _run_commands(self, loop: EngineLoop) -> bool:
        """Carry out all commands; whether to go on."""
        for command in self._command_queue.take():
            match command:
                case Submit(request):
                    loop.submit(request)
                    self._command_queue.note_seen()
                case Extend(request_id, token_ids, generates):
                    loop.extend(request_id, token_ids, generates=generates)
                case Cancel(request_id):
                    loop.cancel(request_id)
                case Stop():
                    return False
                case _:
                    assert_never(command)
        return True


def load_engine(options: TransformersOptions, context: EngineContext) -> TransformersEngine:
    """Load a model; see `EngineFactory`."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    with mapped({TransferError: ConfigError}):  # there is not enough memory for the pages
        loaded = load_model(context.model, options)
        allocate = context.allocate
        if context.memory == "cuda":
            allocate = partial(allocate_device_region, loaded.model.device)
        return TransformersEngine(
            options, loaded, path=str(context.model), clock=context.clock, allocate=allocate
        )


def _fit_context(
    options: TransformersOptions, loaded: LoadedModel, num_blocks: int, block_bytes: int
) -> int:
    """The longest prompt and answer together: the model's context, as far as there is KV for it.

    Raises:
        ConfigError: there is too little KV for the context that the operator has set.
    """
    wanted, fitting = loaded.max_context_tokens, num_blocks * options.block_size
    if wanted <= fitting:
        return wanted
    needed = count_blocks(wanted, options.block_size)
    advice = (
        f"raise engine.kv_cache_bytes to {needed * block_bytes}"
        if options.num_blocks is None
        else f"raise engine.num_blocks to {needed}"
    )
    if options.max_context_tokens is not None:
        raise ConfigError(
            f"max_context_tokens = {wanted}, but there is KV for {fitting} tokens: lower it, or "
            f"{advice}"
        )
    _log.warning(
        "prompt and answer have %d tokens at most, for which there is KV; for the model's context "
        "of %d tokens %s",
        *(fitting, wanted, advice),
    )
    return fitting


def _zero_stats(num_blocks: int) -> EngineStats:
    """The stats of an engine that was never asked."""
    return EngineStats(
        num_waiting=0,
        num_running=0,
        num_awaiting_kv=0,
        num_blocks=num_blocks,
        num_free_blocks=num_blocks,
        num_reserved_blocks=0,
        num_quarantined_blocks=0,
        num_cached_blocks=0,
        num_preemptions=0,
        computed_prompt_tokens=0,
        cached_prompt_tokens=0,
        received_prompt_tokens=0,
        output_tokens=0,
    )
