"""What an operator may set where Baton starts vLLM's server itself."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from baton.errors import ConfigError

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]

OWNED_FLAGS: Final[dict[str, str]] = {
    "--model": "worker.model",
    "--host": "worker.host",
    "--port": "worker.port",
    "--served-model-name": "worker.served_model_name",
    "--kv-transfer-config": "Baton's connector",
    "--shutdown-timeout": "worker.drain_timeout_s",
    "--uds": "worker.port",
}
"""vLLM's flags that `arguments` may not hold → what sets them here."""


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `[engine]` with `worker.engine = "vllm"`; None leaves the choice to vLLM.

    On CPUs Baton has defaults of its own, so that vLLM starts fast and takes little:
    `kv_cache_bytes` 512 MiB, `enforce_eager` true, as many threads as cores, `max_context_tokens`
    as many as fit the KV cache. `multiprocessing` None starts processes for
    tensor-parallel ranks only if there is more than one. `speculative` is vLLM's own speculative
    configuration. `kv_events` publishes which blocks are cached, to this user's processes.
    `arguments` are further flags of vLLM's.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context_tokens: PositiveInt | None = None
    block_size: PositiveInt | None = None
    kv_cache_bytes: PositiveInt | None = None
    kv_cache_dtype: Annotated[str, msgspec.Meta(min_length=1)] = "auto"
    enforce_eager: bool | None = None
    num_threads: PositiveInt | None = None
    tensor_parallel_size: PositiveInt = 1
    max_num_batched_tokens: PositiveInt | None = None
    prefix_caching: bool = True
    speculative: dict[str, object] | None = None
    kv_events: bool = True
    multiprocessing: bool | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; msgspec reports the ValueError as it does its own."""
        if self.multiprocessing is False and self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {self.tensor_parallel_size} needs multiprocessing"
            )
        for word in self.arguments:
            owner = OWNED_FLAGS.get(word.partition("=")[0])
            if owner is not None:
                raise ValueError(f"arguments may not hold {word}: {owner} decides that")

    @property
    def uses_processes(self) -> bool:
        """Whether each tensor-parallel rank gets a process of its own."""
        if self.multiprocessing is None:
            return self.tensor_parallel_size > 1
        return self.multiprocessing


CPU_BLOCK_TOKENS: Final = 32


def require_cpu_block_size(options: VllmOptions) -> None:
    """Refuse early what vLLM's attention on CPUs refuses late.

    Raises:
        ConfigError: `block_size` is no multiple of 32.
    """
    if options.block_size is not None and options.block_size % CPU_BLOCK_TOKENS:
        raise ConfigError(
            f"engine.block_size is {options.block_size}: vLLM on CPUs takes multiples of "
            f"{CPU_BLOCK_TOKENS}"
        )
