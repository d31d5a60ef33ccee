"""The folder of results: a file for each run, servers' logs, and at the end JSON, page, figures."""

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
    """In it: `results.json`, `report.html`, `charts/`, `runs/ARM/LOAD/rep-N.json`, `logs/`.

    The runs of one arm and load are a folder that `baton bench compare` takes.
    """

    folder: Path

    def log(self, trial: Trial) -> Path:
        """Where the servers of a turn say what they say."""
        return self.folder / "logs" / f"rep-{trial.repetition}-{trial.configuration.folder}.log"

    def save_run(self, trial: Trial, level: Level, report: Report) -> str:
        """Keep one run; its name, relative to the folder.

        Raises:
            NotSavedError: it could not be written; the message says where it is.
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
        """Keep all that is known so far.

        Raises:
            NotSavedError: it could not be written; the message says where it is.
        """
        save_result(self.folder / RESULTS, findings)


def create_result_folder(folder: Path, trials: tuple[Trial, ...]) -> ResultFolder:
    """Make the folders, before an hour of measuring rather than after it.

    Raises:
        ConfigError: it holds something already, cannot be written, or there is hardly any space.
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
    """Print, then write all files. What went wrong with them, in words; None: nothing."""
    if is_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(findings)).decode() + "\n")
    else:
        print_findings(findings, sys.stdout)
    try:
        results.save_findings(findings)
        write_report(findings, results)
    except NotSavedError as exc:
        return str(exc)
    except OSError as exc:
        return f"could not write the report to {results.folder}: {exc.strerror}"
    sys.stderr.write(f"baton: the report is {results.folder / PAGE}\n")
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
