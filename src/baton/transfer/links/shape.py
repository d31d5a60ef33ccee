"""What a transfer's cost depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.kv.copies import PageCopies
    from baton.transfer.interface import PageArray


SizeClass: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TransferShape:
    """How much is moved, and in how many pieces that are adjacent on both sides."""

    num_bytes: int
    num_descriptors: int

    @property
    def size_class(self) -> SizeClass:
        """Shapes alike: powers of two of the bytes, and of the bytes of a descriptor."""
        per_descriptor = self.num_bytes // max(1, self.num_descriptors)
        return self.num_bytes.bit_length(), per_descriptor.bit_length()


def measure_shape(
    copies: PageCopies, source: Sequence[PageArray], target: Sequence[PageArray]
) -> TransferShape:
    """The shape of copies between two regions; whole pages that follow one another count as one."""
    if not 0 <= copies.layer < min(len(source), len(target)):
        return TransferShape(copies.num_bytes, copies.num_pages)  # the transport will refuse it
    src_bytes, dst_bytes = source[copies.layer].page_bytes, target[copies.layer].page_bytes
    num_descriptors = 0
    for group in copies.groups:
        if group.moves_whole_pages(src_bytes, dst_bytes):
            num_descriptors += group.num_runs
        else:
            num_descriptors += len(group.src_pages) * len(group.spans)
    return TransferShape(copies.num_bytes, num_descriptors * copies.num_layers)
