"""How an adaptive configuration compares with the best of the others, as a table.

    python benchmarks/adaptive_share.py FOLDER [FOLDER ...]

Each folder is a result of `baton bench architectures` with `adaptive-throughput` or
`adaptive-goodput` among its configurations. Of each load the median of the repetitions: output
tokens/s, or good requests/s and worker; in parentheses what the others reach.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ADAPTIVE = "adaptive"


def read_figures(folder: Path) -> tuple[str, dict[str, dict[str, float]]]:
    """A title, and of each load the median of each configuration."""
    result = json.loads((folder / "results.json").read_text())
    by_goodput = any(arm["name"] == "adaptive-goodput" for arm in result["arms"])
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in result["cells"]:
        figures = cell["figures"]
        value = figures["output_tokens_per_s"]
        if by_goodput:
            value = figures["goodput"]["requests_per_s"] / result["num_workers"]
        found[cell["level"]][cell["arm"]].append(value)
    unit = "good requests/s and worker" if by_goodput else "output tokens/s"
    title = f"{result['engine']}, {result['workload_words']}: {unit}"
    return title, {
        level: {name: statistics.median(values) for name, values in each.items()}
        for level, each in found.items()
    }


def print_table(folder: Path) -> None:
    """One row for each load."""
    title, figures = read_figures(folder)
    print(f"\n{title}\n\n| load | adaptive | share of the best other | others |\n|---|---|---|---|")
    for level in sorted(figures, key=lambda level: float(level[1:])):
        others = {name: v for name, v in figures[level].items() if not name.startswith(ADAPTIVE)}
        (adaptive,) = (v for name, v in figures[level].items() if name.startswith(ADAPTIVE))
        best = max(others.values())
        share = f"{adaptive / best:.2f}" if best else "-"
        rest = ", ".join(f"{name} {value:.4g}" for name, value in others.items())
        print(f"| {level} | {adaptive:.4g} | {share} | {rest} |")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        print_table(Path(name))
