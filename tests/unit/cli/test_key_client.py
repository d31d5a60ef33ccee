"""`baton key client`: files of keys that several commands change, and those that were damaged."""

import json
import time
from threading import Thread

import pytest

from baton.cli import key as commands
from baton.cli.main import run
from baton.gateway import clients


def test_of_two_keys_that_are_made_at_once_both_are_in_the_file(tmp_path, monkeypatch, capsys):
    read, path = clients.read_keys, tmp_path / "new" / "clients.json"

    def read_slowly(path):
        found = read(path)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(clients, "read_keys", read_slowly)
    commands.add(tenant="first", file=path)
    adding = [Thread(target=commands.add, kwargs={"tenant": t, "file": path}) for t in "ab"]
    removing = Thread(target=commands.remove, args=(read(path)[0].id,), kwargs={"file": path})
    for thread in (*adding, removing):
        thread.start()
    for thread in (*adding, removing):
        thread.join()
    assert {each.tenant for each in read(path)} == {"a", "b"}
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.parametrize("days", ["0", "36501", "9" * 30])
def test_a_key_expires_within_a_hundred_years(tmp_path, capsys, days):
    path = tmp_path / "clients.json"
    words = ["key", "client", "add", "--tenant", "a", "--file", str(path), "--expires-days", days]
    assert run(words) == 2
    assert "at most 36500" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("expires_at", "shown"),
    [(None, "never"), (0, "1970-01-01T00:00:00+00:00"), (9**20, f"{9**20}, Unix time")],
)
def test_any_time_in_a_file_can_be_listed(tmp_path, capsys, monkeypatch, expires_at, shown):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "clients.json"
    key = {"id": "0" * 12, "tenant": "a", "secret_sha256": "0" * 64, "expires_at": expires_at}
    path.write_text(json.dumps({"keys": [key]}), "utf-8")
    assert run(["key", "client", "list", "--file", str(path)]) == 0
    assert shown in capsys.readouterr().out
