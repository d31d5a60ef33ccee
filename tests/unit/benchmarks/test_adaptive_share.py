"""Which cells of a result become shares."""

import json

from benchmarks.adaptive_share import print_tables


def cell(arm, rate, level="c4", ended_early=None, num_complete=9):
    goodput = {"requests_per_s": rate}
    figures = {"output_tokens_per_s": rate, "goodput": goodput, "num_complete": num_complete}
    return {"arm": arm, "level": level, "ended_early": ended_early, "figures": figures}


def tables_of(tmp_path, capsys, *cells):
    arms = {"single": (1, 0, 0), "1P1D": (0, 1, 1)}
    result = {
        "engine": "vllm", "workload_words": "512 in", "num_workers": 2, "cells": cells,
        "levels": [{"key": "c4"}, {"key": "recorded"}],
        "arms": [
            dict(zip(("name", "num_both", "num_prefill", "num_decode"), (name, *nums), strict=True))
            for name, nums in {**arms, "adaptive-throughput": (2, 0, 0),
                               "adaptive-goodput": (2, 0, 0)}.items()
        ],
    }  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(result))
    print_tables(tmp_path)
    return capsys.readouterr().out


def test_cells_that_are_left_out_of_means_are_left_out_here(tmp_path, capsys):
    shown = tables_of(
        tmp_path,
        capsys,
        cell("adaptive-throughput", 90.0),
        cell("1P1D", 100.0),
        cell("1P1D", 10.0, ended_early="a server died"),
        cell("1P1D", 0.0, num_complete=0),
    )
    assert "| c4 | 90 | 0.90 | 1P1D 100 |" in shown


def test_a_trace_at_its_own_times_is_a_load_too(tmp_path, capsys):
    cells = (cell(arm, 5.0, "recorded") for arm in ("adaptive-throughput", "1P1D"))
    assert "| recorded | 5 | 1.00 |" in tables_of(tmp_path, capsys, *cells)


def test_good_requests_are_divided_by_the_workers_that_the_configuration_uses(tmp_path, capsys):
    shown = tables_of(tmp_path, capsys, cell("adaptive-goodput", 4.0), cell("single", 3.0))
    assert "| c4 | 2 | 0.67 | single 3 |" in shown
