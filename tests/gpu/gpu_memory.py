"""Regions on the first GPU, and how tests look at them.

`python -m tests.gpu.gpu_memory` is a `baton.testing.transport_peer` whose memory is there.
"""

import numpy as np
import torch

from baton.ids import new_region_handle
from baton.testing.transport_pair import Side
from baton.testing.transport_peer import PeerSetup, main
from baton.transfer.interface import TRANSPORTS, DeviceMemory, PagedRegion
from baton.transfer.region import compute_region_bytes, place_arrays

DEVICE = torch.device("cuda", 0)


def allocate_region(shapes, device=DEVICE):
    """Zeroed pages on a GPU, in one tensor."""
    arrays = place_arrays(shapes)
    pool = torch.zeros(compute_region_bytes(arrays), dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    memory = DeviceMemory(device.index, pool.data_ptr(), (pool,))
    return PagedRegion(new_region_handle(), "cuda", memoryview(b""), arrays, device=memory)


def pool_of(region):
    """All bytes of such a region, uint8 `[n]`."""
    return region.device.holds[0]


def fill_region(region, byte):
    pool_of(region).fill_(byte)
    torch.cuda.synchronize(region.device.device)


class GpuSide(Side):
    """What tests see is a copy, which cannot be written to."""

    def pages(self, array=0):
        described = self.region.arrays[array]
        flat = np.frombuffer(self.snapshot(), np.uint8)[described.offset_bytes :]
        return flat[: described.num_pages * described.page_bytes].reshape(
            described.num_pages, described.page_bytes
        )

    def fill(self, seed):
        pool = pool_of(self.region)
        random = np.random.default_rng(seed).integers(0, 256, len(pool), np.uint8)
        pool.copy_(torch.from_numpy(random))
        torch.cuda.synchronize(pool.device)

    def paint(self, byte):
        fill_region(self.region, byte)

    def snapshot(self):
        return pool_of(self.region).cpu().numpy().tobytes()


if __name__ == "__main__":
    main(PeerSetup(TRANSPORTS.build, lambda *_: allocate_region, fill_region))
