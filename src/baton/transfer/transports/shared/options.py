"""Options of `shared`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.transfer.devices.options import DeviceOptions


class SharedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `shared` transport.

    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    `device`: where this host's engines have their regions, if not in memfds.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    device: DeviceOptions | None = None
