"""The layers, merged and checked."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.resolve import (
    CommandLine,
    FromDefault,
    FromEnvironment,
    FromFile,
    FromFlag,
    closed_keys,
    environment_name,
    open_tables,
    resolve,
)
from baton.config.sections import Config, TargetsTable
from baton.errors import ConfigError
from baton.router.placement import POLICIES
from baton.store.interface import TIERS
from baton.transfer.interface import TRANSPORTS

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_with_no_source_everything_is_default():
    resolved = resolve(CommandLine(), {})
    assert resolved.to_config() == Config()
    assert all(resolved.values[name].origin == FromDefault() for name in closed_keys())


@given(st.sets(st.sampled_from(["file", "environment", "flag"])))
def test_the_stronger_source_wins(tmp_path_factory, sources):
    path = tmp_path_factory.mktemp("config") / "baton.toml"
    path.write_text("[gateway]\nport = 1\n" if "file" in sources else "", encoding="utf-8")
    environment = {"BATON_GATEWAY__PORT": "2"} if "environment" in sources else {}
    flags = {"gateway.port": ("--port", 3)} if "flag" in sources else {}
    value = resolve(CommandLine(path, flags), environment).values["gateway.port"]
    expected = {
        "flag": (3, FromFlag("--port")),
        "environment": (2, FromEnvironment("BATON_GATEWAY__PORT")),
        "file": (1, FromFile(path, 2)),
    }
    strongest = next((s for s in expected if s in sources), None)
    assert (value.value, value.origin) == expected.get(strongest, (8000, FromDefault()))


def test_each_value_of_a_table_is_of_its_strongest_source(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text("[transfer.options.tcp]\nstreams = 2\ntls = true\n", encoding="utf-8")
    variables = {"BATON_TRANSFER__OPTIONS__TCP": "{streams = 8}"}
    resolved = resolve(CommandLine(path), variables)
    assert resolved.to_config().transfer.options == {"tcp": {"streams": 8, "tls": True}}
    name = "transfer.options.tcp"
    assert {key: value.origin for key, value in resolved.values.items() if name in key} == {
        f"{name}.streams": FromEnvironment("BATON_TRANSFER__OPTIONS__TCP"),
        f"{name}.tls": FromFile(path, 3),
    }


@pytest.mark.parametrize(
    ("file", "variable", "assignment", "expected"),
    [
        ("a = 3", "{level = 3}", None, {"level": 3}),
        ("a = 3", None, "a.level.x=1", {"level": {"x": 1}}),
        ("a = {level = 3}", "5", None, 5),
        (None, "{level = {x = 3}, size = 1}", "a.level=O3", {"level": "O3", "size": 1}),
        ("a = {level = 3}", "5", "a.size=1", {"size": 1}),
        ('"a.b" = 3', "{level = 3}", '"a.b".c=1', {"level": 3}),
    ],
)
def test_a_value_and_a_table_replace_each_other_in_a_weaker_source(
    file, variable, assignment, expected, tmp_path
):
    path = tmp_path / "baton.toml"
    path.write_text(f"[engine]\n{file}\n" if file else "", encoding="utf-8")
    assignments = [f"engine.{assignment}"] if assignment else []
    variables = {"BATON_ENGINE__A": variable} if variable else {}
    engine = resolve(CommandLine(path, assignments=assignments), variables).to_config().engine
    assert engine["a"] == expected
    assert engine.get("a.b", {"c": 1}) == {"c": 1}


@pytest.mark.parametrize("name", ["preemption.file", "router.tokenizers.m"])
def test_the_home_directory_is_that_of_a_file(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for resolved in (
        resolve(CommandLine(), {environment_name(name): "~/a"}),
        resolve(CommandLine(assignments=[f"{name}=~/a"]), {}),
    ):
        assert resolved.values[name].value == str(tmp_path / "a")
    assert resolve(CommandLine(assignments=[f"{name}=./a"]), {}).values[name].value == "./a"


def test_the_file_can_be_named_by_the_environment(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text("[trace]\nring_size = 7\n", encoding="utf-8")
    resolved = resolve(CommandLine(), {"BATON_CONFIG": str(path)})
    assert resolved.to_config().trace.ring_size == 7
    assert resolved.file == path


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gateway.port", "0", 0),
        ("gateway.request_timeout_s", "1.5", 1.5),
        ("gateway.prefill", "http://a:1, http://b:2", ("http://a:1", "http://b:2")),
        ("gateway.prefill", '["http://a:1"]', ("http://a:1",)),
        ("gateway.prefill", "[]", ()),
        ("worker.cpu_affinity", "0,2", (0, 2)),
        ("worker.name", "7", "7"),
        ("worker.served_model_name", "null-model", "null-model"),
        ("gateway.audit_log", "null", None),
        ("worker.numa_node", "null", None),
        ("worker.name", "null", "null"),
        ("engine.block_size", "8", 8),
        ("engine.dtype", "float32", "float32"),
        ("engine.dtype", '"8"', "8"),
    ],
)
def test_text_becomes_what_the_key_is(name, text, value):
    assert resolve(CommandLine(assignments=[f"{name}={text}"]), {}).values[name].value == value
    variables = {environment_name(name): text}
    assert resolve(CommandLine(), variables).values[name].value == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gateway.port", "many", r"gateway.port: Expected `int`.*\(environment BATON_GATEWAY__P"),
        ("gateway.port", "65536", r"gateway.port: Expected `int` <= 65535"),
        ("worker.cpu_affinity", "2147483648", r"worker.cpu_affinity: Expected `int` <= 65535"),
        ("worker.role", "cook", r"worker.role: Invalid enum value 'cook'"),
        ("worker.drain_timeout_s", "0", r"worker.drain_timeout_s: Expected `float` > 0"),
        ("gateway.drain_timeout_s", "inf", r"gateway.drain_timeout_s: inf is no finite .*BATON_G"),
        ("router.targets.m.ttft_s", "inf", r"router.targets.m.ttft_s: inf is no finite number"),
        ("engine.a", "[1.0, [nan]]", r"engine.a: nan is no finite number"),
        ("engine.a", "[{b = {c = -inf}}]", r"engine.a: -inf is no finite number"),
        ("fleet.hosts", '[{name = "h", gpus = inf}]', r"fleet.hosts: inf is no finite number"),
        ("transfer.transports", "[]", r"transfer.transports: Expected `array` of length >= 1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_origin(name, text, message):
    with pytest.raises(ConfigError, match=message):
        resolve(CommandLine(), {environment_name(name): text})


def test_a_wrong_type_in_a_file_names_file_and_line(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text('[gateway]\nport = "80"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"gateway.port: Expected `int`.*baton.toml:2\)"):
        resolve(CommandLine(path), {})


def test_a_value_and_a_table_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="a value and to a table"):
        resolve(CommandLine(assignments=["engine.a=1", "engine.a.b=2"]), {}).to_config()


@pytest.mark.parametrize("section", ["store", "handoff"])
def test_an_encoding_and_an_error_budget_exclude_each_other(section):
    settings = [f"{section}.error_budget=0.02", f"{section}.encoding=int8"]
    for each in settings:
        resolve(CommandLine(assignments=[each]), {}).to_config()
    with pytest.raises(ConfigError, match=f"^{section}: .*int8.*set one only$"):
        resolve(CommandLine(assignments=settings), {}).to_config()


def test_a_transports_options_are_a_table():
    not_a_table = r"^transfer\.options\[\.\.\.\]: Expected `object`, got `int`"
    with pytest.raises(ConfigError, match=not_a_table):
        resolve(CommandLine(assignments=["transfer.options.tcp=3"]), {}).to_config()


def test_the_tree_holds_open_tables():
    config = resolve(
        CommandLine(assignments=["transfer.options.tcp.streams=3", "up.decode_engine.x=1"]), {}
    ).to_config()
    assert config.transfer.options == {"tcp": {"streams": 3}}
    assert config.up.decode_engine == {"x": 1}


def test_a_models_name_may_have_dots(tmp_path):
    path = tmp_path / "baton.toml"
    path.write_text(
        '[router.tokenizers]\n"org/llama-3.1-8b" = "/models/llama"\n'
        '[router.targets."org/llama-3.1-8b"]\nttft_s = 2.0\n',
        encoding="utf-8",
    )
    flag = 'router.targets."org/llama-3.1-8b".itl_s=0.05'
    resolved = resolve(CommandLine(path, assignments=[flag]), {})
    router = resolved.to_config().router
    assert router.tokenizers == {"org/llama-3.1-8b": "/models/llama"}
    assert router.targets == {"org/llama-3.1-8b": TargetsTable(ttft_s=2.0, itl_s=0.05)}


def test_every_key_is_documented():
    text = DOCS.read_text(encoding="utf-8")
    sections = {name.partition(".")[0] for name in closed_keys()}
    missing = [name for name in (*closed_keys(), *open_tables()) if f"`{name}`" not in text]
    assert not missing
    shown = {
        "cluster",
        "kubernetes",
        "scaling",
        "security",
        "gateway",
        "worker",
        "preemption",
        "handoff",
        "store",
        "transfer",
        "router",
        "up",
        "ray",
        "fleet",
        "trace",
        "alerts",
        "log",
    }
    assert shown == sections


def test_every_option_of_our_plugins_is_documented():
    text = DOCS.read_text(encoding="utf-8")
    missing = [
        f"{kind}.{name}"
        for registry in (TRANSPORTS, TIERS, POLICIES)
        for kind in registry.kinds()
        for name in registry.plugin(kind).options.__struct_fields__
        if not re.search(rf"`{kind}\.{name}[`.]", text)
    ]
    assert not missing
