from __future__ import annotations

import errno
import ssl
from typing import TYPE_CHECKING, Any, NoReturn

from baton.auth.credentials import RELOAD_INTERVAL_S
from baton.net.tls import ServerTls
from baton.testing.clocks import ManualClock
from tests.integration.test_gateway_tls import certificate_files

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def deny(*_: Any, **__: Any) -> NoReturn:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_files_that_could_not_be_read_are_read_though_they_have_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    tls = ServerTls(*certificate_files(tmp_path, 1), clock)
    first = tls.listening
    certificate_files(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(ssl.SSLContext, "load_cert_chain", deny)
        for _ in range(3):
            clock.advance(RELOAD_INTERVAL_S)
            assert tls.listening is first
    assert caplog.text.count("Permission denied") == 1
    clock.advance(RELOAD_INTERVAL_S)
    second = tls.listening
    assert second is not first
    clock.advance(RELOAD_INTERVAL_S)
    assert tls.listening is second
