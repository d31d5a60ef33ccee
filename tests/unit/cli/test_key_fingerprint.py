"""`baton key fingerprint`: what operators compare where a worker has another key."""

import pytest

from baton.cli.main import run

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def fingerprint(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("BATON_CLUSTER_KEY", raising=False)

    def ask(*arguments, key=None):
        with monkeypatch.context() as patch:
            if key is not None:
                patch.setenv("BATON_CLUSTER_KEY", key)
            status = run(["key", "fingerprint", *arguments])
        printed = capsys.readouterr()
        return status, printed.out.splitlines(), printed.err

    return ask


def test_the_same_key_has_the_same_fingerprint_wherever_it_is(fingerprint, tmp_path):
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(KEY)
    _, (from_variable,), _ = fingerprint(key=KEY)
    status, (from_file,), _ = fingerprint("--set", f"cluster.key_file={file}")
    assert status == 0
    assert from_file == f"{from_variable.split()[0]}  {file}"
    _, several, _ = fingerprint(key=f"{OTHER} {KEY}")
    assert several[1] == from_variable
    assert several[0] != several[1]
    assert not any(key[:16] in line for key in (KEY, OTHER) for line in several)


def test_no_key_is_made_up(fingerprint, tmp_path):
    status, lines, error = fingerprint()
    assert status == 2
    assert not lines
    assert "this host has no cluster key" in error
    assert not list(tmp_path.iterdir())
