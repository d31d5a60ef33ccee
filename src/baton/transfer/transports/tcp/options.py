"""Options of `tcp`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.transfer.transports.tcp.wire import MAX_STREAMS


class TlsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files in PEM format. Both ends show a certificate, and check the other's against `ca`.

    Names in certificates are not looked at, workers have none: `ca` should sign for this cluster's
    workers alone. The cluster key is proved inside, as without TLS.
    """

    certificate: str
    key: str
    ca: str


class TcpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `tcp` transport.

    `streams`: connections to each peer's region.
    `stripe_bytes`: a write of twice as much or more is spread over streams, so much or more on
    each; a read is asked for in pieces of this size.
    `socket_buffer_bytes`: asked of the kernel for each socket: a larger one means fewer wake-ups.
    None leaves the kernel's own tuning on, and so does a kernel that allows less.
    `local_buffer_bytes`: at most so much where both ends have one address. What is under way then
    stays in the processor's caches. Not looked at where the kernel's own tuning is wanted.
    `advertise_host`: the address that peers are sent, where the bound one is none (`0.0.0.0`).
    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `stall_timeout_s`: a peer with an outstanding answer that neither takes nor sends
    a byte for so long is lost.
    `tls`: encrypt; all workers must, or none.
    """

    streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)] = 2
    stripe_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] = 8 << 20
    socket_buffer_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] | None = 4 << 20
    local_buffer_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=1 << 30)] = 1 << 20
    advertise_host: str | None = None
    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    stall_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    tls: TlsOptions | None = None
