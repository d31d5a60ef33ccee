"""Where the cluster key comes from, and when none may be made up."""

import os
import stat

import pytest

from baton.config.cluster_key import (
    ephemeral_cluster_key,
    find_cluster_key,
    find_readers,
    is_loopback,
)
from baton.config.sections import ClusterSection
from baton.errors import ConfigError

LOOPBACK = ("127.0.0.1",)


def test_the_environment_beats_the_file(tmp_path):
    section = ClusterSection(key_file=str(tmp_path / "absent"))
    for find in (find_cluster_key, ephemeral_cluster_key):
        key = find(section, {"BATON_CLUSTER_KEY": "ab" * 32}, ("10.0.0.1",))
        assert (key.text, key.origin) == ("ab" * 32, "configured")
        assert "abab" not in repr(key)


def test_a_key_file_must_be_private(tmp_path):
    path = tmp_path / "key"
    path.write_text("cd" * 32 + "\n", encoding="ascii")
    path.chmod(0o600)
    section = ClusterSection(key_file=str(path))
    assert find_cluster_key(section, {}, ("10.0.0.1",)).text == "cd" * 32
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        find_cluster_key(section, {}, LOOPBACK)


def test_an_absent_key_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the cluster key"):
        find_cluster_key(ClusterSection(key_file=str(tmp_path / "absent")), {}, LOOPBACK)


def test_on_loopback_a_user_gets_one_key_and_keeps_it(tmp_path):
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    first = find_cluster_key(ClusterSection(), environment, LOOPBACK)
    again = find_cluster_key(ClusterSection(), environment, ("::1", "localhost"))
    assert first.text == again.text
    assert len(bytes.fromhex(first.text)) == 32
    assert first.origin == "generated"
    path = tmp_path / "baton" / "cluster.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["cluster.key"]


def test_a_directory_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "baton").write_text("in the way", encoding="ascii")
    with pytest.raises(ConfigError, match="BATON_CLUSTER_KEY"):
        find_cluster_key(ClusterSection(), {"XDG_STATE_HOME": str(tmp_path)}, LOOPBACK)


@pytest.mark.parametrize("find", [find_cluster_key, ephemeral_cluster_key])
def test_beyond_loopback_no_key_is_made_up(find, tmp_path):
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 needs a cluster key"):
        find(ClusterSection(), {"XDG_STATE_HOME": str(tmp_path)}, ("127.0.0.1", "10.0.0.1"))
    assert not list(tmp_path.iterdir())


def test_an_ephemeral_key_is_kept_nowhere(tmp_path):
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    keys = {ephemeral_cluster_key(ClusterSection(), environment, LOOPBACK).text for _ in range(2)}
    assert len(keys) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("", False),
        ("0.0.0.0", False),
        ("::", False),
        ("example", False),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("owner", "user", "mode", "is_private"),
    [
        (0, 10001, 0o440, True),  # a Secret in a pod with fsGroup: only its group can read it
        (0, 10001, 0o444, False),
        (0, 10001, 0o460, False),
        (0, 0, 0o440, False),
        (10001, 10001, 0o440, False),
        (10001, 10001, 0o600, True),
    ],
)
def test_a_mounted_secret_may_be_its_groups(monkeypatch, owner, user, mode, is_private):
    monkeypatch.setattr("os.geteuid", lambda: user)
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 10001, 64, 0, 0, 0))
    assert (find_readers(status) == 0) is is_private
