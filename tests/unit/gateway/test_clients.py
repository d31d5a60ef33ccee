from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from baton.gateway.clients import RELOAD_INTERVAL_S, Clients, make_key, write_keys
from baton.gateway.errors import UnauthorizedError
from baton.testing.clocks import ManualClock


def deny(_: Path) -> NoReturn:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_keys_that_could_not_be_read_are_read_though_their_file_has_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Written by root: `chown` changes neither the file's time nor its size nor its inode."""
    path, clock = tmp_path / "clients.json", ManualClock()
    text, kept = make_key("acme")
    write_keys(path, (kept,))
    clients, headers = Clients(path, clock), [(b"authorization", b"Bearer " + text.encode())]
    write_keys(path, ())
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", deny)
        for _ in range(3):
            clock.advance(RELOAD_INTERVAL_S)
            assert clients.authenticate(headers).key == kept
    assert caplog.text.count("Permission denied") == 1
    clock.advance(RELOAD_INTERVAL_S)
    with pytest.raises(UnauthorizedError):
        clients.authenticate(headers)


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
def test_the_schemes_case_and_spaces_do_not_count(tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "clients.json"
    text, kept = make_key("acme")
    write_keys(path, (kept,))
    shown = [(b"authorization", f"{scheme}{text}".encode())]
    assert Clients(path, ManualClock()).authenticate(shown).key == kept
