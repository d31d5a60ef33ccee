"""Options of `local`."""

from __future__ import annotations

from typing import Annotated

import msgspec


class LocalOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the `local` transport.

    `connect_timeout_s`: until the other transport, which may be another thread's, has answered.
    """

    connect_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
