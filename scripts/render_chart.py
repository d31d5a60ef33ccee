"""Render the Helm chart into plain manifests, one file in deploy/kubernetes for each values file.

`python scripts/render_chart.py` writes them; tests/deploy compares them with the chart. Helm itself
renders, as a library (the package helm-python-sdk): no program `helm` is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "deploy" / "helm" / "baton"
RENDERED: Final = ROOT / "deploy" / "kubernetes"
RELEASE: Final = "baton"
NAMESPACE: Final = "baton"
HEADER: Final = """\
# Rendered from deploy/helm/baton with values/{name}.yaml by scripts/render_chart.py, for the
# namespace baton; change these, not this file. `kubectl -n baton apply -f` takes it.
"""


class ChartError(Exception):
    """Helm refuses the chart or its values; the message is Helm's."""


def render(values: Path) -> str:
    """The manifests, as YAML documents.

    Raises:
        ChartError: the values cannot be, or the chart has an error.
    """
    raise NotImplementedError


def render_all() -> dict[str, str]:
    """The manifests of each values file, by its name."""
    return {
        path.stem: HEADER.format(name=path.stem) + render(path)
        for path in sorted((CHART / "values").glob("*.yaml"))
    }


def main() -> int:
    """Write all files, and remove those that no values file has."""
    rendered = render_all()
    for name, text in rendered.items():
        (RENDERED / f"{name}.yaml").write_text(text, encoding="utf-8")
    for path in RENDERED.glob("*.yaml"):
        if path.stem not in rendered:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
