"""The images, as far as they can be looked at without building them."""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy.tools import DEPLOY, ROOT, check, find_tool

PATHS = [DEPLOY / "docker/Dockerfile", DEPLOY / "docker/Dockerfile.gpu"]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]
PACKAGES = [
    name.rstrip("*") for name in CONFIG["tool"]["setuptools"]["packages"]["find"]["include"]
]


class Instruction(NamedTuple):
    """One instruction of a Dockerfile, continued lines joined."""

    word: str
    rest: str


def read_instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    split = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [Instruction(word, " ".join(rest.split())) for word, rest in split]


@pytest.fixture(params=PATHS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_hadolint_finds_nothing(path: Path) -> None:
    assert check(find_tool("hadolint"), path) == ""


def test_the_base_is_pinned(path: Path) -> None:
    instructions = read_instructions(path)
    assert instructions[0].word == "ARG"
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+", instructions[0].rest)
    bases = [rest.split()[0] for word, rest in instructions if word == "FROM"]
    assert bases == ["${BASE}"] * 2  # what builds is not part of the image


def test_everything_copied_is_there_and_let_through(path: Path) -> None:
    allowed = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    assert "*" in allowed
    copies = [rest.split() for word, rest in read_instructions(path) if word == "COPY"]
    sources = [name for *names, _ in copies if not names[0].startswith("--from") for name in names]
    assert {"constraints.txt", "pyproject.toml", *PACKAGES} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed


def test_it_runs_as_nobody_in_particular(path: Path) -> None:
    words = read_instructions(path)
    last = max(at for at, instruction in enumerate(words) if instruction.word == "FROM")
    users = [rest for word, rest in words[last:] if word == "USER"]
    assert len(users) == 1
    assert int(users[0]) >= 10_000
    after = [word for word, _ in words[words.index(Instruction("USER", users[0])) + 1 :]]
    assert after == ["ENTRYPOINT", "CMD"]
    assert Instruction("ENTRYPOINT", '["lakemap"]') in words


def test_what_is_installed_is_pinned_and_known(path: Path) -> None:
    instructions = read_instructions(path)
    settings = dict(rest.split("=", 1) for word, rest in instructions if word == "ARG")
    extras = settings["EXTRAS"].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert len({"cpu", "gpu"} & set(extras)) == 1  # both own the module faiss
    (install,) = (rest for word, rest in instructions if word == "RUN" and "venv" in rest)
    assert install.count("pip install") == install.count("--constraint constraints.txt") == 2
    assert re.search(r'"\.\[\$\{EXTRAS\}\]"$', install)


def test_the_pages_build_the_version_there_is() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.suffix in (".md", ".yaml")]
    tags = {tag for text in texts for tag in re.findall(r"lakemap:(\d[\w.]*)", text)}
    assert tags == {PROJECT["version"]}
