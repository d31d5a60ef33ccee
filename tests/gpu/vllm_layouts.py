"""KV caches as vLLM 0.32 allocates them: `[block][head][token][K, V]` for each layer, as views.

`tests/unit/engines_vllm/test_device_pages.py` compares them with vLLM's own.
"""

from __future__ import annotations

import math
from typing import Final

import torch

ORDERS: Final = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's name of a layout → how layers, blocks, heads, tokens and contents lie in memory."""
LAYOUTS: Final = tuple(ORDERS)


def allocate_layers(
    layout: str,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Views `[block, head, token, contents]` of random bytes; `shape` has the layers first."""
    num_bytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    random = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    return view_layers(layout, shape, random.view(dtype))


def view_layers(
    layout: str, shape: tuple[int, int, int, int, int], memory: torch.Tensor
) -> list[torch.Tensor]:
    """Views `[block, head, token, contents]` of a cache that is all of `memory`, `[n]`."""
    order = ORDERS[layout]
    ordered = memory.view([shape[dim] for dim in order])
    return list(ordered.permute([order.index(dim) for dim in range(len(order))]))
