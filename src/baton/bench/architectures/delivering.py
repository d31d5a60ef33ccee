"""Findings → the terminal, and files: results.json, report.html, charts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from baton.bench.architectures.drawing import draw_all, load_rasteriser, to_png
from baton.bench.architectures.keeping import PAGE
from baton.bench.architectures.page import write_page
from baton.bench.architectures.printing import print_findings
from baton.bench.saving import NotSavedError

if TYPE_CHECKING:
    from baton.bench.architectures.keeping import Keep
    from baton.bench.architectures.results import Findings


def deliver(findings: Findings, keep: Keep, *, is_json: bool) -> str | None:
    """Print, then write all files. What went wrong with them, in words; None: nothing."""
    if is_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(findings)).decode() + "\n")
    else:
        print_findings(findings, sys.stdout)
    try:
        keep.save_findings(findings)
        write_report(findings, keep)
    except NotSavedError as exc:
        return str(exc)
    except OSError as exc:
        return f"could not write the report to {keep.folder}: {exc.strerror}"
    sys.stderr.write(f"baton: the report is {keep.folder / PAGE}\n")
    if load_rasteriser() is None:
        sys.stderr.write("baton: charts are SVG alone; for PNG too: pip install resvg-py\n")
    return None


def write_report(findings: Findings, keep: Keep) -> None:
    """The page, and every chart as a file of its own.

    Raises:
        OSError: one of them could not be written.
    """
    charts, rasteriser = draw_all(findings), load_rasteriser()
    page = keep.folder / PAGE
    page.write_text(write_page(findings, charts), encoding="utf-8")
    for name, svg in charts.items():
        path = keep.folder / "charts" / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        if rasteriser is not None:
            path.with_suffix(".png").write_bytes(to_png(rasteriser, svg))
