"""vLLM's KV cache configuration as Baton's layout: layers, heads, dtype, order within a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.engines.vllm.compatibility import check_data_parallel
from baton.errors import ConfigError
from baton.kv.layout import KVLayout, LayerLayout, TensorParallelShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import (
        AttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
    )

    from baton.kv.layout import DType

CPU_BACKEND: Final = "CPU_ATTN"
TRANSPOSED_K_ISAS: Final = frozenset({"vec", "vec16"})
"""A head's unit is K as `[dim][token]`, then V as `[token][dim]`; checked against the kernel."""
PLAIN_LATENT_BACKENDS: Final = frozenset({"cpu_mla"})
"""A page is `[token][latent]`: canonical as it lies."""
JOINED_KV_BACKENDS: Final = frozenset({"flash_attn", "flashinfer", "flex_attention", "triton_attn"})
"""Pages are `[head][token][K, V]`, by dimensions, whatever their order in memory."""
LATENT_BACKENDS: Final = frozenset({
    "cutlass_mla",
    "flash_attn_mla",
    "flashinfer_mla",
    "flashmla",
    "triton_mla",
})
"""As `PLAIN_LATENT_BACKENDS`, on GPUs."""


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

    @property
    def joins_planes(self) -> bool:
        """Whether a GPU's pages are `[head][token][planes]`, so that `view_canonical` applies."""
        known = JOINED_KV_BACKENDS | LATENT_BACKENDS
        return self.device != "cpu" and known.issuperset(self.kernels)


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
        ConfigError: a layer does not report its backend.
    """
    kernels = {_kernel_of(modules.get(name), name) for name in names}
    return Arrangement(device, tuple(sorted(kernels)), layout)


def _kernel_of(module: object, name: str) -> str:
    backend = getattr(module, "attn_backend", None)
    if backend is None:
        raise ConfigError(f"vLLM does not report the attention backend of layer {name}")
    kernel: object = backend.get_name()
    if kernel == CPU_BACKEND:
        kernel = getattr(module, "isa", None)
    if not isinstance(kernel, str):
        raise ConfigError(f"vLLM does not report the attention ISA of layer {name}")
    return kernel.lower()


FP8_DTYPES: Final[dict[str, DType]] = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_UNQUANTISED: Final[dict[str, DType]] = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
}
_LOCAL_SPECS: Final = frozenset({
    "ChunkedLocalAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
})
_UNIFIED_SPECS: Final = _LOCAL_SPECS | {"FullAttentionSpec", "MLAAttentionSpec"}
"""What vLLM keeps in one group with `--disable-hybrid-kv-cache-manager`, if some are local."""
_DRAFT_PREFIXES: Final = frozenset({"draft_model", "mtp"})


@dataclass(frozen=True, slots=True)
class CachedLayers:
    """The layers for which vLLM keeps KV, the same in every process of one configuration.

    `names` are in Baton's order: the first `num_main` are the main model's, the rest a drafter's.
    `layout` is canonical and has all of them, in `num_blocks` blocks.
    """

    names: tuple[str, ...]
    num_main: int
    layout: KVLayout
    num_blocks: int

    @property
    def main_layout(self) -> KVLayout:
        """Canonical, the main model's layers only.

        A drafter's KV is not handed over: what it lacks costs accepted drafts, not tokens.
        """
        return msgspec.structs.replace(self.layout, layers=self.layout.layers[: self.num_main])


def make_opaque(layout: KVLayout, arrangement: Arrangement) -> KVLayout:
    """The same KV in pages as vLLM's kernels keep them."""
    return msgspec.structs.replace(layout, order="opaque", arrangement=str(arrangement))


