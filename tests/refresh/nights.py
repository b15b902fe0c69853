"""Lakes that change from night to night, and what their maps must be."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from encoders.artifact import Encoder
from jobs import flow, refresh
from pipeline.config import Job
from pipeline.picture import rasterize
from pipeline.published import load_snapshot, read_density
from pipeline.stages.evaluate import PIXELS, category_codes
from pipeline.stores import Folder
from tests.data import (
    WIDTH,
    Blobs,
    Recorder,
    make_blobs,
    one_try,
    tree,
)

QUICK: dict[str, Any] = {
    "input": {"label": "blob", "holdout": "test", "max_bad_fraction": 0.05},
    "train": {"steps": 4},
    "gates": {"trustworthiness": None},
    "drift": {"retrain": {"novel_share": None}},  # other seeds have other blobs
}


def write_file(path: Path, rows: Blobs, first_id: int, n_bad: int = 0) -> None:
    """One file of a lake; its first rows are bad."""
    lists: list[Any] = rows.vectors.tolist()
    lists[:n_bad] = [None] * n_bad
    table = pa.table(
        {
            "item": np.arange(first_id, first_id + len(lists)),
            "embedding": pa.array(lists, pa.list_(pa.float32())),
            "blob": rows.labels,
            "test": np.arange(len(lists)) % 7 == 0,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def some(n_rows: int, seed: int = 0) -> Blobs:
    return make_blobs(n_rows, seed=seed)


def refresh_job(job: Job, seen: Recorder | None = None, again: bool = False) -> flow.Published:
    return refresh.run(job, one_try(), seen or Recorder(), again=again)


def change_lake(lake: Path) -> None:
    """A new file, a removed one, one that is written anew with other rows."""
    write_file(lake / "f1b.parquet", some(150, 11), 7000, 2)
    (lake / "f4.parquet").unlink()
    write_file(lake / "f0.parquet", some(130, 12), 8000)


def expect_map(run: Path, lake: Path) -> dict[Any, tuple[float, float]]:
    """The map of the lake as it is that the run's encoder makes from the beginning."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(lake.glob("*.parquet"))])
    table = table.filter(pc.is_valid(table["embedding"]))
    vectors = np.array(table["embedding"].to_pylist(), np.float32).reshape(-1, WIDTH)
    xy = Encoder.load(run / "model").embed(vectors)
    return dict(zip(table["item"].to_pylist(), map(tuple, xy.tolist()), strict=True))


def read_places(run: Path) -> dict[Any, tuple[float, float]]:
    """Place by id; no id may come twice."""
    table = pq.read_table(run / "map")
    ids = table["id"].to_pylist()
    assert len(set(ids)) == len(ids)
    xy = zip(table["x"].to_pylist(), table["y"].to_pylist(), strict=True)
    return dict(zip(ids, xy, strict=True))


def check_run(published: flow.Published, lake: Path) -> None:
    """The run is the map of the lake, row for row, and its records are those of its files."""
    run = Path(published.run.url)
    assert read_places(run) == expect_map(run, lake)
    metrics = json.loads((run / "metrics.json").read_bytes())
    assert metrics == published.metrics
    n_rows = sum(pq.read_metadata(path).num_rows for path in lake.glob("*.parquet"))
    assert metrics["rows_read"] == n_rows == metrics["rows_mapped"] + metrics["rows_quarantined"]
    quarantine = [pq.read_metadata(path).num_rows for path in run.glob("quarantine/*.parquet")]
    assert sum(quarantine) == metrics["rows_quarantined"]
    listed = json.loads((run / "manifest.json").read_bytes())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        name: size for name, (size, _) in tree(run, ("manifest.json",)).items()
    }
    check_density(run)


def check_density(run: Path) -> None:
    """Rows per pixel, updated file by file, are those of the whole map."""
    known, table = load_snapshot(Folder(str(run))), pq.read_table(run / "map")
    xy = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
    codes = category_codes(table, known.categories)
    counts = rasterize(xy, codes, len(known.categories), known.extent, PIXELS)
    found = read_density((run / "density.parquet").read_bytes(), len(known.categories), PIXELS)
    assert (found == counts).all()
    if known.labels is not None:
        labels = pc.value_counts(pc.cast(table["label"], pa.string())).to_pylist()
        assert known.labels == {pair["values"]: pair["counts"] for pair in labels}
