"""Options of `file`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class FileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `file` transport.

    `directory`: where both workers find the part files; the path may differ between them.
    `direct`: go around the page cache (O_DIRECT) where the filesystem can, for pages that begin and
    end on multiples of 4,096 bytes.
    `sync`: `data` has each part file on the device before the peer hears of it; needed where the
    two hosts' views of the filesystem meet on the device alone. `none` is enough on one host.
    `stale_after_s`: age from which a folder whose owner is dead is removed, when a worker starts.
    `max_unread_bytes`: part files of one peer that wait to be read; more wait to be written.
    `advertise_host`: the address that peers are sent, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    """

    directory: str
    direct: bool = False
    sync: Literal["none", "data"] = "none"
    stale_after_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    max_unread_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 << 20
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