def read_layers(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, shard: TensorParallelShard
) -> CachedLayers:
    """What vLLM keeps KV for.

    `kv_cache_config` is the connector's own: the worker's copy also names layers that share
    another's KV.

    Raises:
        ConfigError: a kind of KV cache that Baton cannot transfer, with a remedy.
    """
    _check_parallelism(vllm_config)
    specs = _layer_specs(kv_cache_config)
    drafts = [name for name in specs if _is_drafted(name, vllm_config)]
    main = sorted(specs.keys() - drafts, key=_natural)
    names = (*main, *sorted(drafts, key=_natural))
    if not main:
        raise ConfigError("vLLM keeps no KV for the main model: there is nothing to transfer")
    configs = {True: _draft_config(vllm_config), False: vllm_config.model_config}
    layout = KVLayout(
        layers=tuple(
            _layer_layout(specs[name], configs[name in drafts], shard.size) for name in names
        ),
        block_size=specs[main[0]].block_size,
        dtype=read_dtype(vllm_config, specs[main[0]].dtype),
        shard=shard,
    )
    for index, name in enumerate(names):
        _check_page(name, specs[name], layout, index)
    return CachedLayers(names, len(main), layout, kv_cache_config.num_blocks)


def read_dtype(vllm_config: VllmConfig, dtype: torch.dtype) -> DType:
    """What a number in the cache is; vLLM keeps fp8 in tensors of uint8.

    Raises:
        ConfigError: a quantised cache that holds more than numbers, or an unknown dtype.
    """
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    found = FP8_DTYPES.get(cache_dtype) or _UNQUANTISED.get(str(dtype))
    if found is None:
        raise ConfigError(
            f"a KV cache of {cache_dtype} ({dtype}) cannot be handed over; "
            "use --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2"
        )
    return found


def pages_of(
    kv_caches: Mapping[str, torch.Tensor], layers: CachedLayers
) -> tuple[torch.Tensor, ...]:
    """Each layer's tensor in Baton's order, viewed as `[num_blocks, head, …]`.

    Where a backend's kernels use smaller blocks than the block tables, theirs are behind the head.

    Raises:
        ConfigError: a layer is missing, or its tensor does not match the layout.
    """
    views: list[torch.Tensor] = []
    for index, name in enumerate(layers.names):
        tensor = kv_caches.get(name)
        if tensor is None:
            raise ConfigError(f"vLLM registered no KV cache for layer {name}")
        if tensor.shape[0] != layers.num_blocks and tensor.shape[0] % layers.num_blocks == 0:
            split = (layers.num_blocks, -1, *tensor.shape[1:])
            tensor = tensor.view(split).movedim(1, 2)
        num_bytes = layers.num_blocks * layers.layout.page_bytes(index)
        if tensor.shape[0] != layers.num_blocks or tensor.nbytes != num_bytes:
            raise ConfigError(
                f"the KV cache of layer {name} is {tuple(tensor.shape)} of {tensor.dtype}, "
                f"not {layers.num_blocks} blocks of {layers.layout.page_bytes(index)} bytes"
            )
        views.append(tensor)
    return tuple(views)


def view_canonical(pages: torch.Tensor, num_planes: int) -> torch.Tensor:
    """Pages `[block, head, token …, planes]` as `[block, plane, token …, head, dim]`.

    A view of the same memory: an element's place in the order of dimensions is that in a canonical
    page. All planes have the same dim.
    """
    planes = pages.view(*pages.shape[:-1], num_planes, -1)
    return planes.movedim(-2, 1).movedim(2, -2)


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"Baton hands over no KV under --{flag} above 1 yet")
    num_engines = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    check_data_parallel(num_engines, is_external=parallel.data_parallel_external_lb)
    if getattr(parallel, "use_ubatching", False):
        # Each half of a step reports its layers, on a stream of its own: half of the KV is there.
        raise ConfigError("Baton hands over no KV under --enable-dbo or --ubatch-size yet")


