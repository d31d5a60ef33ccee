"""Options of `mooncake`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `mooncake` transport.

    Mooncake does not authenticate peers: a host that reaches its ports can read and write the
    regions' pages. They are confined to the network interface that has the bind address (with
    loopback, to this host); use it where everybody who reaches that is trusted.

    `protocol`: what Mooncake moves bytes by; `rdma` stripes over all devices it finds, or
    over `devices` only.
    `advertise_host`: the address that peers are sent, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    """

    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: tuple[str, ...] = ()
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
