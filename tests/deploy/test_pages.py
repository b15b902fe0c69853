"""What all of deploy/ has in common: a page each, commands that exist, no keys."""

import re
from pathlib import Path

import pytest
import typer.main

from jobs.cli import app
from tests.deploy.tools import DEPLOY

FILES = sorted(path for path in DEPLOY.rglob("*") if path.suffix != ".png" and path.is_file())
FOLDERS = sorted(path for path in DEPLOY.iterdir() if path.is_dir() and path.name[0] not in "._")
COMMANDS = set(vars(typer.main.get_command(app))["commands"])
KEYS = r"AKIA[0-9A-Z]{16}|-----BEGIN|(?i:(password|secret_access_key|token)\s*[=:]\s*[\w/+]{8,})"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_folder_has_a_page_and_is_in_the_index(folder: Path) -> None:
    assert (folder / "README.md").read_text().startswith("# ")
    assert f"]({folder.name}/README.md)" in (DEPLOY / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_keys(path: Path) -> None:
    assert not re.search(KEYS, path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_commands_that_exist(path: Path) -> None:
    text = path.read_text()
    called = re.findall(r"(?:bin/|&& |75 \S+ |`|; )lakemap (?:--[\w-]+ )*([a-z]+)", text)
    called += re.findall(r"\[--log-json, (\w+)", text)
    assert set(called) <= COMMANDS


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in (path for path in FILES if path.suffix == ".md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
