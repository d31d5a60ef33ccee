"""The command line: exit codes, messages, and what is imported when."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from baton import __version__
from baton.cli.fleet import _print_status
from baton.cli.main import run
from baton.config.resolve import CommandLine, resolve
from baton.launch.fleet import FleetMember, FleetStatus
from baton.launch.ray.plan import plan_fleet

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "aiohttp",
    "uvicorn",
    "starlette",
    "uvloop",
    "cryptography",
)
COMMANDS = (
    [],
    ["up"],
    ["status"],
    ["logs"],
    ["scale"],
    ["upgrade"],
    ["gateway"],
    ["worker"],
    ["model", "make"],
    ["config", "show"],
    ["doctor"],
    ["debug", "bundle"],
    ["top"],
    ["bench", "link"],
    ["bench", "serve"],
    ["bench", "compare"],
    ["size"],
    ["plan"],
    ["sim", "handoff"],
    ["route", "explain"],
    ["route", "replay"],
    ["explain"],
    ["trace", "export"],
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def in_a_process(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_help_imports_nothing_heavy():
    """One process for all: what a command imports, it has when that one's help is printed."""
    printed = in_a_process(
        "import json, sys\n"
        "from baton.cli.main import run\n"
        "found = []\n"
        f"for command in {COMMANDS!r}:\n"
        "    code = run([*command, '--help'])\n"
        f"    found.append([code, sorted({set(HEAVY)!r} & set(sys.modules))])\n"
        "print('\\0' + json.dumps(found))"
    )
    found = json.loads(printed.rpartition("\0")[2])
    assert {" ".join(command): result for command, result in zip(COMMANDS, found, strict=True)} == {
        " ".join(command): [0, []] for command in COMMANDS
    }


