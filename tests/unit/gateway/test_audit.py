"""The audit log on a disk that is full."""

import logging
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.gateway.audit import AuditLog, AuditRecord

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
