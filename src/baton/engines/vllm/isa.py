"""How vLLM's attention kernels lay out a page, as vLLM itself says it.

The last two dimensions of a KV cache tensor, `[block, head, token, content]`, are a promise about
sizes only. Which bytes are where depends on the attention backend and, on CPUs, on the instruction
set that it picked (`vllm.v1.attention.backends.cpu_attn`, which tells each layer its choice).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CPU_BACKEND: Final = "CPU_ATTN"
TRANSPOSED_K_ISAS: Final = frozenset({"vec", "vec16"})
"""A head's unit is K as `[dim][token]`, then V as `[token][dim]`; checked against the kernel."""
PLAIN_LATENT_BACKENDS: Final = frozenset({"cpu_mla"})
"""A page is `[token][latent]`: canonical as it lies."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What decides how bytes lie in a page. Equal ones can exchange pages as they are.

    `kernels` are the instruction sets (CPU_ATTN) or backends, lower case, that the layers use:
    one, or more where head sizes differ. `layout` is vLLM's name for the order of dimensions.
    """

    device: str
    kernels: tuple[str, ...]
    layout: str

    def __str__(self) -> str:
        """As in `KVLayout.arrangement`: `vllm-cpu/vec/LBHNC`."""
        return f"vllm-{self.device}/{'+'.join(self.kernels)}/{self.layout}"

    @property
    def transposes_k(self) -> bool:
        """Whether each head's unit is K as `[dim][token]`, then V as `[token][dim]`."""
        known = TRANSPOSED_K_ISAS.issuperset(self.kernels)
        return self.device == "cpu" and self.layout == "LBHNC" and known

    @property
    def is_canonical(self) -> bool:
        """Whether pages rest in Baton's canonical order."""
        return self.device == "cpu" and PLAIN_LATENT_BACKENDS.issuperset(self.kernels)


def read_arrangement(
    modules: Mapping[str, object], names: Iterable[str], *, device: str, layout: str
) -> Arrangement:
    """What the attention layers `names` use.

    Args:
        modules: vLLM's attention modules by layer name
            (`vllm_config.compilation_config.static_forward_context`), after the metadata builders
            were made: not before `register_kv_caches`.
        names: The layers.
        device: `cpu`, `cuda`, …
        layout: Name of the resolved `KVCacheLayout`.

    Raises:
        ConfigError: a layer does not say what it uses.
    """
    kernels = {_kernel_of(modules.get(name), name) for name in names}
    return Arrangement(device, tuple(sorted(kernels)), layout)


def _kernel_of(module: object, name: str) -> str:
    backend = getattr(module, "attn_backend", None)
    if backend is None:
        raise ConfigError(f"vLLM does not say which attention backend layer {name} uses")
    kernel: object = backend.get_name()
    if kernel == CPU_BACKEND:
        kernel = getattr(module, "isa", None)
    if not isinstance(kernel, str):
        raise ConfigError(f"vLLM does not say which attention ISA layer {name} uses")
    return kernel.lower()
