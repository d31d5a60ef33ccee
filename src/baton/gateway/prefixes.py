"""Prompts and prefix caches of all models, for policies that look at what workers have cached."""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.auth.ticket import hash_tenant
from baton.config.cluster_key import is_loopback
from baton.errors import ConfigError
from baton.gateway.placing import find_largest_context
from baton.gateway.prompt_tokenizer import NUM_THREADS, PromptTokenizer
from baton.kv.prefix_names import PrefixNames, salt_of_adapter
from baton.net.daemon_thread import begin_call
from baton.router.prefixes import ModelPrefixes, PromptMatch
from baton.telemetry.log_limit import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from prometheus_client import Metric

    from baton.clock import Clock
    from baton.gateway.request import CompletionBody
    from baton.gateway.workers import Worker, Workers
    from baton.ids import WorkerId
    from baton.router.placement import Placement
    from baton.router.worker_prefixes import WorkerPrefixes

SECRET_BYTES: Final = 32
_PASSING: Final = frozenset({
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT
})  # fmt: skip

log = logging.getLogger(__name__)


class Prefixes:
    """Owner: the event loop's thread.

    `folders` gives models' folders, with their tokenizers, where workers' own cannot be read here.
    `num_predicted_tokens` and `num_found_tokens`, those of them that were there, are sums over all
    prompts.
    """

    def __init__(
        self,
        workers: Workers,
        folders: Mapping[str, Path],
        clock: Clock,
        registry: CollectorRegistry,
    ) -> None:
        self._workers, self._folders, self._clock = workers, folders, clock
        self._names = PrefixNames(secrets.token_bytes(SECRET_BYTES))
        self._models: dict[str, ModelPrefixes] = {}
        self._tokenizers: dict[str, PromptTokenizer | str] = {}
        self._loading: dict[str, asyncio.Task[PromptTokenizer | str]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._log = LimitedLog(log, clock)
        tokens = Counter(
            "baton_router_cached_tokens",
            "Tokens of prompts that their worker was predicted to have, that it had, and both.",
            ("kind",),
            registry=registry,
        )
        self._predicted, self._actual = tokens.labels("predicted"), tokens.labels("actual")
        self._found = tokens.labels("found")
        self.num_predicted_tokens = self.num_found_tokens = 0
        blocks = Gauge(
            "baton_router_prefix_blocks",
            "Blocks of prefixes that some worker is known to hold.",
            registry=registry,
        )
        blocks.set_function(lambda: sum(model.num_blocks for model in self._models.values()))
        stored = Gauge(
            "baton_router_stored_blocks",
            "Entries of prefixes that some store is known to hold.",
            registry=registry,
        )
        stored.set_function(lambda: sum(m.num_stored_blocks for m in self._models.values()))
        registry.register(_RefusedBlocks(self._models))

    def close(self) -> None:
        """End its threads."""
        for task in self._loading.values():
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def follow(self, model: str, worker: WorkerId) -> WorkerPrefixes:
        """What the KV events of one incarnation of a worker are applied to."""
        self._forget_other_tokenizer(model, worker)
        return self._of(model).follow(worker)

    def forget(self, model: str, worker: WorkerId) -> None:
        """Its events are not followed any more."""
        self._of(model).forget(worker)

    async def find(self, body: CompletionBody) -> PromptMatch | None:
        """Who has how much of the body's prompt; None where its tokens cannot be known."""
        tokenizer = self._tokenizers.get(body.model)
        if tokenizer is None:
            tokenizer = await self._load(body.model)
        if isinstance(tokenizer, str):
            return None
        token_ids = await tokenizer.tokenize(body)
        return None if token_ids is None else self._find(body, token_ids, tokenizer.digest)

    def find_again(self, body: CompletionBody, match: PromptMatch) -> PromptMatch:
        """Who has how much of the body's prompt by now: it was looked for a while ago."""
        if match.token_ids is None:
            return match
        return self._find(body, match.token_ids, match.tokenizer)

    def _find(
        self, body: CompletionBody, token_ids: NDArray[np.int32], tokenizer: str | None
    ) -> PromptMatch:
        salt = salt_of_adapter(hash_tenant(body.cache_salt), body.adapter)
        match = self._of(body.model).find(token_ids, salt, self._clock.now())
        return replace(match, token_ids=token_ids, tokenizer=tokenizer)

    def expect(self, model: str, match: PromptMatch, placement: Placement) -> None:
        """The prompt goes to these workers."""
        self._of(model).expect(match, placement, self._clock.now())

    def note_actual(self, predicted: int, actual: int) -> None:
        """A worker has reported how many of a prompt's tokens it had."""
        self.num_predicted_tokens += predicted
        # Of each prompt: hits that were not predicted do not hide predicted ones that are missing.
        found = min(predicted, actual)
        self.num_found_tokens += found
        self._predicted.inc(predicted)
        self._actual.inc(actual)
        self._found.inc(found)

    @property
    def not_tokenized(self) -> dict[str, str]:
        """Models whose prompts are not tokenized here, as far as is known, and why."""
        return {name: why for name, why in self._tokenizers.items() if isinstance(why, str)}

    def _of(self, model: str) -> ModelPrefixes:
        prefixes = self._models.get(model)
        if prefixes is None:
            prefixes = self._models[model] = ModelPrefixes(self._names)
        return prefixes

    async def _load(self, model: str) -> PromptTokenizer | str:
        """Once for each model, on a thread: it takes a second for a large vocabulary."""
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.create_task(self._read(model))
        tokenizer = await asyncio.shield(task)
        if self._loading.get(model) is task:
            self._tokenizers[model] = tokenizer
        return tokenizer

    async def _read(self, model: str) -> PromptTokenizer | str:
        try:
            folder = self._folder(model)
            # Not on `self._threads`: what they refuse for want of a thread they do later, too.
            room = partial(find_largest_context, self._workers, model)
            read = partial(PromptTokenizer, folder, self._clock, self._threads, room)
            return await asyncio.wrap_future(begin_call("read-tokenizer", read))
        except Exception as exc:  # noqa: BLE001 - no prompt may fail for it, whatever it is
            if not isinstance(exc, ConfigError) or _may_pass(exc):
                del self._loading[model]  # the next prompt has it read again
                why = f"the tokenizer of {model!r} cannot be read now: {exc!r}"
                self._log.warning("tokenizer", why)
                return why
            log.warning(
                "prompts of %r are not tokenized here, so cached prefixes are not found: %s",
                model,
                exc,
            )
            return str(exc)

    def _forget_other_tokenizer(self, model: str, worker: WorkerId) -> None:
        """The next prompt has it read again, if this worker has another one, or the first one."""
        known, found = self._tokenizers.get(model), self._workers.with_id(worker)
        if known is None or found is None or found.info is None:
            return
        if isinstance(known, str):
            is_other = _folder_of(found, model) is not None
        else:
            is_other = found.info.tokenizer not in {None, known.digest}
        if is_other:
            del self._tokenizers[model], self._loading[model]

    def _folder(self, model: str) -> Path:
        """The operator's, or the one that a worker on this machine has loaded.

        Raises:
            ConfigError: there is none.
        """
        if model in self._folders:
            return self._folders[model]
        for worker in self._workers.all:
            folder = _folder_of(worker, model)
            if folder is not None:
                return folder
        raise ConfigError(
            "no worker on this machine names a folder whose tokenizer can be read here; give one "
            "in [router.tokenizers]"
        )


class _RefusedBlocks(Collector):
    def __init__(self, models: Mapping[str, ModelPrefixes]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "baton_router_refused_blocks",
            "Blocks that found no room among those that some worker is known to hold.",
            value=sum(model.num_refused_blocks for model in self._models.values()),
        )


def _may_pass(error: ConfigError) -> bool:
    """Whether there was no descriptor or memory, or a disk or a server failed."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _PASSING


def _folder_of(worker: Worker, model: str) -> Path | None:
    info = worker.info
    if info is None or info.served_model_name != model or not is_loopback(worker.url.host or ""):
        return None
    folder = Path(info.model)
    try:
        is_there = folder.is_absolute() and (folder / "tokenizer.json").is_file()
    except OSError:  # this user may not enter the folder, or its file system does not answer
        return None
    return folder if is_there else None
