"""docs/reliability-failures.md and docs/security.md name tests that exist."""

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


SECURITY = (ROOT / "docs" / "security.md").read_text("utf-8")
ATTACK_ROWS = [
    line
    for line in SECURITY.partition("## Attack, defence, test")[2].partition("\n## ")[0].splitlines()
    if re.match(r"\| *\d* *\|", line)
]


@pytest.mark.parametrize("row", ATTACK_ROWS, ids=lambda row: row.split("|")[2].strip()[:40])
def test_every_attack_has_a_test(row):
    paths = re.findall(r"`(tests/[\w/]+\.py)`", row)
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path
    attacks = (ROOT / "tests/abuse/attacks.py").read_text("utf-8")
    for names in re.findall(r"`tests/abuse/test_attacks\.py` \(([^)]*)\)", row):
        for name in re.findall(r"`(\w+)`", names):
            assert f"async def {name}(" in attacks, name


def test_every_finding_of_the_review_has_a_row():
    numbered = {int(number) for row in ATTACK_ROWS if (number := row.split("|")[1].strip())}
    assert numbered == set(range(1, 24))
