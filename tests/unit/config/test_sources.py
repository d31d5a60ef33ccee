"""Files, variables and assignments: what they may say, and how a mistake is answered."""

import pytest

from baton.config.resolve import (
    CommandLine,
    FromEnvironment,
    FromFile,
    FromFlag,
    Setting,
    Text,
    Typed,
    describe,
    find_line,
    read_assignments,
    read_file,
    read_variables,
    resolve,
)
from baton.errors import ConfigError

FILE = """\
# a comment
[gateway]
port = 9000   # not the default

[up.decode_engine]
block_size = 8

[transfer.options.tcp]
streams = 4
"""


def write(tmp_path, text):
    path = tmp_path / "baton.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_settings_with_their_lines(tmp_path):
    path = write(tmp_path, FILE)
    assert read_file(path) == {
        "gateway.port": Setting(Typed(9000), FromFile(path, 3)),
        "up.decode_engine.block_size": Setting(Typed(8), FromFile(path, 6)),
        "transfer.options.tcp.streams": Setting(Typed(4), FromFile(path, 9)),
    }


def test_paths_in_a_file_are_relative_to_the_file(tmp_path):
    path = write(tmp_path, '[worker]\nmodel = "models/mine"\n[cluster]\nkey_file = "/k"\n')
    layer = read_file(path)
    assert layer["worker.model"].value == Typed(str(tmp_path / "models/mine"))
    assert layer["cluster.key_file"].value == Typed("/k")


def test_every_setting_that_names_a_file_is_relative_to_the_file(tmp_path):
    path = write(
        tmp_path,
        '[security]\nidentity = "ids/a"\n[router]\ncosts_file = "costs.json"\n'
        '[router.tokenizers]\n"my/model" = "models/mine"\n',
    )
    values = {name: setting.value for name, setting in read_file(path).items()}
    assert values == {
        "security.identity": Typed(str(tmp_path / "ids/a")),
        "router.costs_file": Typed(str(tmp_path / "costs.json")),
        "router.tokenizers.my/model": Typed(str(tmp_path / "models/mine")),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gateway]\nprot = 1\n", r"baton.toml:2: unknown key 'gateway.prot'; did you mean 'gate"),
        ("[gatway]\nport = 1\n", r"unknown key 'gatway.port'; did you mean 'gateway.port'"),
        ("[nothing]\nlike_it = 1\n", r"baton.toml:2: unknown key 'nothing.like_it'$"),
        ("gateway = 3\n", r"baton.toml:1: 'gateway' is a table, not a value"),
        ("engine = 3\n", r"'engine' is a table, not a value"),
        ("[gateway\n", r"baton.toml is not TOML: .*line 1"),
        (f"[engine]\nseed = {'9' * 5000}\n", r"baton.toml is not TOML: .*4300 digits"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_file(write(tmp_path, text))


def test_an_unreadable_file_says_what_why_and_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.toml: No such file.*--config"):
        read_file(tmp_path / "nowhere.toml")


def test_variables_become_settings_and_others_are_left_alone():
    layer = read_variables({
        "BATON_GATEWAY__PORT": "9",
        "BATON_ENGINE__BLOCK_SIZE": "8",
        "BATON_CONFIG": "x",
        "BATON_CLUSTER_KEY": "secret",
        "BATON_RANDOM_SEED": "1",
        "PATH": "/bin",
    })
    assert layer == {
        "gateway.port": Setting(Text("9"), FromEnvironment("BATON_GATEWAY__PORT")),
        "engine.block_size": Setting(Text("8"), FromEnvironment("BATON_ENGINE__BLOCK_SIZE")),
    }


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("BATON_GATEWAY__PRT", "did you mean 'BATON_GATEWAY__PORT'"),
        ("BATON_GATEWAY_PORT", "did you mean 'BATON_GATEWAY__PORT'"),
        ("BATON_NO__SUCH", "sets nothing$"),
    ],
)
def test_a_variable_that_would_be_lost_is_refused(variable, message):
    with pytest.raises(ConfigError, match=message):
        read_variables({variable: "1"})


