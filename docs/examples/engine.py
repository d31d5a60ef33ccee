"""An engine that repeats the prompt: one thread, no KV worth a handoff."""

from __future__ import annotations

import queue
import threading

import msgspec

from baton.engines.interface import (
    Colocated,
    EngineInfo,
    EngineStats,
    FinishReason,
    NewToken,
    RequestFailed,
)
from baton.errors import EngineError
from baton.events.journal import CacheJournal
from baton.handoff.interface import SampledToken
from baton.kv.layout import KVLayout
from baton.registry import Plugin


class EchoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Set by `[engine]`."""

    max_context_tokens: int = 1024


class EchoEngine:
    """See `Engine`. Its worker has the role `both`: prefill and decode requests are refused."""

    def __init__(self, options, context) -> None:
        layout = KVLayout.gqa(
            num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32"
        )
        self.info = EngineInfo(
            engine="echo",
            model_path=str(context.model),
            fingerprint="echo",
            layout=layout,
            num_blocks=1,
            max_context_tokens=options.max_context_tokens,
            vocab_size=2048,
            eos_token_ids=(),
        )
        self.region = context.allocate([(1, layout.page_bytes(layer)) for layer in range(1)])
        self.peer_mappings = None
        self.journal = CacheJournal()  # it caches no prefix
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._cancelled: set = set()
        self._thread = threading.Thread(target=self._run, name="echo-engine", daemon=True)

    def start(self, sink, handoff) -> None:
        self._sink = sink
        self._thread.start()

    def wake(self) -> None: ...

    def submit(self, request) -> None:
        self._inbox.put(request)

    def cancel(self, request) -> None:
        self._cancelled.add(request)

    def commit_first_token(self, ticket, token):
        return token

    def stats(self) -> EngineStats:
        return EngineStats(self._inbox.qsize(), 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (request := self._inbox.get()) is not None:
            if not isinstance(request.kind, Colocated):
                self._sink([RequestFailed(request.id, EngineError("echo hands nothing over"))])
                continue
            answer = request.prompt_ids[: request.sampling.max_tokens]
            for index, token in enumerate(answer, start=1):
                if request.id in self._cancelled:
                    break
                finish = FinishReason.LENGTH if index == len(answer) else None
                self._sink([NewToken(request.id, SampledToken(int(token)), 0, finish)])


PLUGIN = Plugin(EchoOptions, lambda options: lambda context: EchoEngine(options, context))
