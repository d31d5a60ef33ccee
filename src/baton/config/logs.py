"""The one place that sets logging up: text or JSON lines on standard error."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, assert_never

import msgspec

if TYPE_CHECKING:
    from baton.config.sections import LogSection

QUIETED = ("asyncio", "filelock", "huggingface_hub", "transformers", "uvicorn")
"""Libraries whose information is noise here; their warnings are kept."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts`, `level`, `logger`, `message`, and `error` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(section: LogSection) -> None:
    """Replace the root logger's handlers. Call once, before anything logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(section))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(section.level.upper())
    # Its own too: vLLM's libraries change the root's while they load.
    logging.getLogger("baton").setLevel(section.level.upper())
    for name in QUIETED:
        logging.getLogger(name).setLevel(logging.WARNING)


def _formatter(section: LogSection) -> logging.Formatter:
    match section.format:
        case "json":
            return JsonFormatter()
        case "text":
            return logging.Formatter(
                "%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S"
            )
        case _:
            assert_never(section.format)
