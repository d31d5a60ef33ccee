"""Which processes a fleet on Ray has, and what they read on their hosts."""

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.resolve import CommandLine, resolve
from baton.errors import ConfigError, ProtocolError
from baton.launch.ray.hosts import list_assignable, list_selectors, path_of
from baton.launch.ray.plan import (
    RayHostFacts,
    explain_unplaced,
    given_settings,
    list_needs,
    number_of,
    plan_fleet,
    read_labels,
    read_plan,
    role_of,
    settings_file,
    show_labels,
)


def plan(*assignments, environment=None, file=None, fleet="f", insecure=True):
    given = [*assignments, *(["gateway.insecure=true"] if insecure else [])]
    resolved = resolve(CommandLine(file=file, assignments=given), environment or {})
    return plan_fleet(resolved, fleet, "1", "cost", has_key_file=False)


def names(fleet):
    return [name for group in fleet.groups for name in group.names]


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ((), ["gateway-0", "prefill-0", "decode-0"]),
        (("ray.gateways=2", "up.decode=2"), "gateway-0 gateway-1 prefill-0 decode-0 decode-1"),
        (("up.prefill=0", "up.decode=2"), ["gateway-0", "worker-0", "worker-1"]),
    ],
)
def test_processes(assignments, expected):
    expected = expected.split() if isinstance(expected, str) else expected
    assert names(plan(*assignments)) == expected


def test_other_hosts_get_what_was_set_here_by_file_environment_and_flag(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text('[engine]\ndtype = "float32"\n[gateway]\nclient_keys_file = "keys"\n')
    fleet = plan(
        "handoff.lease_s=5",
        "worker.name=mine",
        "up.decode_engine.block_size=8",
        environment={"BATON_GATEWAY__PORT": "9000"},
        file=path,
        insecure=False,
    )
    assert fleet.settings == {
        "engine.dtype": "float32",
        "gateway.client_keys_file": str(tmp_path / "keys"),
        "gateway.port": 9000,
        "handoff.lease_s": 5.0,
    }
    assert fleet.group_of("decode").settings == {
        "worker.engine": "transformers",
        "engine.transformers.block_size": 8,
    }


def test_a_host_reads_back_what_was_set(tmp_path):
    fleet = plan(
        'gateway.allowed_hosts=["a","b"]',
        "router.targets.my model.ttft_s=2",
        'router.targets."llama-3.1".ttft_s=3',
        "transfer.options.tcp.streams=3",
        'worker.served_model_name=quote " and \\ and ünïcode',
    )
    path = tmp_path / "settings.toml"
    path.write_text(settings_file(fleet.settings), encoding="utf-8")
    read = resolve(CommandLine(file=path), {})
    for name, value in fleet.settings.items():
        assert read.values[name].value == value
    targets = read.to_config().router.targets
    assert (targets["my model"].ttft_s, targets["llama-3.1"].ttft_s) == (2.0, 3.0)


def test_of_a_table_each_setting_is_written_once(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text("transfer.options.tcp = {streams = 2, port = 1}\n", encoding="utf-8")
    variables = {"BATON_TRANSFER__OPTIONS__TCP": "{streams = 8}"}
    text = settings_file(given_settings(resolve(CommandLine(path), variables)))
    assert tomllib.loads(text)["transfer"]["options"] == {"tcp": {"streams": 8, "port": 1}}


@given(
    st.dictionaries(
        st.sampled_from(["engine.a", "engine.b-c", "worker.model", 'engine.q"q', "engine.ü"]),
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs", "Cc"])),
            st.integers(-(2**60), 2**60),
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
            st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"])), max_size=3),
        ),
    )
)
def test_every_setting_can_be_written_as_toml(settings):

    def lookup(tree, name):
        for part in name.split("."):
            tree = tree[part]
        return tree

    tree = tomllib.loads(settings_file(settings))
    assert {name: lookup(tree, name) for name in settings} == settings


def test_a_plan_goes_through_rays_head_as_json():
    fleet = plan("ray.workers.decode.gpus=1", 'ray.workers.decode.labels=["rack=in(r1,r2)"]')
    assert read_plan(msgspec.json.encode(fleet)) == fleet
    with pytest.raises(ProtocolError, match="no plan"):
        read_plan(b"{}")


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("ray.workers.both.gpus=1",), "ray.workers has both"),
        (('ray.workers.decode.labels=["rack"]',), "selects no hosts"),
        (('ray.gateway_labels=["rack=a","rack=b"]',), "given twice"),
        (('store.tiers=["host","peer"]',), "store.options.peer.urls"),
        (("ray.workers.decode.cores=1",), "cores"),
        (("ray.workers.decode.placement=anywhere",), "placement"),
        (("fleet.assignments.decode-1=//h1",), "names decode-1"),
        (("fleet.assignments.decode-0=z1/h1",), "zone/rack/host"),
        (
            ("fleet.assignments.decode-0=//h1", "ray.workers.decode.within=rack"),
            "placement or within",
        ),
    ],
)
def test_what_cannot_work_is_refused(assignments, message):
    with pytest.raises(ConfigError, match=message):
        plan(*assignments)


