"""Flags set settings, and defaults agree with the options that they end in."""

import pytest
from cyclopts import App, CoercionError

from baton.cli.gateway import GatewayFlags, gateway_options
from baton.cli.up import UpFlags
from baton.cli.worker import WorkerFlags
from baton.cli.worker import _options as worker_options
from baton.config.resolve import FromDefault, FromFlag
from baton.config.sections import Config
from baton.errors import ConfigError
from baton.models import DEMO_MODEL_PATH
from baton.router.cost import CostPolicy
from baton.router.simple import RoundRobin

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def cluster_key(monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_KEY", KEY)


def parse(flags, *arguments):
    app = App(result_action="return_value")

    @app.default
    def command(flags: flags | None = None):
        return flags

    return app(list(arguments), exit_on_error=False)


def test_a_flag_sets_its_key_and_says_so():
    resolved = parse(UpFlags, "--prefill", "2", "--model", "m", "--port", "0").resolve()
    assert resolved.values["up.prefill"].value == 2
    assert resolved.values["up.prefill"].origin == FromFlag("--prefill")
    assert resolved.values["worker.model"].value == "m"
    assert resolved.values["gateway.port"].value == 0
    assert resolved.values["up.decode"].origin == FromDefault()


@pytest.mark.parametrize(
    ("given", "transports"),
    [([], ("shared", "tcp")), (["auto"], ("shared", "tcp")), (["tcp"], ("tcp",))],
)
def test_transport_is_one_or_all(given, transports):
    arguments = ["--debug", *(word for kind in given for word in ("--transport", kind))]
    config = parse(WorkerFlags, *arguments).resolve().to_config()
    assert config.transfer.transports == transports
    assert config.log.level == "debug"


TWO = ("--worker", "https://a:1", "--worker", "https://b:1")
SPLIT = ("--prefill", "https://c:1", "--decode", "https://d:1")


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        (TWO, "cost"),
        (TWO[:2], "round_robin"),
        ((*TWO[:2], *SPLIT[:2]), "cost"),
        (SPLIT, "round_robin"),
        ((*TWO, "--policy", "round_robin"), "round_robin"),
        ((*SPLIT, "--policy", "cost"), "cost"),
        (("--members", "file:/run/members.json"), "cost"),
        (("--members", "file:/run/members.json", "--policy", "round_robin"), "round_robin"),
    ],
)
def test_the_default_policy_depends_on_the_workers(arguments, policy):
    objective = ("--set", "router.options.cost.objective=throughput")
    options = gateway_options(parse(GatewayFlags, *arguments, *objective).resolve().to_config(), 1)
    assert options.policy_name == policy
    built = options.build_policy()
    assert type(built) is {"cost": CostPolicy, "round_robin": RoundRobin}[policy]
    if policy == "cost":
        assert built.tpot_limit_s == float("inf"), "its options are used"


def test_repeated_flags_make_lists():
    flags = parse(GatewayFlags, "--decode", "http://a:1", "--decode", "http://b:2")
    assert flags.resolve().to_config().gateway.decode == ("http://a:1", "http://b:2")


def test_sources_of_workers_are_named_one_by_one():
    names = ("file:/run/members.json", "dns:decode=workers.example:8100")
    flags = parse(GatewayFlags, "--members", names[0], "--members", names[1])
    options = gateway_options(flags.resolve().to_config(), 1)
    assert options.members == names
    assert options.addresses == ()


def test_a_worker_serves_the_demo_model_and_knows_its_host():
    options = worker_options(Config(), status_fd=1)
    assert options.model_path == DEMO_MODEL_PATH
    assert options.at.startswith("//boot-")


def test_the_key_is_in_no_repr():
    assert KEY not in repr(worker_options(Config(), status_fd=1))
    assert str(bytes.fromhex(KEY)) not in repr(worker_options(Config(), status_fd=1))


@pytest.mark.parametrize("flags", [GatewayFlags, UpFlags])
def test_a_mode_may_be_forced(flags):
    assert parse(flags, "--mode", "pull").resolve().to_config().gateway.mode == "pull"
    with pytest.raises(CoercionError):
        parse(flags, "--mode", "carrier-pigeon")


def test_a_worker_announces_an_address_that_gateways_can_reach():
    flags = ("--announce-to", "https://gw:9000", "--host", "0.0.0.0")
    with pytest.raises(ConfigError, match=r"give worker\.announce_url"):
        worker_options(parse(WorkerFlags, *flags).resolve().to_config(), 1)
    flags = (*flags, "--set", "worker.announce_url=https://10.0.0.3:8100")
    options = worker_options(parse(WorkerFlags, *flags).resolve().to_config(), 1)
    assert options.announce_to == ("https://gw:9000",)
