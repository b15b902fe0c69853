"""A small lake, and a job whose map of it is published."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Job
from tests.data import make_job, run_job, small_blocks
from tests.refresh.nights import QUICK, some, write_file


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Six files, of which partitions of 256 rows hold one or two or a part."""
    for index, n_rows in enumerate((120, 100, 300, 40, 90, 260)):
        write_file(
            tmp_path / f"lake/f{index}.parquet", some(n_rows, index), 1000 * index, index % 2
        )
    return tmp_path / "lake"


@pytest.fixture
def quick() -> dict[str, Any]:
    """The job's settings."""
    return QUICK


@pytest.fixture
def job(lake: Path, tmp_path: Path, quick: dict[str, Any]) -> Job:
    """A job whose map is published."""
    made = make_job(lake, tmp_path / "maps", **quick)
    run_job(made)
    return made
