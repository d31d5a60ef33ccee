"""The state folder of a fleet: one launch for each name, and what dead ones leave."""

import os
import stat

import pytest

from baton.errors import ConfigError
from baton.launch.folder import claim, find_launcher, fleet_folder, running_fleets


@pytest.fixture
def environment(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path)}


def test_a_second_launch_of_one_name_is_refused_and_others_are_not(environment):
    folder = fleet_folder("a", environment)
    with claim(folder), claim(fleet_folder("b", environment)):
        (folder.members).write_text("kept")
        with (
            pytest.raises(ConfigError, match=rf"pid {os.getpid()}\).*baton down --fleet a"),
            claim(fleet_folder("a", environment)),
        ):
            pass
        assert folder.members.read_text() == "kept"  # who was refused has removed nothing
        assert find_launcher(folder) == os.getpid()
        assert running_fleets(environment) == ["a", "b"]
    assert find_launcher(folder) is None
    assert running_fleets(environment) == []
    assert not folder.members.exists()


def test_what_a_dead_launch_left_is_taken_over(environment):
    folder = fleet_folder("a", environment)
    folder.logs.mkdir(parents=True, mode=0o755)
    folder.monitor.mkdir()
    old = (folder.members, folder.socket, folder.logs / "decode-0.log", folder.monitor / "tls.key")
    for path in old:
        path.write_text("old")
    folder.lock.write_text("123456")
    with claim(folder):
        assert not folder.members.exists()
        assert not folder.socket.exists()
        assert not folder.monitor.exists(), "its certificate is of another cluster"
        assert list(folder.logs.iterdir()) == []
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.logs / "decode-0.log").write_text("new")
    assert (folder.logs / "decode-0.log").read_text() == "new"  # read after the fleet's end


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    folder = fleet_folder("a", {"XDG_STATE_HOME": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME"), claim(folder):
        pass


@pytest.mark.parametrize("name", ["", "..", "a/b", "-a", "A", "a" * 64, "a\n"])
def test_what_is_no_name_is_refused(name, environment):
    with pytest.raises(ConfigError, match="is no name"):
        fleet_folder(name, environment)
