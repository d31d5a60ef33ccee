"""Writes the file in which the gateways of a launch find its workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from baton.protocol.members import Member, MembersFile, encode_members
from baton.protocol.worker_http import Role

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from baton.launch.slots import ProcessSlot


def write_members(path: Path, slots: Iterable[ProcessSlot]) -> None:
    """Replace the file: all workers whose address is known.

    Raises:
        OSError: it cannot be written; the one before it is still there.
    """
    workers = tuple(
        Member(slot.url, Role(slot.plan.role), draining=slot.is_leaving)
        for slot in slots
        if slot.plan is not None and slot.url is not None
    )
    replace_members(path, MembersFile(version=1, workers=workers))


def replace_members(path: Path, file: MembersFile) -> None:
    """Replace the file at once: a reader sees the old one or the new one.

    Raises:
        OSError: it cannot be written; the one before it is still there.
    """
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as opened:
        opened.write(encode_members(file))
    draft.replace(path)
