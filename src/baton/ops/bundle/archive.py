"""What was collected, what is missing and why; and the file that holds both."""

from __future__ import annotations

import gzip
import io
import os
import secrets
import tarfile
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from baton import __version__
from baton.errors import BatonError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION: Final = 1
MAX_TOTAL_BYTES: Final = 64 << 20
"""Of all files before compression."""
MAX_FILES: Final = 2000
MANIFEST: Final = "manifest.json"
FOLDER: Final = "baton-bundle"
NOTE: Final = (
    "Settings, page fields and metric labels that are not known to be harmless read (cut). Log "
    "lines and reasons are free text, of which known secrets and what looks like one are cut: read "
    "them before you publish this archive."
)


class BundleError(BatonError):
    """The archive could not be written."""


class BundleFile(msgspec.Struct, frozen=True):
    """A file of the archive."""

    name: str
    num_bytes: int


class Missing(msgspec.Struct, frozen=True):
    """Something that is not in the archive, and why."""

    name: str
    why: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`. `created_at` is Unix seconds."""

    schema: int = SCHEMA_VERSION
    baton: str = __version__
    created_at: float
    duration_s: float
    gateways: tuple[str, ...]
    note: str = NOTE
    files: tuple[BundleFile, ...]
    missing: tuple[Missing, ...]


class BundleContents:
    """What there is so far. Each part adds to it as it goes: one that is late loses its rest only.

    Owner: one thread.
    """

    def __init__(self, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_total_bytes = max_total_bytes
        self._num_bytes = 0
        self._files: dict[str, bytes] = {}
        self._missing: list[Missing] = []

    def add(self, name: str, content: bytes) -> None:
        """Add a file, or note that there was no room for it. `name` is chosen by this program."""
        if self._num_bytes + len(content) > self._max_total_bytes or len(self._files) >= MAX_FILES:
            self.miss(name, f"no room for {len(content)} bytes more in one archive")
            return
        self._num_bytes += len(content)
        self._files[name] = content

    def miss(self, name: str, why: str) -> None:
        """Note that something is missing."""
        self._missing.append(Missing(name, why))

    @property
    def missing(self) -> tuple[Missing, ...]:
        """In the order in which it was found missing."""
        return tuple(self._missing)

    @property
    def files(self) -> tuple[BundleFile, ...]:
        """Sorted by name."""
        return tuple(BundleFile(name, len(self._files[name])) for name in sorted(self._files))

    def write(self, path: Path, manifest: Manifest) -> None:
        """Write the archive, for its owner alone; a file that is there is replaced at the end.

        Raises:
            BundleError: it cannot be written; nothing is left behind.
        """
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(fd, "wb") as file:
                    self._write_to(file, manifest)
                draft.replace(path)
            except BaseException:
                with suppress(OSError):
                    draft.unlink()
                raise
        except OSError as exc:
            raise BundleError(
                f"cannot write {path}: {exc.strerror}; choose another file with --output"
            ) from exc

    def _write_to(self, file: io.BufferedWriter, manifest: Manifest) -> None:
        shown = msgspec.json.format(msgspec.json.encode(manifest))
        with (
            gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, content in ((MANIFEST, shown), *sorted(self._files.items())):
                entry = tarfile.TarInfo(f"{FOLDER}/{name}")
                entry.size, entry.mode = len(content), 0o600
                entry.mtime = int(manifest.created_at)
                archive.addfile(entry, io.BytesIO(content))
