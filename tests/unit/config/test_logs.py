"""Logging is set up in one place."""

import json
import logging
import sys

import pytest

from baton.config.logs import configure_logging
from baton.config.sections import LogSection


@pytest.fixture(autouse=True)
def root_logger_restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_text_lines_have_level_and_logger(capsys):
    configure_logging(LogSection())
    logging.getLogger("baton.test").info("hello %d", 1)
    logging.getLogger("baton.test").debug("not shown")
    line = capsys.readouterr().err
    assert line.endswith("INFO    baton.test: hello 1\n")


def test_json_lines_carry_the_traceback(capsys):
    configure_logging(LogSection(format="json", level="debug"))
    try:
        sys.exit(3)
    except SystemExit:
        logging.getLogger("baton.test").exception("went\nwrong")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"], line["message"]) == (
        "error",
        "baton.test",
        "went\nwrong",
    )
    assert "SystemExit: 3" in line["error"]
    assert line["ts"].endswith("+00:00")