def processor_time_of(code):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    in_a_process(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_costs_little_more_than_what_prints_it():
    """It takes 0.15 s of an idle core; on a busy one only the ratio tells something."""
    rounds = (
        (
            processor_time_of("from baton.cli.main import run; run(['--help'])"),
            processor_time_of("import cyclopts.help, rich.console, rich.table"),
        )
        for _ in range(5)
    )
    assert any(ours / theirs < 1.5 for ours, theirs in rounds)


def test_leaving_searches_no_module_for_garbage():
    """What is frozen is not looked at: with vLLM's modules that took 2 s."""
    code = (
        "import atexit, gc, sys; sys.argv[1:] = ['--version'];"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count() > 0));"
        "from baton.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout.endswith("frozen True\n"), process.stderr


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("arguments", [["up", "--bogus"], ["dance"], ["up", "--prefill", "x"]])
def test_a_wrong_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        run(arguments)
    assert exit_info.value.code == 2
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "show", "--set", "gateway.prot=1"], "did you mean 'gateway.port'?"),
        (["config", "show", "--config", "/nowhere.toml"], "cannot read the configuration file"),
        (["up", "--prefill", "0", "--decode", "0"], "nothing to start"),
        (["up", "--transport", "pigeon"], "unknown baton.transports 'pigeon'; installed:"),
        (
            ["up", "--engine", "steam"],
            "unknown baton.engines 'steam'; installed: transformers, vllm",
        ),
        (["worker", "--engine", "steam"], "unknown baton.engines 'steam'; installed:"),
        (["worker", "--store", "nosuch"], "unknown baton.tiers 'nosuch'; installed:"),
        (
            ["worker", "--engine", "vllm", "--store", "host", "--set", "store.options.host.x=1"],
            "store.options.host: Object contains unknown field `x`",
        ),
        (["worker", "--transport", "pigeon"], "unknown baton.transports 'pigeon'; installed:"),
        (["up", "--decode-engine", "steam"], "unknown baton.engines 'steam'; installed:"),
        (
            ["up", "--prefill", "0", "--decode", "2", "--set", "router.options.cost.ttft_s=0"],
            "ttft_s",
        ),
        (["up", "--engine", "vllm", "--set", "engine.max_num_seqs=3"], "max_num_seqs"),
        (["up", "--decode-engine", "vllm", "--set", "engine.vllm.dtype=int3"], "'int3'"),
        (
            ["up", "--engine", "vllm", "--set", "up.decode_engine.arguments=['--port=1']"],
            "--port=1",
        ),
        (["worker", "--engine", "vllm", "--set", "worker.cpu_affinity=4095"], "4095"),
        (["up", "--set", "engine.vllm=3"], "engine.vllm is a table"),
        (["up", "--model", "/nowhere"], "--model /nowhere: there is no such folder"),
        (["up", "--set", "engine.blok_size=8"], "blok_size"),
        (["up", "--set", "up.decode_engine.block_size=no"], "block_size"),
        (["up", "--host", "0.0.0.0"], "0.0.0.0 needs a cluster key"),
        (["up", "--near"], "give --on ray"),
        (["plan"], "there are no hosts to plan for"),
        (["plan", "--set", "fleet.hosts=[{name='h'}]"], "the hosts have no room"),
        (["gateway"], "no worker can decode"),
        (
            ["gateway", "--decode", "https://127.0.0.1:1", "--client-keys", "/nowhere.json"],
            "cannot read the clients' keys in /nowhere.json",
        ),
        (["gateway", "--decode", "https://127.0.0.1:1", "--tls-key", "/x"], "go together"),
        (["gateway", "--decode", "nonsense"], "'nonsense' is not a worker's address"),
        (["gateway", "--members", "etcd:/a"], "or announced, with gateway.announce_port"),
        (["store", "serve", "--store", "host", "--port", "65536"], "a number from 0 to 65535"),
        (["key", "client", "add", "--tenant", "a", "--expires-days", "0"], "a number above 0"),
        (["explain", "r", "--gateway", "http://a..b"], "--gateway 'http://a..b'"),
        (["debug", "bundle", "-o", "/nowhere/x"], "there is no folder /nowhere"),
        (["up", "--set", "cluster.key_file=~nobody-here/k"], "the home of no user"),
        (["up", "--set", f"engine.seed={'9' * 5000}"], "seed"),
    ],
)
def test_a_wrong_configuration_exits_with_2_and_no_traceback(arguments, message, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("baton: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_text_of_others_cannot_steer_the_terminal(capsys):
    """Errors quote servers and files, in several lines perhaps."""
    assert run(["config", "show", "--config", "/nowhere\x1b[2J\n\x9b1m"]) == 2
    assert "/nowhere\N{REPLACEMENT CHARACTER}[2J\n" in (said := capsys.readouterr().err)
    assert said.replace("\n", "").isprintable()


def test_why_a_process_ended_cannot_steer_the_terminal(capsys):
    ended = FleetMember(
        name="prefill-0", role="prefill", state="failed", host="h", reason="it wrote \x1b[2J"
    )
    _print_status(FleetStatus(fleet="f", backend="local", version="1", members=(ended,)))
    assert "it wrote" in (shown := capsys.readouterr().out)
    assert shown.replace("\n", "").isprintable()


@pytest.mark.parametrize("key", ["a\nb", "a\u20ac"])
def test_a_key_that_no_header_can_have_is_not_shown(key, capsys, monkeypatch, tmp_path):
    (tmp_path / "body.json").write_text("{}", "utf-8")
    monkeypatch.setenv("BATON_MANAGEMENT_KEY", key)
    assert run(["explain", "r", "--gateway", "http://127.0.0.1:1"]) == 1
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert run(["route", "explain", str(tmp_path / "body.json")]) == 2
    said = capsys.readouterr().err
    for name in ("BATON_MANAGEMENT_KEY", "OPENAI_API_KEY"):
        assert f"baton: {name} has a character that no header can have" in said
    assert key not in said


def test_vllm_that_is_not_installed_says_how_to_install_it():
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from baton.cli.main import run\n"
        "for command in ('worker', 'up'):\n"
        "    assert run([command, '--engine', 'vllm']) == 2\n"
        "    print('next', file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == ""
    assert "Traceback" not in process.stderr
    worker, up, rest = process.stderr.split("next\n")
    assert rest == ""
    for said in (worker, up):
        assert "vLLM, which is not installed" in said
        assert "make install ENGINE=vllm" in said


def test_debug_shows_where_an_error_arose(capsys):
    assert run(["gateway", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def shown(capsys, *arguments):
    assert run(["config", "show", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_config_show_says_where_each_value_came_from(capsys, monkeypatch, tmp_path):
    file = tmp_path / "baton.toml"
    file.write_text("[gateway]\nport = 1\nhost = '::1'\n[engine]\nblock_size = 4\n", "utf-8")
    monkeypatch.setenv("BATON_GATEWAY__PORT", "2")
    monkeypatch.setenv("BATON_CLUSTER_KEY", "ab" * 32)
    rows = shown(capsys, "--config", str(file), "--set", "log.level=error")
    assert rows["gateway.port"] == {"value": 2, "origin": "environment BATON_GATEWAY__PORT"}
    assert rows["gateway.host"] == {"value": "::1", "origin": f"file {file}:3"}
    assert rows["log.level"] == {"value": "error", "origin": "flag --set"}
    assert rows["engine.block_size"] == {"value": 4, "origin": f"file {file}:5"}
    assert rows["engine.max_num_seqs"]["origin"] == "default"
    assert rows["cluster.key"] == {"value": "(hidden)", "origin": "environment BATON_CLUSTER_KEY"}
    assert "abab" not in json.dumps(rows)
    monkeypatch.setenv("BATON_CLUSTER_KEY", "")
    assert "cluster.key" not in shown(capsys), "an empty one is not used"


HOSTS = """
[[fleet.hosts]]
name = "h1.example.com"
zone = "z1"
gpus = 2
labels = {"tier" = "reserved"}
[[fleet.hosts]]
name = "h2.example.com"
zone = "z1"
gpus = 2
[ray.workers.prefill]
gpus = 1
[ray.workers.decode]
gpus = 1
"""


def test_a_plan_replaces_an_older_file_by_one_that_only_its_owner_can_read(capsys, tmp_path):
    file, output = tmp_path / "baton.toml", tmp_path / "fleet.toml"
    file.write_text(HOSTS, "utf-8")
    output.write_text("# older", "utf-8")
    output.chmod(0o644)
    arguments = ["plan", "--prefill", "2", "--decode", "2", "--config", str(file), "--output"]
    assert run([*arguments, str(output)]) == 0
    assert output.stat().st_mode & 0o777 == 0o600
    assert "assignments" in output.read_text("utf-8")
    assert run([*arguments, str(file)]) == 2
    assert "is the --config file" in capsys.readouterr().err
    assert file.read_text("utf-8") == HOSTS
    assert sorted(tmp_path.iterdir()) == [file, output]
    assert run([*arguments, "/dev/null"]) == 0


def test_a_plan_is_written_into_pipes_and_mounted_files(monkeypatch, tmp_path):
    file, output = tmp_path / "baton.toml", tmp_path / "fleet.toml"
    file.write_text(HOSTS, "utf-8")
    arguments = ["plan", "--prefill", "2", "--decode", "2", "--config", str(file), "--output"]
    reader, writer = os.pipe()
    assert run([*arguments, f"/dev/fd/{writer}"]) == 0
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        planned = pipe.read()
    assert "assignments" in planned

    def replace(path, _):
        raise OSError(errno.EBUSY, "it is mounted", str(path))

    monkeypatch.setattr(Path, "replace", replace)
    output.write_text("# longer" * len(planned), "utf-8")
    output.chmod(0o644)
    number = output.stat().st_ino
    assert run([*arguments, str(output)]) == 0
    assert output.read_text("utf-8") == planned
    assert output.stat().st_mode & 0o777 == 0o600
    assert output.stat().st_ino == number
    assert sorted(tmp_path.iterdir()) == [file, output]


def test_a_plan_is_a_configuration_that_starts_what_was_planned(capsys, tmp_path):
    file, output = tmp_path / "baton.toml", tmp_path / "fleet.toml"
    file.write_text(HOSTS, "utf-8")
    arguments = ["plan", "--prefill", "2", "--decode", "2", "--output", str(output)]
    assert run([*arguments, "--config", str(file), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert output.stat().st_mode & 0o077 == 0
    given = ["gateway.insecure=true"]
    started = resolve(CommandLine(file=output, assignments=given), {})
    fleet = plan_fleet(started, "f", "1", "cost", has_key_file=False)
    assigned = {name: path for group in fleet.groups for name, path in group.assignments.items()}
    assert assigned == {each["name"]: each["host"] for each in planned["workers"]}
    assert sorted(assigned) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    for name in ("prefill-0", "prefill-1"):
        assert assigned[name] == assigned[name.replace("prefill", "decode")]
    assert started.to_config().fleet.hosts[0].labels == {"tier": "reserved"}
    assert run(["plan", "--config", str(output), "--output", str(output)]) == 0, "again"
    assert "prefill-0 (same_host)" in capsys.readouterr().out
    assert run(["up", "--config", str(output)]) == 2
    assert "give --on ray" in capsys.readouterr().err


def test_config_show_as_a_table(capsys):
    assert run(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (port,) = [line for line in lines if line.startswith("gateway.port ")]
    assert port.split() == ["gateway.port", "8000", "default"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status"], 1, "no fleet named default runs on this machine. Start one with `baton up"),
        (["down", "--fleet", "night"], 1, "no fleet named night runs"),
        (["logs", "gateway"], 1, "fleet default has no log of 'gateway'; there are none"),
        (["drain", "w", "--on", "mars"], 2, "unknown baton.fleets 'mars'; installed: "),
        (["scale", "--decode=-1"], 2, "--decode -1: give a number from 0"),
        (["scale"], 2, "how many workers? Give --prefill, --decode or --workers a number"),
        (["upgrade", "--fleet", "../x"], 2, "'../x' is no name"),
    ],
)
def test_control_without_a_fleet_says_what_to_do(arguments, code, message, capsys):
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [["size", "--list"], ["config", "show", "--json"]])
def test_output_that_nobody_reads_any_more_is_no_error(arguments):
    """As of `baton size --list | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "baton.cli", *arguments]
    try:
        process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (process.returncode, process.stderr) == (0, b"")
