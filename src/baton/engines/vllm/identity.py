"""What identifies a vLLM server to its peers: name, epoch, cluster key and model fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.auth.key import ClusterKey
from baton.config.cluster_key import find_cluster_key
from baton.config.environment import read_environment
from baton.config.sections import ClusterSection
from baton.engines.checkpoint import fingerprint_checkpoint
from baton.errors import ConfigError
from baton.ids import Epoch, WorkerId

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from baton.engines.vllm.options import ConnectorOptions
    from baton.protocol.worker_http import Role

EPOCH_CHARS = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """One start (epoch) of one vLLM server, of `num_ranks` tensor-parallel ranks."""

    worker: WorkerId
    epoch: Epoch
    role: Role
    num_ranks: int

    @property
    def sends(self) -> bool:
        """Whether it prefills for others."""
        return self.role != "decode"

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


def rank_name(worker: WorkerId, rank: int, num_ranks: int) -> WorkerId:
    """One rank's name; that of a server of one rank is the server's own."""
    return worker if num_ranks == 1 else WorkerId(f"{worker}/{rank}")


def rank_epoch(epoch: Epoch, rank: int, num_ranks: int) -> Epoch:
    """One rank's epoch; that of a server of one rank is the server's own."""
    return epoch if num_ranks == 1 else Epoch(_hex_of(f"baton/rank-epoch/1|{epoch}|{rank}"))


def _hex_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:EPOCH_CHARS]


def load_cluster_key(options: ConnectorOptions) -> ClusterKey:
    """The cluster's key, as every process of Baton finds it.

    Raises:
        ConfigError: none is configured, and one is needed; or it is no key.
    """
    found = find_cluster_key(
        ClusterSection(key_file=options.key_file), read_environment(), (options.handoff_host,)
    )
    return ClusterKey.from_hex(found.text)


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
