"""A folder with a checkpoint → its identity, the same for every engine that serves it.

What an engine makes of the files (dtype, quantised KV, layout) is compared elsewhere: two engines
of different kinds that loaded the same files have the same fingerprint. Imports no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def fingerprint_checkpoint(folder: Path) -> str:
    """The fingerprint of a checkpoint's configuration and weights.

    Raises:
        ConfigError: no such checkpoint.
    """
    return compute_fingerprint([folder / "config.json", *find_weights(folder)])


def compute_fingerprint(files: list[Path]) -> str:
    """BLAKE3 of the files' names and contents, 64 hex digits."""
    whole = blake3()
    for path in files:
        content = blake3(max_threads=blake3.AUTO).update_mmap(path)
        whole.update(path.name.encode() + b"\0" + content.digest())
    return whole.hexdigest()


def find_weights(folder: Path) -> list[Path]:
    """The files with the weights, sorted by name; at least one.

    Raises:
        ConfigError: no such checkpoint, or one without safetensors.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} is not a model folder: it has no config.json; give the path of a folder "
            "with a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(
            f"{folder} has no *.safetensors file; pickled weights (*.bin, *.pt) are never loaded: "
            "convert them with safetensors"
        )
    return weights


@dataclass(frozen=True, slots=True)
class Rope:
    """How some layers turn positions: transformers' `rope_type`, and for how many tokens at first.

    `original_tokens` is 0 where the configuration does not name it.
    """

    kind: str
    original_tokens: int


def list_ropes(text_config: object) -> list[Rope]:
    """Of a text model's configuration in transformers: one for each kind of layers."""
    found = getattr(text_config, "rope_parameters", None) or {}
    by_layer = [each for each in found.values() if isinstance(each, dict)]
    return [
        Rope(
            str(each.get("rope_type", "default")),
            each.get("original_max_position_embeddings") or 0,
        )
        for each in by_layer or [found]
    ]
