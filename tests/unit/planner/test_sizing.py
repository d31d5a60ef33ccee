"""Sizes → times, on nominal and measured links."""

import io

import msgspec
import pytest

from baton.errors import ConfigError
from baton.kv.sizing.sizes import Terms
from baton.planner.links import read_links
from baton.planner.printing import print_sizes, write_bytes, write_seconds
from baton.planner.sizing import find_model, make_report, shipped_names


def row(name, shape, num_bytes, rate, p50_us, kind="transport"):
    return {
        "kind": kind, "name": name, "direction": "push",
        "workload": {"name": "w", "shape": shape, "num_bytes": num_bytes},
        "figures": {"gb_per_s": {"median": rate}, "p50_us": p50_us},
    }  # fmt: skip


@pytest.fixture
def link_file(tmp_path):
    path = tmp_path / "link.json"
    rows = [
        row("memcpy", "scattered", 1 << 28, 20.0, 1.0, kind="limit"),
        row("shared", "message", 1 << 15, 3.0, 50.0),
        row("shared", "message", 1 << 20, 9.0, 120.0),
        row("shared", "scattered", 1 << 28, 10.0, 3e4),
    ]
    path.write_bytes(msgspec.json.encode({"schema": "baton-bench-link/1", "rows": rows}))
    return path


def test_a_measured_link_has_the_scattered_rate_and_the_smallest_messages_latency(link_file):
    (link,) = read_links(link_file)
    assert link.gb_per_s == 10.0
    assert link.latency_s == pytest.approx(50e-6 - (1 << 15) / 1e10)


def test_times_are_of_what_one_worker_sends(link_file):
    report = make_report("llama-3.1-8b", Terms(2048, num_shards=2), read_links(link_file))
    by_name = {move.link: move for move in report.moves}
    assert by_name["100 Gbit/s Ethernet or RoCE"].seconds == pytest.approx(128 * 2**20 / 12.5e9)
    assert by_name["shared, push"].is_measured
    assert by_name["shared, push"].seconds == pytest.approx(128 * 2**20 / 1e10, rel=0.01)
    assert [each.seconds for each in report.moves] == sorted(
        (each.seconds for each in report.moves), reverse=True
    )
    shown = io.StringIO()
    print_sizes(report, shown)
    assert "128 KiB (131,072 B)" in shown.getvalue()
    assert all(len(line) <= 100 for line in shown.getvalue().splitlines())


def test_a_request_beyond_the_context_is_noted():
    assert any("131,072" in note for note in make_report("llama-3.1-8b", Terms(10**6)).notes)


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_model_can_be_printed(name):
    shown = io.StringIO()
    print_sizes(make_report(name, Terms(4096, num_shards=2)), shown)
    assert "one token" in shown.getvalue()


def test_models_by_file_folder_and_name(tmp_path):
    config = find_model("llama-3.1-8b")[1]
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    assert find_model(str(tmp_path))[0] == find_model(str(tmp_path / "config.json"))[0]
    with pytest.raises(ConfigError, match="mixtral"):
        find_model("llama-4")
    (tmp_path / "sub").mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        find_model(str(tmp_path / "sub"))


@pytest.mark.parametrize(
    "text",
    ["{", '{"schema":"x","rows":[]}', '{"schema":"baton-bench-link/1","rows":[]}', "[1]"],
)
def test_what_is_no_link(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_links(path)
    with pytest.raises(ConfigError):
        read_links(tmp_path / "nothing")


def test_units():
    assert write_bytes(100) == "100 B"
    assert write_bytes(131072) == "128 KiB (131,072 B)"
    assert write_bytes(1 << 60) == "1,024 PiB (1,152,921,504,606,846,976 B)"
    assert [write_seconds(each) for each in (2.0, 0.0215, 3e-5)] == ["2.00 s", "21.50 ms", "30 us"]
