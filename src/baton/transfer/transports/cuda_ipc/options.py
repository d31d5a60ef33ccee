"""Options of `cuda_ipc`."""

from __future__ import annotations

from typing import Annotated

import msgspec


class CudaIpcOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `cuda_ipc` transport.

    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
