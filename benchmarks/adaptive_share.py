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
    for adaptive, unit in UNITS.items():
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for cell in result["cells"]:
            name, figures = cell["arm"], cell["figures"]
            if adaptive == "adaptive-throughput":
                value = figures["output_tokens_per_s"]
            elif figures["goodput"] is not None:
                value = figures["goodput"]["requests_per_s"] / result["num_workers"]
            else:
                continue
            if name == adaptive or name not in UNITS:
                found[cell["level"]][name].append(value)
        loads = {
            level: {name: statistics.median(values) for name, values in each.items()}
            for level, each in found.items()
            if adaptive in each
        }
        if loads:
            print(f"\n{result['engine']}, {result['workload_words']}: {unit}\n")
            print_rows(loads, adaptive)


def print_rows(loads: dict[str, dict[str, float]], adaptive: str) -> None:
    """Each load's median of every configuration."""
    print(f"| load | {adaptive} | share of the best other | others |\n|---|---|---|---|")
    for level in sorted(loads, key=lambda level: float(level[1:])):
        others = {name: value for name, value in loads[level].items() if name != adaptive}
        best = max(others.values())
        share = f"{loads[level][adaptive] / best:.2f}" if best else "-"
        rest = ", ".join(f"{name} {value:.4g}" for name, value in others.items())
        print(f"| {level} | {loads[level][adaptive]:.4g} | {share} | {rest} |")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for argument in sys.argv[1:]:
        print_tables(Path(argument))
