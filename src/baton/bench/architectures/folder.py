"""The folder of results: a file for each run, servers' logs, then JSON, page and figures."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from baton.bench.architectures.page import write_page
from baton.bench.charts import draw_findings
from baton.bench.files import NotSavedError, save_result
from baton.bench.printing import print_findings
from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from baton.bench.architectures.plan import Level, Trial
    from baton.bench.architectures.results import Findings
    from baton.bench.load.job import Report

LEAST_FREE_BYTES: Final = 64 * 1024 * 1024
RESULTS: Final = "results.json"
PAGE: Final = "report.html"


@dataclass(frozen=True, slots=True)
class ResultFolder:
    """`results.json`, `report.html`, `charts/`, `runs/ARM/LOAD/rep-N.json`, `logs/`.

    The runs of one configuration and load are a folder for `baton bench compare`.
    """

    folder: Path

    def log(self, trial: Trial) -> Path:
        """The servers' log of a trial."""
        return self.folder / "logs" / f"rep-{trial.repetition}-{trial.configuration.folder}.log"

    def save_run(self, trial: Trial, level: Level, report: Report) -> str:
        """Save one run; its path relative to the folder.

        Raises:
            NotSavedError: it could not be written; the message names a temporary file.
        """
        path = (
            self.folder
            / "runs"
            / trial.configuration.folder
            / level.key
            / f"rep-{trial.repetition}.json"
        )
        save_result(path, report)
        return str(path.relative_to(self.folder))

    def save_findings(self, findings: Findings) -> None:
        """Save all results so far.

        Raises:
            NotSavedError: it could not be written; the message names a temporary file.
        """
        save_result(self.folder / RESULTS, findings)


def create_result_folder(folder: Path, trials: tuple[Trial, ...]) -> ResultFolder:
    """Create the folders before an hour of measuring rather than after it.

    Raises:
        ConfigError: the folder is not empty, cannot be written, or has too little space.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--output {folder}: is there already; name a new or empty folder")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "charts").mkdir(exist_ok=True)
        for trial in trials:
            for level in trial.levels:
                (folder / "runs" / trial.configuration.folder / level.key).mkdir(
                    parents=True, exist_ok=True
                )
    except OSError as exc:
        raise ConfigError(f"--output {folder}: cannot write there: {exc.strerror}") from exc
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--output {folder}: cannot write there: permission denied")
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise ConfigError(
            f"--output {folder}: only {free / 1e6:.0f} MB are free there, and raw samples need "
            f"some {LEAST_FREE_BYTES / 1e6:.0f} MB: free some space, or name another folder"
        )
    return ResultFolder(folder)


def deliver(findings: Findings, results: ResultFolder, *, is_json: bool) -> str | None:
    """Write all files, then print; the error of writing them, if any.

    Files come first: a reader that leaves early (`| head`) ends the printing.
    """
    try:
        problem = _write_all(findings, results)
    finally:
        if is_json:
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(findings)).decode() + "\n")
        else:
            print_findings(findings, sys.stdout)
    if problem is None:
        sys.stderr.write(f"baton: the report is {results.folder / PAGE}\n")
    return problem


def _write_all(findings: Findings, results: ResultFolder) -> str | None:
    try:
        results.save_findings(findings)
        write_report(findings, results)
    except NotSavedError as exc:
        return str(exc)
    except OSError as exc:
        return f"could not write the report to {results.folder}: {exc.strerror}"
    return None


def write_report(findings: Findings, results: ResultFolder) -> None:
    """The page, and every chart as a file of its own.

    Raises:
        OSError: one of them could not be written.
    """
    charts = draw_findings(findings)
    page = results.folder / PAGE
    page.write_text(write_page(findings, charts), encoding="utf-8")
    for name, chart in charts.items():
        path = results.folder / "charts" / f"{name}.svg"
        path.write_text(chart.svg, encoding="utf-8")
        path.with_suffix(".png").write_bytes(chart.png)
