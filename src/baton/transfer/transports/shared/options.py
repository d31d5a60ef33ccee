"""What an operator may say about `shared`."""

from __future__ import annotations

from typing import Annotated

import msgspec


class SharedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `shared` transport.

    `connect_timeout_s`: from the start of connecting until the peer's region may be written.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
