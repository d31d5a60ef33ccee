"""A transfer cut into parts, so that each one's frame and payload stay within their bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from baton.kv.copies import CopyGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PART_BYTES: Final = 64 << 20
MAX_PART_PAGES: Final = 65_536
"""A frame of so many packed indices is a quarter of the largest one."""


def cut_parts(groups: tuple[CopyGroup, ...], max_bytes: int = MAX_PART_BYTES) -> list[CopyGroup]:
    """All pages of all groups, in order, in parts of about `max_bytes` or one page at least."""
    parts: list[CopyGroup] = []
    for group in groups:
        if group.num_bytes <= max_bytes and 0 < len(group.src_pages) <= MAX_PART_PAGES:
            parts.append(group)  # itself, with all that was derived from it
        else:
            parts += _cut_group(group, max_bytes)
    return parts


def _cut_group(group: CopyGroup, max_bytes: int) -> Iterator[CopyGroup]:
    bytes_per_page = max(1, group.num_bytes // max(1, len(group.src_pages)))
    num_pages = max(1, min(MAX_PART_PAGES, max_bytes // bytes_per_page))
    for first in range(0, len(group.src_pages), num_pages):
        pages = slice(first, first + num_pages)
        yield CopyGroup(group.src_pages[pages], group.dst_pages[pages], group.spans)
