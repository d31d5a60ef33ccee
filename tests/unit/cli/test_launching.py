"""Which cluster key the processes of `baton up` get, and from where."""

import secrets

import pytest

from baton.cli import launching
from baton.config.cluster_key import KEY_VARIABLE, find_configured_key
from baton.config.environment import read_environment
from baton.config.resolve import CommandLine, resolve
from baton.launch.folder import fleet_folder
from baton.launch.supervisor import Ending, Supervisor


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """`launch(*settings)`: the configuration and the environment that processes would get."""
    seen = []

    class StartsNothing(Supervisor):
        async def run(self, on_ready):
            environment = self.context.environment
            assert fleet_folder("keys", environment).monitor.is_dir(), "it needs the key, too"
            seen.append((self.plan.config, environment))
            return Ending.DRAINED

    monkeypatch.setattr(launching, "Supervisor", StartsNothing)
    monkeypatch.setattr(launching, "configure_logging", lambda _: None)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def start(*settings):
        resolved = resolve(CommandLine(assignments=settings), read_environment())
        assert launching.launch(resolved, "shared_cores", "keys") == Ending.DRAINED
        return seen.pop()

    return start


def test_processes_read_the_key_file_themselves_and_so_follow_it(launch, tmp_path):
    file = tmp_path / "cluster.key"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    config, environment = launch(f"cluster.key_file={file}")
    assert KEY_VARIABLE not in environment
    found = find_configured_key(config.cluster, environment)
    assert (found.path, found.text) == (file, file.read_text())


def test_the_key_of_the_environment_goes_on_before_that_of_a_file(launch, tmp_path, monkeypatch):
    key = secrets.token_hex(32)
    monkeypatch.setenv(KEY_VARIABLE, key)
    _, environment = launch(f"cluster.key_file={tmp_path / 'none'}")
    assert environment[KEY_VARIABLE] == key


@pytest.mark.parametrize("settings", [(), ('store.tiers=["host"]',)])
def test_a_key_that_is_made_up_goes_by_environment(launch, settings):
    """Also this user's own: processes with identities would not look for it."""
    _, environment = launch(*settings)
    assert len(environment[KEY_VARIABLE]) == 64
