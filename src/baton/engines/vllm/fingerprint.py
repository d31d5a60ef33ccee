"""Which checkpoint vLLM loaded: the same fingerprint that other engines give its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baton.engines.checkpoint import fingerprint_checkpoint
from baton.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


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
