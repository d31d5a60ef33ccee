"""What identifies the weights that compute a request, beside the model's files.

The LoRA adapter: by a digest of its files. Names do not: two servers may give one name to different
weights. And the last reset of vLLM's caches: weights may have been replaced since (ADR 79).
Duck-typed over vLLM's objects.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from baton.kv.identity import Adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import LoRAConfig
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

WAIT_S: Final = 0.02
"""How long the first request of an adapter waits for the digest: less than loading one takes."""
FILES: Final = ("adapter_config.json", "adapter_model.*")
"""What vLLM reads of an adapter's folder."""

_TAG: Final = b"baton/adapter-files/1"
_RESET_TAG: Final = "baton/reset/1"

_Key: TypeAlias = tuple[str, str, bool]
_Version: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size in bytes and time of change in ns of each file."""


@dataclass(frozen=True, slots=True)
class NotIdentified:
    """The adapter's KV is neither handed over nor kept. `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Digest:
    version: _Version
    digest: str


class Adapters:
    """The adapters that requests have named. Owned by the scheduler's thread.

    Files are read on a thread of its own, once for each adapter. vLLM reads an adapter's files
    again when it has dropped the adapter from memory: if they have changed since the digest, what
    is loaded is not known any more, and the adapter is not identified until the server restarts.
    """

    def __init__(self, settings: bytes) -> None:
        """`settings`: see `describe_settings`."""
        self._settings = settings
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._digests: dict[_Key, Future[_Digest] | NotIdentified] = {}
        self.last_reset: str | None = None
        """Names the last reset; None: the weights are those of the files."""

    def reset(self) -> None:
        """KV from before is not used any more. No other server finds what is computed from now on.

        The model without an adapter is then another adapter, too, whose identity is random.
        """
        self.last_reset = secrets.token_hex(16)

    def find(self, lora: LoRARequest | None) -> Adapter | NotIdentified | None:
        """What computes a request; None for the model itself.

        Blocks for `WAIT_S` at most, at the first request of an adapter.
        """
        found = None if lora is None else self._find_files(lora)
        if self.last_reset is None or isinstance(found, NotIdentified):
            return found
        name, digest = ("", "") if found is None else (found.name, found.digest)
        both = f"{_RESET_TAG}|{self.last_reset}|{digest}".encode()
        return Adapter(f"{name}@{self.last_reset}", hashlib.sha256(both).hexdigest())

    def _find_files(self, lora: LoRARequest) -> Adapter | NotIdentified:
        name, path = str(lora.lora_name), Path(lora.lora_path)
        with suppress(RuntimeError):  # of the home of no user vLLM makes a folder's name
            path = path.expanduser()
        key = name, str(path), bool(lora.is_3d_lora_weight)
        known = self._digests.get(key)
        if known is None:
            settings = self._settings + (b"3d" if key[2] else b"")
            known = self._digests[key] = self._reader.submit(_read, path, settings)
            wait((known,), WAIT_S)
        if isinstance(known, NotIdentified):
            return known
        if not known.done():
            return NotIdentified(f"the files of the adapter {name!r} are still being read")
        found = _check(name, path, known, is_replaced=bool(lora.load_inplace))
        if isinstance(found, NotIdentified):
            logger.warning("KV is not shared with other servers: %s", found.reason)
            self._digests[key] = found
        return found


def _check(
    name: str, path: Path, reading: Future[_Digest], *, is_replaced: bool
) -> Adapter | NotIdentified:
    """The adapter, if its files are what they were when they were read."""
    if is_replaced:
        return NotIdentified(f"the adapter {name!r} was loaded in place of another of its name")
    try:
        found = reading.result()
        is_unchanged = _find_version(path) == found.version
    except OSError as exc:
        return NotIdentified(f"the files of the adapter {name!r} cannot be read: {exc}")
    if not is_unchanged:
        return NotIdentified(f"the files of the adapter {name!r} have changed since it was loaded")
    return Adapter(name, found.digest)


def _read(path: Path, settings: bytes) -> _Digest:
    """The digest of an adapter's files, by name and content, and of how vLLM applies them.

    Raises:
        OSError: they cannot be read; a name on a model hub is no folder.
    """
    version, digest = _find_version(path), hashlib.sha256(_TAG)
    digest.update(len(settings).to_bytes(8, "little") + settings)
    for name, *_ in version:
        with (path / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(len(name.encode()).to_bytes(8, "little") + name.encode() + content)
    return _Digest(version, digest.hexdigest())


def _find_version(path: Path) -> _Version:
    files = _find_files(path)
    if not files:
        raise FileNotFoundError(f"{path} holds no {' and '.join(FILES)}")
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_ctime_ns) for name, stat in stats)


def _find_files(path: Path) -> Sequence[Path]:
    return sorted(file for pattern in FILES for file in path.glob(pattern))


def describe_settings(config: LoRAConfig | None) -> bytes:
    """Those settings of vLLM by which equal files give other weights."""
    if config is None:
        return b""
    targets = config.target_modules
    return msgspec.json.encode((
        None if targets is None else sorted(targets),
        bool(config.enable_moe_shared_loras),
        bool(config.enable_mixed_moe_lora_format),
        str(config.lora_dtype),  # weights are cast to it; vLLM has replaced "auto"
    ))
