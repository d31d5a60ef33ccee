"""KV to measure encodings with: the same numbers in every process, whatever the model.

Values are normal numbers. Keys and latents are normal numbers, too, but each channel of a head has
a size of its own, as in models: log-normal, the same set of sizes in each head.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.encodings.planes import NUMPY_DTYPES, find_planes, shape_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from baton.kv.layout import KVLayout

CHANNEL_SIGMA: Final = 0.5
"""Of the logarithm of the channels' sizes; 0.24 to 0.52 in layers of the demo model."""


def make_reference_kv(layout: KVLayout, num_blocks: int) -> NDArray[np.uint8]:
    """Blocks of a layout in canonical order, uint8 `[num_blocks, block_bytes]`."""
    rng = np.random.default_rng(0)
    dtype = NUMPY_DTYPES[layout.dtype]
    blocks = np.empty((num_blocks, layout.block_bytes), np.uint8)
    for run in find_planes(layout, lambda shape: shape.num_numbers * layout.element_bytes):
        out = shape_numbers(run.shape, run.view(blocks).view(dtype))
        numbers = rng.standard_normal(out.shape, np.float32)
        if not run.shape.is_value:
            numbers *= _list_sizes(run.shape.head_dim)
        out[...] = numbers.astype(dtype)
    return blocks


def _list_sizes(num_channels: int) -> NDArray[np.float32]:
    normal = NormalDist(0.0, CHANNEL_SIGMA)
    quantiles = [normal.inv_cdf((each + 0.5) / num_channels) for each in range(num_channels)]
    return np.exp(np.array(quantiles, np.float32))
