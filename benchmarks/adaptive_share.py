"""How an adaptive configuration compares with the best of the others, as a table.

    python benchmarks/adaptive_share.py FOLDER [FOLDER ...]

Each folder is a result of `baton bench architectures` with `adaptive-throughput`,
`adaptive-goodput` or both among its configurations. Of each load the median of the repetitions:
output tokens/s, or good requests/s and worker; in parentheses what the others reach.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

UNITS = {
    "adaptive-throughput": "output tokens/s",
    "adaptive-goodput": "good requests/s and worker",
}


def print_tables(folder: Path) -> None:
    """One table for each adaptive configuration, one row for each load."""
    result = json.loads((folder / "results.json").read_text())
    num_workers = {
        arm["name"]: arm["num_both"] + arm["num_prefill"] + arm["num_decode"]
        for arm in result["arms"]
    }
    # As in the report: what ended early, or has no answer, is left out.
    cells = [
        cell
        for cell in result["cells"]
        if cell["ended_early"] is None and cell["figures"]["num_complete"]
    ]
    for adaptive, unit in UNITS.items():
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for cell in cells:
            name, figures = cell["arm"], cell["figures"]
            if adaptive == "adaptive-throughput":
                value = figures["output_tokens_per_s"]
            elif figures["goodput"] is not None:
                value = figures["goodput"]["requests_per_s"] / num_workers[name]
            else:
                continue
            if name == adaptive or name not in UNITS:
                found[cell["level"]][name].append(value)
        loads = {
            level["key"]: {name: statistics.median(values) for name, values in each.items()}
            for level in result["levels"]
            if adaptive in (each := found[level["key"]])
        }
        if loads:
            print(f"\n{result['engine']}, {result['workload_words']}: {unit}\n")
            print_rows(loads, adaptive)


def print_rows(loads: dict[str, dict[str, float]], adaptive: str) -> None:
    """Each load's median of every configuration."""
    print(f"| load | {adaptive} | share of the best other | others |\n|---|---|---|---|")
    for level, values in loads.items():
        others = {name: value for name, value in values.items() if name != adaptive}
        best = max(others.values(), default=0.0)
        share = f"{values[adaptive] / best:.2f}" if best else "-"
        rest = ", ".join(f"{name} {value:.4g}" for name, value in others.items())
        print(f"| {level} | {values[adaptive]:.4g} | {share} | {rest} |")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for argument in sys.argv[1:]:
        print_tables(Path(argument))
