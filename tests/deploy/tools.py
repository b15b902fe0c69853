"""Where the deploy files are, and the checkers of others that may be there."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


def find_tool(name: str) -> str:
    """Path of the program: in the environment of the tests, or on PATH; skips without it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; make test-deploy gets what it can")
    return found


def check(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command says; it must end well."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def read_documents(text: str) -> list[dict[str, Any]]:
    """The YAML documents of a text."""
    return [document for document in yaml.safe_load_all(text) if document is not None]
