"""The key of the management pages: `/dashboard`, `/alerts` and `/debug`.

A browser asks for it (HTTP Basic: any user name, the key as the password) and sends it with each
request of the page. Programs send it in a header of its own, since `authorization` may have the API
key by which `/debug/route` explains. It never stands in a URL.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import TYPE_CHECKING, Final, Self

from baton.errors import ConfigError
from baton.gateway.errors import ManagementKeyError
from baton.protocol.management import MANAGEMENT_KEY_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MIN_KEY_CHARS: Final = 16
MAX_HEADER_BYTES: Final = 4096
KEY_HEADER: Final = MANAGEMENT_KEY_HEADER.encode()


class ManagementKey:
    """Checks requests. Holds a digest of the key, not the key."""

    def __init__(self, key: bytes) -> None:
        self._digest = hashlib.sha256(key).digest()

    @classmethod
    def read(cls, path: Path) -> Self:
        """The key in a file; white space around it does not count.

        Raises:
            ConfigError: it cannot be read, or has a key that could be guessed.
        """
        try:
            key = path.read_bytes().strip()
        except OSError as exc:
            raise ConfigError(
                f"cannot read gateway.management_key_file {path}: {exc.strerror}; make one with: "
                f"openssl rand -hex 32 > {path}"
            ) from exc
        if len(key) < MIN_KEY_CHARS or not key.isascii() or len(key.split()) != 1:
            raise ConfigError(
                f"gateway.management_key_file {path} needs one key of {MIN_KEY_CHARS} or more "
                f"ASCII characters on one line; make one with: openssl rand -hex 32 > {path}"
            )
        return cls(key)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Pass, or raise.

        Raises:
            ManagementKeyError: the request shows no key, or another one.
        """
        key = _find_key(headers)
        if key is None:
            raise ManagementKeyError("this page needs the management key", code="missing_key")
        if not hmac.compare_digest(hashlib.sha256(key).digest(), self._digest):
            raise ManagementKeyError("this is not the management key", code="invalid_key")


def _find_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """None: no header has one."""
    for name, value in headers:
        if name == KEY_HEADER:
            return value.strip()
        scheme, _, text = value[:MAX_HEADER_BYTES].partition(b" ")
        if name == b"authorization" and scheme.lower() == b"basic":
            try:
                return base64.b64decode(text, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
    return None