@pytest.mark.parametrize("text", ["tcp://10.96.0.10:80", "udp://[fd00::1]:53", "tcp://a:1"])
def test_what_kubernetes_sets_for_a_service_is_no_setting(text: str) -> None:
    assert read_variables({"BATON_GATEWAY_PORT": text, "BATON_WORKER_PORT": text}) == {}
    with pytest.raises(ConfigError, match="did you mean 'BATON_GATEWAY__HOST'"):
        read_variables({"BATON_GATEWAY_HOST": text})


@pytest.mark.parametrize(
    "text", ['{method = "ngram", size.max = 3}', '{"method": "ngram", "size": {"max": 3}}']
)
def test_an_inline_table_is_that_of_a_file(text: str) -> None:
    flag = CommandLine(assignments=[f"engine.speculative={text}"])
    for resolved in (
        resolve(flag, {}),
        resolve(CommandLine(), {"BATON_ENGINE__SPECULATIVE": text}),
    ):
        assert resolved.values["engine.speculative.size.max"].value == 3
        assert resolved.to_config().engine["speculative"] == {"method": "ngram", "size": {"max": 3}}
    assert read_assignments(["gateway={port=1}"]) == {
        "gateway.port": Setting(Typed(1), FromFlag("--set"))
    }


def test_a_variables_table_keeps_the_case_and_the_dots_of_its_names() -> None:
    variables = {
        "BATON_ROUTER__TARGETS__MyModel__TTFT_S": "1",
        "BATON_ROUTER__TARGETS": '{"Qwen/Q2.5" = {ttft_s = 2}, MyModel.ttft_s = 3}',
        "BATON_ENGINE": "another's",
    }
    resolved = resolve(CommandLine(), variables)
    targets = resolved.to_config().router.targets
    assert {name: table.ttft_s for name, table in targets.items()} == {
        "mymodel": 1,
        "Qwen/Q2.5": 2,
        "MyModel": 3,
    }
    assert not [name for name in resolved.values if name.startswith("engine")]


@pytest.mark.parametrize(
    "text", [" {m = {ttft_s = 2}}\n", '\n{\n  "m": {"ttft_s": 2}\n}\n', "\n{m.ttft_s = 2}"]
)
def test_blanks_and_line_ends_around_a_table_are_left_out(text: str) -> None:
    resolved = resolve(CommandLine(), {"BATON_ROUTER__TARGETS": text})
    assert resolved.to_config().router.targets["m"].ttft_s == 2


def test_of_a_variables_table_a_variable_for_one_key_wins() -> None:
    variables = {"BATON_ENGINE__A__B": "1", "BATON_ENGINE__A": "{b = 2, c = 3}"}
    assert resolve(CommandLine(), variables).to_config().engine == {"a": {"b": 1, "c": 3}}


def test_what_is_no_table_is_a_value_of_its_key() -> None:
    text = "{worker}.preempted"
    resolved = resolve(CommandLine(assignments=[f"preemption.file={text}"]), {})
    assert resolved.to_config().preemption.file == text


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ('engine.a={method="ngram"', "no inline table"),
        ("gateway={prot=1}", "did you mean 'gateway.port'"),
    ],
)
def test_a_table_that_is_none_is_said(assignment: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_assignments([assignment])


def test_assignments():
    assert read_assignments(["gateway.port=1", "worker.name=a=b"]) == {
        "gateway.port": Setting(Text("1"), FromFlag("--set")),
        "worker.name": Setting(Text("a=b"), FromFlag("--set")),
    }
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        read_assignments(["gateway.port"])
    with pytest.raises(ConfigError, match=r"--set: unknown key .gateway\.prot."):
        read_assignments(["gateway.prot=1"])


def test_lines_are_found_in_tables_and_dotted_keys():
    text = '[a]\nx = 1\n[b.c]\nx = 2\n[d]\ne.f = 3\n["g"]\n"h" = 4\n'
    assert [find_line(text, name) for name in ("a.x", "b.c.x", "d.e.f", "g.h")] == [2, 4, 6, 8]
    assert find_line(text, "b.x") is None


def test_origins_read_well(tmp_path):
    path = tmp_path / "f"
    assert describe(FromFile(path, 3)) == f"file {path}:3"
    assert describe(FromFile(path, None)) == f"file {path}"
    assert describe(FromFlag("--port")) == "flag --port"
