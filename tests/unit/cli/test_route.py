"""`baton route`: what it prints, and its errors."""

import json
import os
import signal
import subprocess
import sys
from itertools import count

import matplotlib as mpl
import msgspec
import pytest

from baton.bench.charts import check_plot, plot_route
from baton.bench.files import save_result
from baton.cli.main import run
from baton.errors import ConfigError
from baton.gateway.learned_costs import KeptCosts, KeptFile, KeptLine, KeptPromptLine
from baton.ops.route import print_explanation
from baton.protocol.route_explanation import RouteCandidate, RouteExplanation
from baton.sim.router import simulation
from baton.sim.router.costs import SimulatedCosts
from baton.sim.router.outcomes import RequestOutcome

SMALL = ("--requests", "40", "--workers", "2", "--concurrency", "4")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def replay(capsys, *arguments):
    code = run(["route", "replay", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def mooncake(*requests):
    lines = [
        {"timestamp": at, "input_length": num, "output_length": 4, "hash_ids": ids}
        for at, num, ids in requests
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_row_for_each_policy_and_the_same_each_time(capsys):
    code, out, _ = replay(capsys, *SMALL, "--policy", "round_robin", "--policy", "prefix")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("multi-turn")
    assert "40 requests, workers: 2 both" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == ["round_robin", "prefix"]
    assert replay(capsys, *SMALL, "--policy", "round_robin", "--policy", "prefix")[1] == out


def interrupt_after(monkeypatch, num_requests):
    """Ctrl-C while the last of so many requests ends."""
    num_left = count(num_requests, -1)

    def end(**fields):
        if next(num_left) == 1:
            signal.raise_signal(signal.SIGINT)
        return RequestOutcome(**fields)

    monkeypatch.setattr(simulation, "RequestOutcome", end)


def test_what_was_reached_until_ctrl_c_is_shown_as_partial(capsys, monkeypatch):
    policies = ("--policy", "round_robin", "--policy", "prefix", "--policy", "cost")
    interrupt_after(monkeypatch, 60)
    code, out, _ = replay(capsys, *SMALL, *policies, "--json")
    assert code == 130
    report = json.loads(out)
    assert report["is_partial"]
    nums = {each["policy"]: each["summary"]["num_requests"] for each in report["policies"]}
    assert nums == {"round_robin": 40, "prefix": 19}
    interrupt_after(monkeypatch, 60)
    code, out, _ = replay(capsys, *SMALL, *policies)
    assert code == 130
    assert out.startswith("PARTIAL: interrupted; prefix after 19 requests\n")
    interrupt_after(monkeypatch, 1)
    with pytest.raises(SystemExit, match="130"):  # nothing was reached
        replay(capsys, *SMALL, *policies)


def test_another_process_gives_the_same(capsys):
    """Nothing depends on the order of sets of texts, which differs from process to process."""
    ours = replay(capsys, *SMALL, "--json")[1]
    other = subprocess.run(
        [sys.executable, "-m", "baton.cli", "route", "replay", *SMALL, "--json"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert other.stdout == ours


def test_equal_hash_ids_of_a_trace_are_equal_tokens(capsys, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(mooncake((0, 1100, [1, 2, 3]), (9000, 1600, [1, 2, 4, 5]), (20000, 600, [9])))
    code, out, _ = replay(capsys, str(file), "--policy", "prefix", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["costs"]["block_size"] == 512
    summary = report["policies"][0]["summary"]
    assert summary["prompt_tokens"] == 3300
    assert summary["saved_tokens"] == 1024
    assert summary["seconds"] > 20
    faster = json.loads(
        replay(capsys, str(file), "--policy", "prefix", "--json", "--speed", "10")[1]
    )
    assert faster["policies"][0]["summary"]["seconds"] < 3


def test_other_formats_are_replayed_by_lengths(capsys, tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    batch = tmp_path / "batch.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 3}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    batch.write_text(json.dumps(line) + "\n")
    for file, num_tokens in ((azure, 770), (batch, 107)):
        code, out, _ = replay(capsys, str(file), "--policy", "least_loaded", "--json")
        assert code == 0
        summary = json.loads(out)["policies"][0]["summary"]
        assert summary["prompt_tokens"] == pytest.approx(num_tokens, abs=3)


def test_prefill_and_decode_workers(capsys):
    _, out, _ = replay(capsys, *SMALL[:2], "--roles", "1p2d", "--policy", "round_robin", "--json")
    report = json.loads(out)
    assert list(report["workers"].values()) == ["prefill", "decode", "decode"]
    summary = report["policies"][0]["summary"]
    assert summary["decisions"] == {"one worker": 0, "handed over": 40}
    assert summary["prefills"] == {"prefill-0": 40}


def test_options_of_policies_are_the_configurations(capsys):
    setting = "router.options.cost.objective=throughput"
    arguments = (*SMALL, "--policy", "cost", "--ttft-s", "1.5", "--json")
    _, out, _ = replay(capsys, *arguments, "--set", setting)
    options = json.loads(out)["policies"][0]["options"]
    assert options == {"ttft_s": 1.5, "tpot_s": 0.1, "objective": "throughput"}


def test_limits_of_good_requests_are_those_of_the_policy(capsys):
    """As the command line has them, else as configured, else its defaults."""
    setting = ("--set", "router.options.cost.ttft_s=0.001")
    arguments = (*SMALL, "--policy", "cost", "--policy", "round_robin", "--json")
    found = {}
    for name, given in {
        "usual": (),
        "configured": setting,
        "both": (*setting, "--ttft-s", "1.5"),
    }.items():
        report = json.loads(replay(capsys, *arguments, *given)[1])
        cost, turns = report["policies"]
        assert cost["options"]["ttft_s"] == report["ttft_s"]
        assert turns["options"] == {}
        found[name] = report["ttft_s"], turns["summary"]["num_good"]
    assert found == {"usual": (2.0, 40), "configured": (0.001, 0), "both": (1.5, 40)}


def test_costs_are_those_that_a_gateway_has_learned(capsys, tmp_path):
    def worker(prefill, step):
        def line(fixed, each, num_seen):
            return {"fixed_s": fixed, "each_s": each, "num_seen": num_seen, "error": 0.1}

        return {"worker": "w", "given": {"prefill": line(*prefill), "step": line(*step)}}

    shown = {
        "workers": [
            worker((0.01, 1e-4, 5), (0.02, 1e-3, 5)),
            worker((0.03, 3e-4, 5), (0.04, 3e-3, 5)),
            worker((9.0, 9.0, 0), (9.0, 9.0, 0)),
            {"worker": None, "given": None},
        ]
    }
    file = tmp_path / "workers.json"
    file.write_text(json.dumps(shown))
    _, out, _ = replay(capsys, *SMALL, "--costs", str(file), "--cost", "handoff_s=0.5", "--json")
    costs = json.loads(out)["costs"]
    assert costs["prefill_s"] == pytest.approx(0.02)
    assert costs["prefill_token_s"] == pytest.approx(2e-4)
    assert (costs["step_s"], costs["step_answer_s"]) == pytest.approx((0.03, 0.002))
    assert costs["handoff_s"] == 0.5
    assert (costs["prefill_context_s"], costs["load_s"]) == (0.0, SimulatedCosts().load_s)
    for at, bend in enumerate((1e-4, 2e-4)):
        given = shown["workers"][at]["given"]
        given["prefill"]["bend"] = bend
        given["load"] = {**given["step"], "fixed_s": 0.002, "each_s": 1e-5}
        num_blocks = 1000 * (at + 1)
        shown["workers"][at]["load"] = {"num_blocks": num_blocks, "block_size": 16}
    file.write_text(json.dumps(shown))
    _, out, _ = replay(capsys, *SMALL, "--costs", str(file), "--json")
    costs = json.loads(out)["costs"]
    assert costs["prefill_context_s"] == pytest.approx((1e-4 * 1e-4 + 3e-4 * 2e-4) / 2)
    assert (costs["load_s"], costs["load_token_s"]) == pytest.approx((0.002, 1e-5))
    assert costs["kv_tokens"] == 24_000
    file = tmp_path / "costs.toml"
    file.write_text("step_s = 0.5\n")
    _, out, _ = replay(capsys, *SMALL, "--costs", str(file), "--json")
    assert json.loads(out)["costs"]["step_s"] == 0.5


def test_costs_are_those_of_the_file_that_a_gateway_begins_with(capsys, tmp_path):
    kept = KeptCosts(
        KeptPromptLine(0.01, 2e-4, 1e-4),
        KeptLine(0.02, 1e-3),
        handoff={"same_zone": KeptLine(0.5, 1e-5), "same_rack": KeptLine(0.004, 1e-6)},
    )
    file = tmp_path / "costs.json"
    save_result(file, KeptFile({"demo": kept}))  # as `baton route costs` does
    code, out, _ = replay(capsys, *SMALL, "--costs", str(file), "--json")
    assert code == 0
    costs = json.loads(out)["costs"]
    assert (costs["prefill_s"], costs["prefill_token_s"]) == (0.01, 2e-4)
    assert costs["prefill_context_s"] == pytest.approx(2e-8)
    assert (costs["step_s"], costs["step_answer_s"]) == (0.02, 1e-3)
    assert (costs["handoff_s"], costs["handoff_token_s"]) == (0.004, 1e-6)
    assert costs["load_s"] == SimulatedCosts().load_s
    for models, reason in (
        ({"a": kept, "b": kept}, "costs of one model, not a, b"),
        ({"a": KeptCosts(step=kept.step)}, "prefill or steps are not learned yet"),
    ):
        save_result(file, KeptFile(models))
        code, _, err = replay(capsys, *SMALL, "--costs", str(file))
        assert code == 2
        assert reason in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["no-such-file"], "cannot read the trace no-such-file"),
        (["--policy", "turns"], "turns"),
        (["--roles", "2x2"], "such as 2p2d"),
        (["--roles", "2p2d", "--workers", "5"], "are not --workers 5"),
        (["--roles", "2p0d"], "no worker could answer"),
        (["--workers", "0"], "--workers: 0"),
        (["--rate", "1", "--concurrency", "1"], "give one"),
        (["--rate", "0"], "--rate: a number above 0"),
        (["--pause", "nan"], "--pause: a number of seconds"),
        (["--pause", "inf"], "--pause: a number of seconds"),
        (["--prefixes", "3"], "--workload multi-turn has no use for --prefixes"),
        (["--workload", "shared-prefix", "--turns", "3"], "has no use for --turns"),
        (["--speed", "2"], "--speed: only for a trace"),
        (["--divide-lengths", "2", "--max-broken", "2%"], "--divide-lengths, --max-broken: only"),
        (["no-such-file", "--turns", "3"], "--turns: only without a trace"),
        (["no-such-file", "--speed", "nan"], "--speed: above 0"),
        (["--ttft-s", "nan"], "--ttft-s: a number above 0"),
        (["--cost", "step"], "NAME=NUMBER"),
        (["--cost", "step=1"], "there are prefill_s"),
        (["--cost", "step_s=-1"], "step_s"),
        (["--cost", "kv_tokens=8"], "kv_tokens is less than block_size"),
        (["--costs", "no-such-file"], "No such file"),
        (["--set", "router.options.cost.ttft_s=-1"], "router.options.cost"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_an_error_that_names_it(capsys, arguments, reason):
    code, _, err = replay(capsys, *arguments)
    assert code == 2
    assert reason in err


def test_a_request_that_no_worker_could_hold_is_named(capsys):
    code, _, err = replay(capsys, *SMALL, "--cost", "kv_tokens=256")
    assert code == 1
    assert "does not fit in a simulated worker, which holds 256" in err


def test_broken_lines_are_an_error_that_names_them(capsys, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(mooncake((0, 1100, [1, 2, 3])) + "{broken\n" + '{"timestamp": 1}\n')
    code, _, err = replay(capsys, str(file))
    assert code == 2
    assert "2 of 3 lines are broken" in err
    assert "line 2" in err
    code, out, _ = replay(capsys, str(file), "--max-broken", "70%", "--policy", "cost")
    assert code == 0
    assert "warning: 2 broken lines left out" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "or --request-id"),
        (["body.json", "--request-id", "a"], "or --request-id"),
        (["no-such-file"], "cannot read the request no-such-file"),
        (["--request-id", "a", "--itl-ms", "50"], "targets go with a request's body"),
        (["--request-id", "a", "--gateway", "here"], "--gateway 'here' is not a gateway's URL"),
    ],
)
def test_explain_needs_one_request_and_a_gateway(capsys, arguments, reason):
    assert run(["route", "explain", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_explain_without_a_gateway(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key\n")  # as a file has it
    body = tmp_path / "body.json"
    body.write_text("{}")
    assert run(["route", "explain", str(body), "--gateway", "http://127.0.0.1:1"]) == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:1/debug/route" in err
    assert "refused" in err


def explained(*candidates, **changes):
    fields = {
        "model": "demo",
        "policy": "cost",
        "num_prompt_tokens": 100,
        "is_tokenized": True,
        "cached_tokens": {},
        "num_answers": 1,
        "mode": "colocated",
        "prefill": None,
        "decode": "w0",
        "why": ("chosen: w0",),
        "candidates": candidates,
    }
    return msgspec.convert({**fields, **changes}, RouteExplanation, from_attributes=True)


def printed(capsys, found):
    print_explanation(found, sys.stdout)
    return capsys.readouterr().out.splitlines()


def test_the_table_is_in_order_and_marks_who_is_chosen(capsys):
    figures = {"cost": 0.25, "queue_s": 0.0, "tpot_s": 0.01234, "cached_tokens": 64.0}
    lines = printed(
        capsys,
        explained(
            RouteCandidate("request", None, "w0", figures, is_chosen=True),
            RouteCandidate("request", "w1", "w0", {**figures, "cost": 1.5}, is_chosen=False),
            RouteCandidate("request", None, "w2", {}, is_chosen=False, why_not="is not available"),
        ),
    )
    assert lines[0] == "demo, policy cost: a prompt of 100 tokens"
    assert lines[1].split() == ["workers", "cost", "queue,", "s", "tpot,", "s", "cached", "tokens"]
    assert lines[2].split() == ["*", "w0", "0.250", "0.000", "0.0123", "64"]
    assert lines[3].split() == ["w1", "→", "w0", "1.500", "0.000", "0.0123", "64"]
    assert lines[4:] == ["not w2: is not available", "chosen: w0"]


def test_what_is_estimated_and_what_cannot_be_served_is_printed_so(capsys):
    lines = printed(
        capsys,
        explained(
            RouteCandidate("decode", None, "w0", {}, is_chosen=False, why_not="is not available"),
            is_tokenized=False,
            num_answers=3,
            decode=None,
            mode=None,
            why=("no decode worker is available",),
        ),
    )
    assert "estimated" in lines[0]
    assert lines[1].startswith("3 answers are asked for")
    assert lines[2:] == [
        "not w0 answers: is not available",
        "no worker can serve it now:",
        "no decode worker is available",
    ]


def way(prefill, decode, cost, *, is_chosen=False, **figures):
    figures = {"cost": cost, "queue_s": 0.1, "prefill_s": 0.2, "tpot_s": 0.005} | figures
    return RouteCandidate("request", prefill, decode, figures, is_chosen)


def test_a_plot_names_every_candidate(tmp_path):
    loading = way("a", "b", 0.09, is_chosen=True, handoff_s=0.02, loaded_tokens=1328)
    out = RouteCandidate("request", None, "down", {}, False, "not available")
    file = tmp_path / "route.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_route(explained(loading, way(None, "c", 0.3), out), file)
    text = file.read_text()
    assert "(1328 tokens loaded)" in text
    assert "✓ a → b" in text
    assert ">c<" in text
    assert "down" not in text


def test_of_other_policies_a_plot_shows_what_they_compare(tmp_path):
    file = tmp_path / "route.svg"
    compared = RouteCandidate("request", None, "a", {"tokens_to_compute": 70.0}, True)
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_route(explained(compared), file)
    assert "tokens to compute" in file.read_text()
    with pytest.raises(ConfigError, match="no figures"):
        plot_route(explained(), file)
    with pytest.raises(ConfigError, match="cannot write"):
        plot_route(explained(compared), tmp_path / "route.nothing")


@pytest.mark.parametrize("name", ["a.png", "a.SVG", "a.pdf", "a"])
def test_a_plot_can_be_written_as_what_its_suffix_says(tmp_path, name):
    check_plot(tmp_path / name)


def test_another_suffix_of_a_plot_is_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.html: give one of the suffixes .*\.png.*\.svg"):
        check_plot(tmp_path / "a.html")


def test_a_past_request_has_no_plot(capsys):
    assert run(["route", "explain", "--request-id", "r", "--plot", "r.svg"]) == 2
    assert "--plot shows the candidates" in capsys.readouterr().err


def test_text_of_workers_cannot_steer_the_terminal(capsys):
    hostile = "\x1b[2J\x07"
    refused = RouteCandidate("decode", None, hostile, {}, is_chosen=False, why_not=hostile)
    chosen = RouteCandidate("request", hostile, hostile, {hostile: 0.5}, is_chosen=True)
    lines = printed(capsys, explained(chosen, refused, model=hostile, why=(hostile,)))
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