def _layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, AttentionSpec]:
    """The spec of each layer of the only group."""
    groups = kv_cache_config.transfer_groups
    if len(groups) != 1:
        kinds = sorted({type(spec).__name__ for group in groups for spec in _specs_of(group)})
        remedy = "this model is not supported"
        if _LOCAL_SPECS & set(kinds) and _UNIFIED_SPECS.issuperset(kinds):
            remedy = "start vLLM with --disable-hybrid-kv-cache-manager"
        raise ConfigError(
            f"vLLM keeps KV in {len(groups)} groups of blocks ({', '.join(kinds) or 'none'}), "
            f"Baton hands over one: {remedy}"
        )
    spec = groups[0].kv_cache_spec
    by_layer: Mapping[str, KVCacheSpec] = getattr(spec, "kv_cache_specs", {})
    specs = {name: by_layer.get(name, spec) for name in groups[0].layer_names}
    for name, found in specs.items():
        _check_spec(name, found)
    if len({(found.block_size, found.dtype) for found in specs.values()}) > 1:
        raise ConfigError("vLLM's layers keep KV in different block sizes or dtypes")
    return specs


def _specs_of(group: KVCacheGroupSpec) -> Iterable[KVCacheSpec]:
    by_layer: Mapping[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return by_layer.values() or (group.kv_cache_spec,)


def _check_spec(name: str, spec: KVCacheSpec) -> None:
    """Refuse what keeps something else than K and V (or a latent) for every token.

    With R-SWA a token sees all of the prompt and a window of the answer: KV of equal tokens depends
    on where the answer began, and vLLM gives away blocks between the two.
    """
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        FullAttentionSpec,
        RSWASpec,
        SlidingWindowSpec,
    )

    is_known = isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
    if not is_known or isinstance(spec, RSWASpec) or spec.tokens_per_state != 1:
        raise ConfigError(f"KV of layer {name} ({type(spec).__name__}) cannot be handed over")


def _is_drafted(name: str, vllm_config: VllmConfig) -> bool:
    """Whether a layer is a drafter's.

    vLLM loads draft models under the prefix `draft_model` and some MTP heads under `mtp`; EAGLE
    and other MTP heads count on from the main model's last layer.
    """
    if vllm_config.speculative_config is None:
        return False
    if name.split(".", maxsplit=1)[0] in _DRAFT_PREFIXES:
        return True
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return bool(numbers) and numbers[0] >= vllm_config.model_config.get_total_num_hidden_layers()


def _draft_config(vllm_config: VllmConfig) -> ModelConfig:
    speculative = vllm_config.speculative_config
    drafter = None if speculative is None else speculative.draft_model_config
    return vllm_config.model_config if drafter is None else drafter


def _layer_layout(spec: AttentionSpec, config: ModelConfig, num_shards: int) -> LayerLayout:
    """The whole model's heads, though vLLM's spec counts those of one rank."""
    # A FullAttentionSpec may also name a window: then vLLM keeps, caches and expects all tokens.
    is_windowed = type(spec).__name__.startswith("SlidingWindow")
    window: int | None = spec.sliding_window if is_windowed else None
    if not spec.head_size_v:
        return LayerLayout.mla(spec.head_size, window)
    if num_shards > 1 and spec.num_heads != spec.num_kv_heads:
        # Then a page is not `[head][unit]`: shards of another size would take the wrong bytes.
        raise ConfigError("this attention backend's KV cannot be handed over in tensor parallel")
    total = config.get_total_num_kv_heads()
    is_replicated = spec.num_kv_heads == 1 and total < num_shards
    num_heads = total if is_replicated else spec.num_kv_heads * num_shards
    return LayerLayout.gqa(num_heads, spec.head_size, spec.head_size_v, window)


def _check_page(name: str, spec: AttentionSpec, layout: KVLayout, index: int) -> None:
    if spec.page_size_bytes != layout.page_bytes(index):
        raise ConfigError(
            f"a page of layer {name} has {spec.page_size_bytes} bytes in vLLM, "
            f"{layout.page_bytes(index)} in Baton's layout: it holds more than K and V"
        )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