def test_gateways_beyond_loopback_need_client_keys():
    with pytest.raises(ConfigError, match="--client-keys"):
        plan(insecure=False)
    assert plan("gateway.host=127.0.0.1", insecure=False).settings["gateway.host"] == "127.0.0.1"


@pytest.mark.parametrize("fleet", ["", "A", "a b", "-a", "a" * 64, "../x"])
def test_fleet_names(fleet):
    with pytest.raises(ConfigError, match="--fleet"):
        plan(fleet=fleet)


def test_selectors():
    selector = read_labels(["ray.io/accelerator-type=H100", "rack=in(r1,r2)", "tier=!spot"])
    assert selector == {
        "ray.io/accelerator-type": "H100",
        "rack": "in(r1,r2)",
        "tier": "!spot",
    }
    shown = show_labels(selector)
    assert read_labels(shown.replace("in(r1,r2)", "r1").split(", ")) == selector | {"rack": "r1"}


def test_names_have_roles_and_numbers():
    assert (role_of("worker-12"), number_of("worker-12")) == ("both", 12)
    with pytest.raises(ProtocolError):
        role_of("decode")


def test_why_a_process_has_no_host():
    fleet = plan('ray.workers.decode.labels=["rack=r9"]', "ray.workers.decode.gpus=2")
    hosts = [RayHostFacts("10.0.0.1", {"rack": "r1", "ray.io/node-id": "ab"}, 1.0)]
    text = explain_unplaced(fleet, ["decode-0"], hosts, 60.0)
    assert "decode-0: labels rack=r9, 2 GPUs" in text
    assert "10.0.0.1: labels rack=r1, 1 GPUs" in text
    assert "node-id" not in text


def test_workers_start_where_they_are_assigned_to():
    fleet = plan("up.decode=2", "fleet.assignments.decode-1=z1/r1/h.2")
    assert fleet.group_of("decode").assignments == {"decode-1": "z1/r1/h.2"}
    assert fleet.group_of("prefill").assignments == {}
    assert not any(name.startswith("fleet.") for name in fleet.settings)
    assert read_plan(msgspec.json.encode(fleet)) == fleet


def test_a_host_that_is_gone_is_followed_by_its_rack_and_its_zone():
    assert list_selectors({"tier": "!spot"}, "z1/r1/h1") == [
        {"tier": "!spot", "host": "h1", "rack": "r1"},
        {"tier": "!spot", "rack": "r1"},
        {"tier": "!spot", "zone": "z1"},
        {"tier": "!spot", "ray.io/availability-zone": "z1"},
        {"tier": "!spot"},
    ]
    assert list_selectors({"rack": "in(r1,r2)"}, "//h1") == [
        {"rack": "in(r1,r2)", "host": "h1"},
        {"rack": "in(r1,r2)"},
    ]
    assert list_selectors({"a": "b"}, None) == [{"a": "b"}]


def test_hosts_are_known_by_their_labels():
    labels = {"host": "h1", "rack": "r1", "ray.io/availability-zone": "z1", "tier": "spot"}
    facts = [RayHostFacts("10.0.0.1", labels, 2.0, 8.0, 1 << 30), RayHostFacts("10.0.0.2", {}, 8.0)]
    (found,) = list_assignable(facts)
    assert (found.zone, found.rack, found.name) == ("z1", "r1", "h1")
    assert (found.gpus, found.cpus, found.memory_bytes) == (2.0, 8.0, 1 << 30)
    assert path_of(labels) == "z1/r1/h1"
    assert path_of({"rack": "r1"}) == "/r1"
    with pytest.raises(ConfigError, match="label `host`"):
        list_assignable(facts[1:])


def test_needs_are_those_of_each_role():
    config = resolve(
        CommandLine(
            assignments=[
                "up.prefill=2",
                "ray.workers.decode.gpus=1",
                "ray.workers.decode.cpus=4",
                "ray.workers.decode.memory_bytes=1024",
                'ray.workers.decode.labels=["rack=r1"]',
            ]
        ),
        {},
    ).to_config()
    prefill, decode = list_needs(config)
    assert (prefill.role, prefill.names) == ("prefill", ("prefill-0", "prefill-1"))
    assert prefill.amounts == (0.0, 1.0, 0.0)
    assert decode.amounts == (1.0, 4.0, 1024.0)
    assert decode.selector == {"rack": "r1"}


@pytest.mark.parametrize("name", ["worker.model", "router.tokenizers.demo"])
def test_paths_are_absolute(name):
    fleet = plan(f"{name}=models/x")
    assert fleet.settings[name] == str(Path("models/x").absolute())
