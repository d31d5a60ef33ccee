"""What a worker would refuse of its transports' and tiers' options is refused by its launcher."""

import secrets
import sys

import pytest

from baton.cli import launching_ray, worker
from baton.cli.gateway import gateway_options
from baton.cli.launching import check_settings
from baton.cli.launching_ray import launch_on_ray
from baton.cli.plugin_options import check_worker_options
from baton.config.cluster_key import KEY_VARIABLE
from baton.config.resolve import CommandLine, resolve
from baton.errors import ConfigError, UnknownPluginError

FILE_TIER = 'store.tiers=["file"]'
PEER_TIER = 'store.tiers=["host", "peer"]'


def config_of(*assignments):
    return resolve(CommandLine(assignments=assignments), {}).to_config()


REFUSED = [
    (['transfer.options.tpc.tls={key="/k"}'], "'transfer.options.tpc'; did you mean 'tcp'"),
    (["store.options.flie.directory=/x"], "'store.options.flie'; did you mean 'file'"),
    (["store.options.nothing.directory=/x"], "'store.options.nothing'; installed: file, host"),
    ([FILE_TIER], "^store.options.file: .* `directory`"),
    ([FILE_TIER, 'store.options.file={directory="/x", direct_io=3}'], "^store.options.file: "),
    (["transfer.options.tcp.streams=many"], r"^transfer.options.tcp: .* `\$.streams`"),
    ([PEER_TIER, "store.options.peer.timeout_s=0"], r"^store.options.peer: .* `\$.timeout_s`"),
]


@pytest.mark.parametrize(("assignments", "why"), REFUSED)
def test_wrong_options_are_refused_by_worker_and_launcher(assignments, why):
    config = config_of(*assignments)
    with pytest.raises(ConfigError, match=why):
        check_worker_options(config)
    with pytest.raises(ConfigError, match=why):
        check_settings(config)


def test_options_that_a_launcher_gives_are_not_missed_there():
    config = config_of(PEER_TIER)
    check_settings(config)
    with pytest.raises(ConfigError, match="`urls`"):
        check_worker_options(config)


def test_what_is_not_installed_is_refused():
    for assignment in ('store.tiers=["tape"]', 'transfer.transports=["post"]'):
        with pytest.raises(UnknownPluginError, match="installed"):
            check_settings(config_of(assignment))


@pytest.mark.parametrize(("tier", "package"), [("redis", "redis"), ("object", "obstore")])
def test_what_only_rays_hosts_have_installed_is_checked_there(tier, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"baton.store.tiers.{tier}", raising=False)
    monkeypatch.setattr(launching_ray, "configure_logging", lambda _: None)
    monkeypatch.setenv(KEY_VARIABLE, secrets.token_hex(32))
    given = [f'store.tiers=["{tier}"]', f"store.options.{tier}.url=x://there"]
    with pytest.raises(ConfigError, match="pip install"):
        check_settings(config_of(*given))
    for other, why in (
        ([], "--client-keys"),  # all that comes before the cluster is accepted
        (['store.tiers=["tape"]'], "installed"),
        (["store.options.flie.directory=/x"], "did you mean 'file'"),
        (['store.tiers=["file"]'], "^store.options.file: "),
    ):
        with pytest.raises(ConfigError, match=why):
            launch_on_ray(resolve(CommandLine(assignments=[*given, *other]), {}), "fleet")


def test_the_options_of_an_unknown_policy_are_refused_by_gateway_and_launcher():
    config = config_of("router.options.cots.objective=throughput")
    for check in (check_settings, lambda config: gateway_options(config, 1)):
        with pytest.raises(ConfigError, match=r"router\.options\.cots'; did you mean 'cost'"):
            check(config)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_worker_refuses_before_it_loads_anything(engine, monkeypatch):
    monkeypatch.setattr(worker, "configure_logging", lambda _: None)
    given = [f"worker.engine={engine}", "transfer.options.tpc.streams=1"]
    with pytest.raises(ConfigError, match="did you mean 'tcp'"):
        worker.worker(worker.WorkerFlags(assignments=given))
