"""With what `baton debug bundle` asks workers for their metrics."""

from baton.cli.debug import _find_worker_tls
from baton.cli.launching import issue_monitor
from baton.config.cluster_key import ephemeral_cluster_key
from baton.config.environment import read_environment
from baton.config.resolve import CommandLine, resolve
from baton.launch.folder import ray_folder, remove_monitor


def test_workers_of_a_fleet_on_ray_are_asked_with_what_its_start_issued(tmp_path, monkeypatch):
    """Their key is known to the fleet's supervisors alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("BATON_CLUSTER_KEY", "")
    environment = read_environment()
    config = resolve(CommandLine(), environment).to_config()
    key, folder = ephemeral_cluster_key(config.cluster, {}, ()), ray_folder("f", environment)
    assert _find_worker_tls(config, "f") is None
    for _ in range(2):  # as where a fleet was lost, and is started again
        issue_monitor(config, key.text, folder)
        assert _find_worker_tls(config, "f") is not None
    assert _find_worker_tls(config, "other") is None
    remove_monitor(folder)
    assert _find_worker_tls(config, "f") is None
