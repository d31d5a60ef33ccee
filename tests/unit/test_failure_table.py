"""docs/reliability-failures.md names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reliability-failures.md"
NAMED = sorted(
    set(re.findall(r"`((?:tests|src/baton/testing)/[\w/]+\.py)::(\w+)", TABLE.read_text("utf-8")))
)


@pytest.mark.parametrize(("path", "name"), NAMED, ids="::".join)
def test_named_tests_exist(path, name):
    source = (ROOT / path).read_text("utf-8")
    assert re.search(rf"^\s*(async )?(def|class) {name}\b", source, re.MULTILINE) or re.search(
        rf"^{name} = ", source, re.MULTILINE
    )


def test_every_reported_failure_has_a_row():
    rows = re.findall(r"^\| \*\*B2\.(\d+)\*\*", TABLE.read_text("utf-8"), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 17))
    assert len(NAMED) > 60
