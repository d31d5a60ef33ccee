"""What two layouts may differ in: block size, page order and tensor-parallel shard; no more.

Opaque pages move as they are: arrangement and block size must be equal too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from baton.errors import LayoutMismatchError

if TYPE_CHECKING:
    from baton.kv.layout import KVLayout, LayerLayout


@lru_cache(maxsize=256)
def find_differences(src: KVLayout, dst: KVLayout) -> tuple[str, ...]:
    """Why KV of `src` cannot become KV of `dst`: readable lines, none if it can."""
    found: list[str] = []
    if src.dtype != dst.dtype:
        found.append(f"dtype: {src.dtype} at the source, {dst.dtype} at the destination")
    found += _find_opaque_differences(src, dst)
    if src.num_layers != dst.num_layers:
        found.append(f"layers: {src.num_layers} at the source, {dst.num_layers} at the destination")
        return tuple(found)
    differing = [n for n in range(src.num_layers) if src.layers[n] != dst.layers[n]]
    if differing:
        first = differing[0]
        found.append(
            f"layer {first}: {_describe(src.layers[first])} at the source, "
            f"{_describe(dst.layers[first])} at the destination"
        )
    if len(differing) > 1:
        found.append(f"{len(differing) - 1} more layers differ, the last is {differing[-1]}")
    return tuple(found)


def check_compatible(src: KVLayout, dst: KVLayout) -> None:
    """Refuse two layouts between which KV cannot be copied.

    Two shards without a head in common are exchangeable: there is nothing to copy between them.

    Raises:
        LayoutMismatchError: names each difference.
    """
    differences = find_differences(src, dst)
    if differences:
        raise LayoutMismatchError(differences)


def _find_opaque_differences(src: KVLayout, dst: KVLayout) -> list[str]:
    if "opaque" not in {src.order, dst.order}:
        return []
    if src.order != dst.order:
        sides = _describe_order(src), _describe_order(dst)
        return ["page order: {} at the source, {} at the destination".format(*sides)]
    found: list[str] = []
    if src.arrangement != dst.arrangement:
        found.append(
            f"arrangement: {src.arrangement} at the source, {dst.arrangement} at the destination"
        )
    if src.block_size != dst.block_size:
        found.append(
            f"block size of opaque pages: {src.block_size} at the source, "
            f"{dst.block_size} at the destination"
        )
    return found


def _describe_order(layout: KVLayout) -> str:
    return f"opaque ({layout.arrangement})" if layout.order == "opaque" else layout.order


def _describe(layer: LayerLayout) -> str:
    planes = ", ".join(f"{p.name} {p.num_heads}x{p.head_dim}" for p in layer.planes)
    window = "" if layer.window_tokens is None else f", window {layer.window_tokens}"
    return planes + window
