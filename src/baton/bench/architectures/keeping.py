"""The folder of results: a file for each run, servers' logs, and at the end JSON, page, figures."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.bench.saving import save_result
from baton.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from baton.bench.architectures.plan import Level, Turn
    from baton.bench.architectures.results import Findings
    from baton.bench.load.report import Report

LEAST_FREE_BYTES: Final = 64 * 1024 * 1024
RESULTS: Final = "results.json"
PAGE: Final = "report.html"


@dataclass(frozen=True, slots=True)
class Keep:
    """In it: `results.json`, `report.html`, `charts/`, `runs/ARM/LOAD/rep-N.json`, `logs/`.

    The runs of one arm and load are a folder that `baton bench compare` takes.
    """

    folder: Path

    def log(self, turn: Turn) -> Path:
        """Where the servers of a turn say what they say."""
        return self.folder / "logs" / f"rep-{turn.repetition}-{turn.arm.folder}.log"

    def save_run(self, turn: Turn, level: Level, report: Report) -> str:
        """Keep one run; its name, relative to the folder.

        Raises:
            NotSavedError: it could not be written; the message says where it is.
        """
        path = self.folder / "runs" / turn.arm.folder / level.key / f"rep-{turn.repetition}.json"
        save_result(path, report)
        return str(path.relative_to(self.folder))

    def save_findings(self, findings: Findings) -> None:
        """Keep all that is known so far.

        Raises:
            NotSavedError: it could not be written; the message says where it is.
        """
        save_result(self.folder / RESULTS, findings)


def open_keep(folder: Path, turns: tuple[Turn, ...]) -> Keep:
    """Make the folders, before an hour of measuring rather than after it.

    Raises:
        ConfigError: it holds something already, cannot be written, or there is hardly any space.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--output {folder}: is there already; name a new or empty folder")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "charts").mkdir(exist_ok=True)
        for turn in turns:
            for level in turn.levels:
                (folder / "runs" / turn.arm.folder / level.key).mkdir(parents=True, exist_ok=True)
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
    return Keep(folder)
