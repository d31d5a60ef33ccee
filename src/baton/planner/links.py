"""Links by their nominal rates: what a data sheet promises, in one direction, for one worker.

Real transfers are slower; `baton bench link` measures. `source` is where a rate is from.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Link(msgspec.Struct, frozen=True):
    """One kind of link. `gb_per_s` in 1e9 bytes, one direction."""

    name: str
    gb_per_s: float
    source: str


def _ethernet(gbit: int, what: str = "Ethernet") -> Link:
    return Link(f"{gbit} Gbit/s {what}", gbit / 8, "line rate / 8")


_PCIE: Final = "PCI-SIG: GT/s x 128/130 / 8"
_NVLINK: Final = "NVIDIA: half of both directions"

NOMINAL_LINKS: Final = (
    _ethernet(10),
    _ethernet(25),
    _ethernet(100, "Ethernet or RoCE"),
    _ethernet(200, "RoCE or InfiniBand HDR"),
    _ethernet(400, "RoCE or InfiniBand NDR"),
    Link("PCIe 4.0 x16", 16 * 16 * 128 / 130 / 8, _PCIE),
    Link("PCIe 5.0 x16", 16 * 32 * 128 / 130 / 8, _PCIE),
    Link("CXL 2.0 x8", 8 * 32 * 128 / 130 / 8, "PCIe 5.0's rate"),
    Link("CXL 2.0 x16", 16 * 32 * 128 / 130 / 8, "PCIe 5.0's rate"),
    Link("shared memory, DDR5-4800 x8", 4.8 * 8 * 8 / 2, "JEDEC: 307 GB/s, read and write"),
    Link("NVLink 3 (A100)", 300.0, _NVLINK),
    Link("NVLink 4 (H100, H200)", 450.0, _NVLINK),
    Link("NVLink 5 (B200)", 900.0, _NVLINK),
)


def transfer_s(num_bytes: int, gb_per_s: float, latency_s: float = 0.0) -> float:
    """Seconds for so many bytes."""
    return latency_s + num_bytes / (gb_per_s * 1e9)
