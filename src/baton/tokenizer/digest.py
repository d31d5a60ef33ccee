"""Whether two processes would make the same token ids of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from blake3 import blake3

from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""All that tokenizer and chat template are made of."""


def digest_tokenizer(model: Path) -> str:
    """Name tokenizer and chat template of a model's folder by their contents: 32 hex digits.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = blake3()
    for name in FILES:
        try:
            content = (model / name).read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as exc:
            raise ConfigError(f"{model / name} cannot be read: {exc}") from exc
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest(16)
