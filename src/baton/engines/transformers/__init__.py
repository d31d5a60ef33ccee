"""The embedded engine: any decoder-only Hugging Face model over paged KV.

Enters: a folder with a checkpoint, prompts as token ids. Leaves: tokens, and pages that a handoff
can read and write layer by layer. Small and correct first: float32 greedy answers do not depend on
the batch, on chunks, on prefix hits, on the block size or on which worker computed the KV.

File map, in the order in which a request meets them:
    options.py      what an operator may set
    loading.py      folder → model; shape.py what it caches; selfcheck.py whether paging it is right
    pages.py        the pages as tensors over the registered region
    engine.py       the thread and its contract; command_queue.py how others talk to it
    loop.py         one step: events and commands in, updates out
    sequence.py     one request's tokens and blocks
    scheduler.py    what to compute next (pure); pinned_blocks.py blocks that a handoff holds;
                    shared_blocks.py blocks that are exported and imported
    orders.py       what the handoff is told
    model_runner.py a step: step.py its arrays, forward.py the model, sampling.py the same
                    token on every worker
    paged_cache.py  transformers' Cache over pages; attention.py attention over them
    random_model.py models with random weights, for tests and benchmarks

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from baton.engines.transformers.options import TransformersOptions
from baton.registry import Plugin

if TYPE_CHECKING:
    from baton.engines.interface import Engine, EngineContext, EngineFactory


def _load(options: TransformersOptions, context: EngineContext) -> Engine:
    from baton.engines.transformers.engine import load_engine  # noqa: PLC0415 - torch is heavy

    return load_engine(options, context)


def _build(options: TransformersOptions) -> EngineFactory:
    return partial(_load, options)


PLUGIN: Plugin[TransformersOptions, EngineFactory] = Plugin(TransformersOptions, _build)
