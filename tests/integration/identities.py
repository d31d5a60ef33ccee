"""Identities that an authority issues, for tests of what each of them may do."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from baton.auth.credentials import Credentials
from baton.auth.issuing import Order, create_authority, issue, revoke
from baton.auth.key import ClusterKey

if TYPE_CHECKING:
    from pathlib import Path


class Identities:
    """An authority, and a directory for each process."""

    def __init__(self, directory: Path) -> None:
        self.authority, self._directory = directory / "authority", directory
        self._key = ClusterKey.generate()
        create_authority(self.authority)

    def of(self, role: str, name: str) -> Credentials:
        directory = self._directory / name
        issue(Order(role, name), self.authority, directory)
        return Credentials.from_directory(directory, self._key)

    def revoke(self, name: str, *, known_to: str) -> None:
        revoke(name, self.authority)
        shutil.copy(self.authority / "ca.crl", self._directory / known_to / "ca.crl")
