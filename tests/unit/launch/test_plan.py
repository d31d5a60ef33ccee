"""Which processes a launch starts, with which arguments."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.engine_options import engine_options
from baton.config.resolve import CommandLine, resolve
from baton.errors import ConfigError
from baton.launch.plan import (
    Ports,
    WorkerGroup,
    command_line,
    count_peer_ports,
    flag_settings,
    plan_launch,
    share_cores,
    worker_groups,
)

ENGINE_KEYS = {
    "transformers": frozenset({"block_size", "num_threads"}),
    "vllm": frozenset({"speculative", "num_threads"}),
    "steam": frozenset({"pressure"}),
}


def plan(*assignments, environment=None, cores=range(4), pinning="shared_cores", file=None):
    resolved = resolve(CommandLine(file=file, assignments=assignments), environment or {})
    return plan_launch(resolved, list(cores), ENGINE_KEYS, pinning)


def child_config(command):
    """What a child makes of its command line, in an environment that disagrees."""
    assert command[:3] == (sys.executable, "-m", "baton.cli")
    words = command[4:]
    assignments = [
        value for flag, value in zip(words[::2], words[1::2], strict=True) if flag == "--set"
    ]
    environment = {
        "BATON_WORKER__PORT": "9",
        "BATON_WORKER__NAME": "x",
        "BATON_WORKER__ROLE": "both",
    }
    return resolve(CommandLine(assignments=assignments), environment).to_config()


def worker_config(worker, ports=None):
    return child_config(worker.command(None, ports or Ports()))


def options_of(worker):
    """The options that a worker's engine gets."""
    config = worker_config(worker)
    return engine_options(config.worker.engine, config.engine)


def test_one_prefill_and_one_decode_worker_by_default():
    workers = plan().workers
    assert [(w.name, w.role) for w in workers] == [("prefill-0", "prefill"), ("decode-0", "decode")]
    config = worker_config(workers[1], Ports(http=5, handoff=6)).worker
    assert (config.name, config.role, config.port, config.handoff_port) == (
        "decode-0",
        "decode",
        5,
        6,
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "names"),
    [
        (2, 1, ["prefill-0", "prefill-1", "decode-0"]),
        (0, 2, ["worker-0", "worker-1"]),
        (1, 0, ["worker-0"]),
    ],
)
def test_counts(prefill, decode, names):
    workers = plan(f"up.prefill={prefill}", f"up.decode={decode}").workers
    assert [w.name for w in workers] == names
    assert all((w.role == "both") == w.name.startswith("worker-") for w in workers)


def test_no_worker_at_all_is_refused():
    with pytest.raises(ConfigError, match="nothing to start"):
        plan("up.prefill=0", "up.decode=0")


def test_flags_are_handed_on_and_come_back_the_same():
    assignments = [
        "worker.model=/a b/c",
        "worker.served_model_name=7",
        'engine.dtype="float32"',
        'engine.odd="8"',
        'engine.quoted="say \\"é\\""',
        "transfer.transports=tcp",
        "transfer.options.tcp.streams=3",
        "gateway.request_timeout_s=1.5",
    ]
    expected = resolve(CommandLine(assignments=assignments), {}).to_config()
    config = worker_config(plan(*assignments).workers[0])
    assert config.worker.model == expected.worker.model
    assert config.worker.served_model_name == "7"
    assert config.engine == {**expected.engine, "num_threads": 2}
    assert config.transfer == expected.transfer
    assert config.gateway.request_timeout_s == 1.5


def test_what_children_read_for_themselves_is_not_handed_on(tmp_path):
    file = tmp_path / "baton.toml"
    file.write_text("[worker]\nmodel = '/m'\n", encoding="utf-8")
    launch = plan(environment={"BATON_ENGINE__BLOCK_SIZE": "4"}, file=file)
    words = launch.workers[0].command(launch.file, Ports())
    assert words[4:6] == ("--config", str(file))
    assert not any(word.startswith(("worker.model", "engine.block_size")) for word in words)


def test_a_relative_file_is_found_from_anywhere():
    command = plan().workers[0].command(Path("x.toml"), Ports())
    assert Path(command[5]).is_absolute()


