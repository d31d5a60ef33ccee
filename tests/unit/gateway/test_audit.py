"""The audit log on a disk that is full, and after a rotation."""

import logging
import os
from pathlib import Path

import msgspec
import pytest

from baton.errors import ConfigError
from baton.gateway.audit import LOOK_EVERY_S, AuditLog, AuditRecord

RECORD = AuditRecord(
    at=1.0,
    request_id="r",
    client="c",
    tenant="t",
    address="127.0.0.1",
    path="/v1/completions",
    model="demo",
    mode="push",
    status=200,
    duration_s=0.1,
)


def test_a_full_disk_is_logged_once_and_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        audit.add(RECORD)
        audit.add(RECORD)
    audit.close()
    assert caplog.messages == ["the audit log cannot be written: No space left on device"]


def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the audit log"):
        AuditLog(tmp_path / "nowhere" / "audit.log")


def at(second: float) -> AuditRecord:
    return msgspec.structs.replace(RECORD, at=second)


def read_times(path: Path) -> list[float]:
    return [
        msgspec.json.decode(line, type=AuditRecord).at for line in path.read_bytes().splitlines()
    ]


@pytest.mark.parametrize("is_created", [True, False])
def test_the_file_is_opened_anew_after_a_rotation(tmp_path: Path, *, is_created: bool) -> None:
    """As logrotate renames it, with `create` and without."""
    path, rotated = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    audit = AuditLog(path)
    audit.add(at(100.0))
    path.rename(rotated)
    if is_created:
        path.touch()
    audit.add(at(100.0 + LOOK_EVERY_S / 2))
    audit.add(at(100.0 + LOOK_EVERY_S))
    audit.add(at(100.0 + LOOK_EVERY_S))
    audit.close()
    assert read_times(rotated) == [100.0, 100.5]
    assert read_times(path) == [101.0, 101.0]


def test_a_file_that_cannot_be_opened_anew_is_logged_once_and_the_old_one_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, moved = tmp_path / "log" / "audit.jsonl", tmp_path / "moved"
    path.parent.mkdir()
    audit = AuditLog(path)
    path.parent.rename(moved)
    with caplog.at_level(logging.ERROR):
        for second in (100.0, 101.0, 102.0):
            audit.add(at(second))
    audit.close()
    assert caplog.messages == ["the audit log cannot be opened anew: No such file or directory"]
    assert read_times(moved / "audit.jsonl") == [100.0, 101.0, 102.0]


def test_a_line_is_written_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.add(at(1.0))
    audit.add(at(2.0))
    audit.close()
    assert read_times(tmp_path / "audit.jsonl") == [1.0, 2.0]
