"""What a transfer's cost depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.kv.copies import CopyGroup, PageCopies
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
    page_bytes = source[copies.layer].page_bytes, target[copies.layer].page_bytes
    num = sum(_count_descriptors(group, page_bytes) for group in copies.groups)
    return TransferShape(copies.num_bytes, num * copies.num_layers)


def _count_descriptors(group: CopyGroup, page_bytes: tuple[int, int]) -> int:
    if group.moves_whole_pages(*page_bytes):
        return group.num_runs
    return len(group.src_pages) * len(group.spans)
