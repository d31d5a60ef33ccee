"""The embedded engine: any decoder-only Hugging Face model over paged KV.

Enters: a folder with a checkpoint, prompts as token ids. Leaves: tokens, and pages that a handoff
can read and write layer by layer. Small and correct first: float32 greedy answers do not depend on
the batch, on chunks, on prefix hits, on the block size or on which worker computed the KV.

File map, in the order in which a request meets them:
    options.py        configuration
    loading.py        folder → model, and a check of paged attention; shape.py what it caches
    pages.py          the pages as tensors over the registered region; transformers' Cache over them
    engine.py         the engine's thread, and the commands of other threads
    loop.py           one step: events and commands in, updates out; updates.py
    sequence.py       one request's tokens and blocks; the table of requests
    scheduler.py      what to compute next (pure)
    queued_prefixes.py  what of waiting prompts is looked for in the store, and loaded (pure)
    orders.py         orders for the handoff and the store
    pinned_blocks.py  blocks that handoffs use: pinned, exported, imported; that are being kept
    prefixes.py       prompts' beginnings: whether the store is asked, what it has yet to answer
    model_runner.py   one step through the model, and sampling
    attention.py      a step's arrays, and attention over pages
    random_model.py   models with random weights, for tests and benchmarks

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
