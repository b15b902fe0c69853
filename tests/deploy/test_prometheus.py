"""Scraping and alerts: they ask for series that a run writes; promtool says when they fire."""

import re
from pathlib import Path

import yaml

from jobs.metrics import COMMAND, MAP, PREFIX, STAGE_SECONDS, Figures, write_figures
from tests.deploy.tools import DEPLOY, check, find_tool

FOLDER = DEPLOY / "prometheus"
SERIES = {PREFIX + name for name in (*COMMAND, *MAP, STAGE_SECONDS)}


def read_rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((FOLDER / "lakemap.rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_ask_for_series_that_are_written() -> None:
    rules = read_rules()
    used = {name for rule in rules for name in re.findall(r"lakemap_\w+", rule["expr"])}
    assert used <= SERIES
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in rules)


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((FOLDER / "lakemap.rules.test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    silent = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fires == silent == {rule["alert"] for rule in read_rules()}


def test_the_page_tells_of_every_series() -> None:
    page = (FOLDER / "README.md").read_text()
    named = set(re.findall(r"`(?:lakemap)?_(\w+)[`{]", page))
    assert named == {*COMMAND, *MAP, STAGE_SECONDS}


def test_promtool_accepts_config_and_rules() -> None:
    promtool = find_tool("promtool")
    check(promtool, "check", "config", "prometheus.yml", cwd=FOLDER)
    check(promtool, "check", "rules", "lakemap.rules.yml", cwd=FOLDER)
    check(promtool, "test", "rules", "lakemap.rules.test.yml", cwd=FOLDER)


def test_promtool_accepts_the_text_file(tmp_path: Path) -> None:
    promtool = find_tool("promtool")
    figures = Figures(dict.fromkeys((*COMMAND, *MAP), 0.5), {"train": 7, "embed": 8})
    write_figures(tmp_path / "all.prom", "products", figures)
    assert check("sh", "-c", f"{promtool} check metrics < {tmp_path / 'all.prom'}") == ""
