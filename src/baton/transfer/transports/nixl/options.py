"""Options of `nixl`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class NixlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `nixl` transport.

    `lanes`: how UCX may reach peers. `host`: memory of this host only, no listener. `network`:
    RDMA and TCP. UCX does not authenticate peers: a host that reaches its ports can write this
    process' memory, so `network` belongs on a network where all hosts are trusted.
    `device`: UCX's name of the network device to use (`mlx5_0:1`, `eth0`), for `network`; None
    means the interface that has the bind address. For several set `UCX_NET_DEVICES`, which wins.
    `advertise_host`: the address that peers are sent, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    """

    lanes: Literal["host", "network"] = "host"
    device: Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]+$")] | None = None
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
