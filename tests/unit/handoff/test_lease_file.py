"""A write lease in a file, as processes of one host share it."""

from __future__ import annotations

import math
import resource
from typing import TYPE_CHECKING

import pytest

from baton.clock import Instant
from baton.errors import ConfigError
from baton.handoff.lease_file import LeaseFile

if TYPE_CHECKING:
    from pathlib import Path


def test_what_one_process_writes_another_reads(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    ours = LeaseFile.create(file)
    theirs = LeaseFile.open(file)
    assert theirs.until == -math.inf, "none may write yet"
    ours.extend(Instant(12.5))
    assert theirs.until == 12.5
    assert file.stat().st_mode & 0o077 == 0
    file.unlink()  # as with the end of the server
    assert theirs.until == 12.5


def test_one_that_is_not_there_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have to run there"):
        LeaseFile.open(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(ConfigError, match="too short"):
        LeaseFile.open(tmp_path / "short")


def test_one_that_finds_no_room_is_an_error_and_no_crash_later(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"lease cannot be made: File too large"):
            LeaseFile.create(tmp_path / "lease")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        LeaseFile.create(tmp_path / "none" / "lease")
