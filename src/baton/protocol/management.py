"""How programs show the key in front of a gateway's management pages."""

from __future__ import annotations

from typing import Final

MANAGEMENT_KEY_HEADER: Final = "x-baton-management-key"
