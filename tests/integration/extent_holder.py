"""Claims extents of a device as it is told: `python extent_holder.py PATH`, JSON lines.

`["claim", num_bytes]` → `[start, num_bytes]` or `null` where there is no room; `["release", start]`
→ `true`; `["race", seed, rounds]` → how often it had an extent, all of it checked byte by byte;
`["write", start, byte]` → `true`; `["attach", id as hex, num_pages]` → `true`, mapped from then on.
"""

import json
import random
import sys

import numpy as np

from baton.errors import TransferError
from baton.transfer.devices.backing import DeviceOptions
from baton.transfer.devices.extents import allocate_device_region, attach_extent, find_extent
from baton.transfer.interface import PageArray
from baton.transfer.region import release_region


class Holder:
    def __init__(self, path):
        self.options, self.held, self.attached = DeviceOptions(path), {}, []

    def claim(self, num_bytes):
        try:
            region = allocate_device_region(self.options, [(num_bytes // 4096, 4096)])
        except TransferError as exc:
            if "no room" in str(exc):
                return None
            raise
        assert not np.frombuffer(region.memory, np.uint8).any()
        extent = find_extent(region).extent
        self.held[extent.start] = region
        return [extent.start, extent.num_bytes, extent.id.hex()]

    def release(self, start):
        release_region(self.held.pop(start))
        return True

    def write(self, start, byte):
        np.frombuffer(self.held[start].memory, np.uint8)[:] = byte
        return True

    def attach(self, id_, num_pages):
        arrays = (PageArray(0, 4096, num_pages),)
        self.attached.append(attach_extent(self.options, bytes.fromhex(id_), arrays))
        return True

    def race(self, seed, rounds):
        rng, won = random.Random(seed), 0
        for number in range(rounds):
            claimed = self.claim(rng.randrange(1, 4) << 20)
            if claimed is None:
                continue
            mine = (seed * rounds + number) % 255 + 1
            self.write(claimed[0], mine)
            memory = np.frombuffer(self.held[claimed[0]].memory, np.uint8)
            assert (memory == mine).all(), "somebody else wrote here"
            del memory
            self.release(claimed[0])
            won += 1
        return won


def main():
    holder = Holder(sys.argv[1])
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(holder, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