def test_roles_may_have_engines_of_their_own():
    prefill, decode = plan(
        "engine.block_size=16", "up.decode_engine.block_size=32", "up.prefill_engine.num_threads=3"
    ).workers
    assert options_of(prefill) == {"block_size": 16, "num_threads": 3}
    assert options_of(decode) == {"block_size": 32, "num_threads": 2}


def test_overrides_of_a_role_win_over_its_engines_own_table():
    prefill, decode = plan(
        "engine.transformers.block_size=8", "up.decode_engine.block_size=32"
    ).workers
    assert options_of(prefill)["block_size"] == 8
    assert options_of(decode)["block_size"] == 32


def test_roles_may_run_different_engines():
    launch = plan(
        "up.decode_engine_name=vllm",
        "engine.vllm.prefix_caching=false",
        'up.decode_engine.speculative={ method = "ngram", depth = { most = 3 } }',
        'up.decode_engine.arguments=["--seed", "7"]',
    )
    prefill, decode = launch.workers
    assert worker_config(prefill).worker.engine == "transformers"
    assert worker_config(decode).worker.engine == "vllm"
    assert options_of(prefill) == {"num_threads": 2}
    assert options_of(decode) == {
        "num_threads": 2,
        "prefix_caching": False,
        "speculative": {"method": "ngram", "depth": {"most": 3}},
        "arguments": ["--seed", "7"],
    }


@pytest.mark.parametrize(
    ("assignments", "crews"),
    [
        ((), [("transformers", {})]),
        (("up.prefill_engine_name=vllm",), [("vllm", {}), ("transformers", {})]),
        (("up.prefill_engine_name=vllm", "up.prefill=0"), [("transformers", {})]),
        (("up.prefill_engine_name=vllm", "up.decode=0"), [("vllm", {})]),
        (("up.decode_engine.x=1",), [("transformers", {}), ("transformers", {"x": 1})]),
    ],
)
def test_what_runs_in_a_launch(assignments, crews):
    config = resolve(CommandLine(assignments=assignments), {}).to_config()
    assert worker_groups(config) == tuple(WorkerGroup(*crew) for crew in crews)


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ((), {"num_threads": 2}),
        (("engine.num_threads=7",), {"num_threads": 7}),
        (("engine.transformers.num_threads=7",), {"num_threads": 7}),
        (("worker.engine=steam",), {}),
    ],
)
def test_threads_share_the_cores_unless_said_otherwise(assignments, expected):
    (worker, _) = plan(*assignments).workers
    assert options_of(worker) == expected
    assert worker_config(worker).worker.cpu_affinity == ()


def test_pinned_workers_have_cores_of_their_own():
    workers = plan(cores=[1, 3, 5, 7], pinning="own_cores").workers
    assert [worker_config(w).worker.cpu_affinity for w in workers] == [(1, 3), (5, 7)]


def test_the_gateway_gets_its_workers_by_role_and_keeps_its_port():
    launch = plan("up.decode=2", "gateway.workers=http://old:1", "gateway.port=0")
    urls = {worker.name: f"http://127.0.0.1:{i}" for i, worker in enumerate(launch.workers)}
    first = child_config(launch.gateway_command(urls, 0)).gateway
    assert first.prefill == ("http://127.0.0.1:0",)
    assert first.decode == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert first.workers == ()
    assert first.port == 0
    assert child_config(launch.gateway_command(urls, 81)).gateway.port == 81


