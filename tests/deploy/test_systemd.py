"""The units, as systemd itself reads them."""

import configparser
import shutil
from pathlib import Path

from pipeline.errors import ConfigError, GateError, InputError
from tests.deploy.tools import DEPLOY, check, find_tool

UNITS = DEPLOY / "systemd"


def read_unit(name: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return {section: dict(parser[section]) for section in parser.sections()}


def test_systemd_reads_them(tmp_path: Path) -> None:
    """With a program that is there in place of lakemap's, or nothing else would be looked at."""
    analyze, program = find_tool("systemd-analyze"), shutil.which("true")
    for name in ("lakemap@.service", "lakemap@.timer"):
        text = (UNITS / name).read_text().replace("/opt/lakemap/bin/lakemap", str(program))
        (tmp_path / name.replace("@", "@products")).write_text(text)
    said = check(analyze, "verify", "--man=no", *sorted(tmp_path.iterdir()))
    assert said == ""


def test_the_timer_has_a_next_time() -> None:
    calendar = read_unit("lakemap@.timer")["Timer"]["OnCalendar"]
    assert "Next elapse:" in check(find_tool("systemd-analyze"), "calendar", calendar)


def test_codes_that_another_attempt_cannot_help_are_final() -> None:
    service = read_unit("lakemap@.service")["Service"]
    final = {ConfigError.exit_code, InputError.exit_code, GateError.exit_code}
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == final
    assert service["Restart"] == "on-failure"
    assert service["User"] not in ("", "root")
