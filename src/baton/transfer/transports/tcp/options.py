"""What an operator may say about `tcp`."""

from __future__ import annotations

from typing import Annotated

import msgspec


class TcpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `tcp` transport.

    `streams`: connections to each peer's region; one write travels on one of them.
    `socket_buffer_bytes`: asked of the kernel for each socket: a larger one means fewer wake-ups.
    None leaves the kernel's own tuning on, and so does a kernel that allows less.
    `advertise_host`: the address that peers are told, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    """

    streams: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    socket_buffer_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] | None = 4 << 20
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