@given(st.integers(1, 64), st.integers(1, 80))
def test_cores_are_shared_evenly(num_cores, num_workers):
    cores = [2 * i for i in range(num_cores)]
    shares = share_cores(cores, num_workers)
    assert len(shares) == num_workers
    assert {len(share) for share in shares} == {max(1, num_cores // num_workers)}
    assert set().union(*shares) <= set(cores)
    if num_workers <= num_cores:
        used = [core for share in shares for core in share]
        assert len(used) == len(set(used))


TIERS = 'store.tiers=["host", "peer"]'
PORTS = [7001, 7002, 7003]


def config_of(*assignments):
    return resolve(CommandLine(assignments=assignments), {}).to_config()


def test_workers_that_read_each_others_memory_get_an_address_each():
    assignments = (TIERS, "up.prefill=1", "up.decode=2", "store.options.host.capacity_bytes=5")
    assert count_peer_ports(config_of(*assignments)) == 3
    resolved = resolve(CommandLine(assignments=assignments), {})
    planned = plan_launch(resolved, [0], ENGINE_KEYS, "shared_cores", peer_ports=PORTS)
    workers = planned.workers
    stores = [worker_config(worker).store.options for worker in workers]
    urls = [f"tcp://127.0.0.1:{port}" for port in PORTS]
    for at, store in enumerate(stores):
        assert store["host"] == {"capacity_bytes": 5, "listen": f"127.0.0.1:{PORTS[at]}"}
        assert store["peer"]["urls"] == [url for url in urls if url != urls[at]]


@pytest.mark.parametrize(
    "assignments",
    [
        (),
        ('store.tiers=["host"]',),
        (TIERS, 'store.options.peer.urls=["tcp://127.0.0.1:1"]'),
        (TIERS, "up.prefill=0", 'store.options.peer.urls=["tcp://127.0.0.1:1"]'),
    ],
)
def test_peers_that_are_configured_or_not_used_are_left_alone(assignments):
    assert count_peer_ports(config_of(*assignments)) == 0


@pytest.mark.parametrize(
    ("assignments", "why"),
    [
        ((TIERS, "up.prefill=0", "up.decode=1"), "no other one"),
        ((TIERS, "store.options.host.listen='127.0.0.1:1'"), "one address"),
        (('store.tiers=["peer"]',), "--store host,peer"),
    ],
)
def test_peers_that_cannot_be_are_refused_before_anything_starts(assignments, why):
    with pytest.raises(ConfigError, match=why):
        count_peer_ports(config_of(*assignments))


def test_a_gateway_whose_workers_change_gets_their_file_and_a_policy_for_several():
    for assignments, policy in [
        (("up.prefill=0", "up.decode=1"), "cost"),
        ((), "round_robin"),
        (("router.policy=prefix",), "prefix"),
    ]:
        launch = plan(*assignments, "gateway.processes=2", "gateway.management_port=7")
        config = child_config(launch.gateway_command(Path("/run/members.json"), 81))
        assert config.gateway.members == ("file:/run/members.json",)
        assert (config.gateway.prefill, config.gateway.decode, config.gateway.workers) == (
            (),
            (),
            (),
        )
        assert (config.gateway.port, config.gateway.processes) == (81, 2)
        assert config.router.policy == policy


def test_a_launch_in_the_background_gets_the_same_settings():
    assignments = ["up.decode=3", "gateway.port=0", 'engine.dtype="float32"']
    resolved = resolve(CommandLine(assignments=assignments), {"BATON_TRACE__RING_SIZE": "9"})
    words = command_line("up", None, flag_settings(resolved))
    assert words[4::2] == ("--set",) * 3
    again = resolve(CommandLine(assignments=words[5::2]), {}).to_config()
    assert again == resolve(CommandLine(assignments=assignments), {}).to_config()


@pytest.mark.parametrize("seconds", ["1e300", "1e-7", "0.1"])
def test_a_number_is_handed_on_as_it_is(seconds):
    launch = plan(f"gateway.wait_for_worker_s={seconds}")
    gateway = child_config(launch.gateway_command(Path("/m"), 0)).gateway
    assert gateway.wait_for_worker_s == float(seconds)


def test_keys_whose_names_begin_like_a_launchers_are_handed_on():
    launch = plan("gateway.prefill_grace_period_s=7", "gateway.members_interval_s=3")
    gateway = child_config(launch.gateway_command(Path("/members.json"), 0)).gateway
    assert (gateway.prefill_grace_period_s, gateway.members_interval_s) == (7, 3)


def test_the_gateway_gets_the_prices_that_its_dashboard_shows():
    launch = plan("scaling.price_prefill=2", "scaling.max_price=10")
    scaling = child_config(launch.gateway_command(Path("/members.json"), 0)).scaling
    assert (scaling.price_prefill, scaling.max_price) == (2, 10)
