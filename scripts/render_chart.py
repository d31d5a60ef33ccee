"""Render the Helm chart into plain manifests in deploy/kubernetes, one file for each values file.

`python scripts/render_chart.py` writes them; `--print VALUES.yaml` prints those of other values.
Helm itself renders, as a library: `pip install --no-deps helm-python-sdk==0.2.2` (75 MB, no program
`helm` is needed). Each file names the digest of the chart that it is from, which tests compare.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "deploy" / "helm" / "baton"
RENDERED: Final = ROOT / "deploy" / "kubernetes"
RELEASE: Final = "baton"
"""Of what is kept: the release's name, and its namespace."""
HEADER: Final = """\
# Rendered from deploy/helm/baton with values/{name}.yaml by scripts/render_chart.py, for the
# namespace baton; change these, not this file. `kubectl -n baton apply -f` takes it.
# Chart and values: sha256 {digest}
"""


class ChartError(Exception):
    """Helm refuses the chart or its values; the message is Helm's."""


def render(values: Path) -> str:
    """The manifests, as YAML documents.

    Raises:
        ChartError: the values cannot be, or the chart has an error.
    """
    import helm_python  # noqa: PLC0415 - who only compares digests needs no Helm

    given = yaml.safe_load(values.read_text(encoding="utf-8"))
    try:
        with helm_python.Chart.load(str(CHART)) as chart:
            chart.validate_schema(given)
            rendered = chart.render(given, name=RELEASE, namespace=RELEASE)
    except helm_python.HelmError as exc:
        raise ChartError(str(exc)) from exc
    texts = (text for name, text in sorted(rendered.items()) if name.endswith(".yaml"))
    return "".join(f"---\n{document}\n" for text in texts for document in _split(text))


def compute_digest(name: str) -> str:
    """Of all files that the manifests of one values file are made of, in hexadecimal.

    Not of `files/`: a test compares the rules and the board in the manifests with their sources.
    """
    files = [path for path in CHART.rglob("*") if path.is_file() and path.parent.name != "files"]
    used = [path for path in files if path.parent.name != "values" or path.stem == name]
    digest = hashlib.sha256()
    for path in sorted(used):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(CHART)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def list_values() -> list[Path]:
    """The values files whose manifests are kept."""
    return sorted((CHART / "values").glob("*.yaml"))


def render_kept(values: Path) -> str:
    """What deploy/kubernetes has of a values file.

    Raises:
        ChartError: as of `render`.
    """
    name = values.stem
    return HEADER.format(name=name, digest=compute_digest(name)) + render(values)


def _split(text: str) -> Iterator[str]:
    """The documents of a template, without the blank lines that its directives leave."""
    for document in re.split(r"^---\s*$", text, flags=re.MULTILINE):
        lines = [line.rstrip() for line in document.strip().splitlines()]
        if "kind: ConfigMap" not in lines:  # whose text has blank lines of its own
            lines = [line for line in lines if line]
        if any(not line.startswith("#") for line in lines):
            yield "\n".join(lines)


def main() -> int:
    """Write all files, and remove those that no values file has; or print one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--print", type=Path, metavar="VALUES.yaml")
    values: Path | None = parser.parse_args().print
    try:
        if values is not None:
            print(render(values), end="")
            return 0
        kept = {path.stem: render_kept(path) for path in list_values()}
    except ChartError as exc:
        print(f"render_chart: {exc}", file=sys.stderr)
        return 1
    for name, text in kept.items():
        (RENDERED / f"{name}.yaml").write_text(text, encoding="utf-8")
    for path in RENDERED.glob("*.yaml"):
        if path.stem not in kept:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
