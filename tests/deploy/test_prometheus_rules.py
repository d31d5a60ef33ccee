"""Prometheus' rules: valid, tested by promtool, documented, and made of metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.protocol.alerts import AlertName
from scripts.render_runbook import PAGE, make_page

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules.yaml"
CASES = Path(__file__).parent / "prometheus/rules_test.yaml"
RUNBOOK = ROOT / "docs/observability/alerts.md"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool; apt-get install prometheus")
    done = subprocess.run(
        [found, *arguments], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules():
    promtool("check", "rules", str(RULES))


def test_each_rule_fires_on_what_it_is_for():
    promtool("test", "rules", str(CASES))
    tested = {
        case["alertname"]
        for group in yaml.safe_load(CASES.read_text())["tests"]
        for case in group["alert_rule_test"]
    }
    assert tested == {rule["alert"] for rule in ALERTS}


def test_the_rules_and_the_gateway_have_the_same_alerts_and_each_has_a_section():
    assert {rule["alert"] for rule in ALERTS} == {*AlertName}
    anchors = {line[3:].lower() for line in RUNBOOK.read_text().splitlines() if line[:3] == "## "}
    for rule in ALERTS:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / path, anchor) == (RUNBOOK, rule["alert"].lower())
        assert anchor in anchors


def test_the_dashboards_page_about_alerts_is_rendered_from_the_documentation():
    page = make_page()
    assert PAGE.read_text("utf-8") == page, "run python scripts/render_runbook.py"
    for name in AlertName:
        assert f'<section class="panel" id="{name.lower()}">' in page
    assert "](" not in page, "a link was not rendered"
    linked = set(re.findall(r'href="#([a-z]+)"', page))
    assert linked <= {name.lower() for name in AlertName}
