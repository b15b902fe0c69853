import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.neighbors import KNeighborsClassifier

from jobs import demo_lake
from jobs.demo_lake import (
    BAD_EVERY,
    BAD_KINDS,
    CHUNK_ROWS,
    WIDTH,
    DemoLake,
    deform_digits,
    find_bad,
    load_sources,
    write_demo_lake,
)
from pipeline.errors import ConfigError, InputError


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def kind_of(vector: list[float] | None) -> str:
    if vector is None:
        return "null"
    if len(vector) != WIDTH:
        return "short" if len(vector) < WIDTH else "long"
    if np.isnan(vector).any():
        return "nan"
    return "good" if np.isfinite(vector).all() else "infinity"


def test_the_lake_holds_what_it_says(tmp_path: Path) -> None:
    lake = write_demo_lake(tmp_path, n_rows=6_000, n_files=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"part-{i:05d}.parquet" for i in range(4)
    ]
    table = pq.read_table(tmp_path)
    assert table.schema.types == [pa.int64(), pa.list_(pa.float32()), pa.int8(), pa.bool_()]
    assert table["digit_id"].to_pylist() == list(range(6_000))
    n_bad = sum(kind_of(vector) != "good" for vector in table["embedding"].to_pylist())
    n_holdout = sum(table["held_out"].to_pylist())
    assert lake == DemoLake(n_rows=6_000, n_bad=n_bad, n_holdout=n_holdout, n_files=4)
    assert n_bad == 6_000 // BAD_EVERY
    assert 0.07 < n_holdout / 6_000 < 0.13


def test_every_kind_of_bad_row_is_there(tmp_path: Path) -> None:
    write_demo_lake(tmp_path, n_rows=2_500, n_files=1)
    kinds = [kind_of(vector) for vector in pq.read_table(tmp_path)["embedding"].to_pylist()]
    assert {kind: kinds.count(kind) for kind in BAD_KINDS} == dict.fromkeys(BAD_KINDS, 1)
    assert np.flatnonzero(np.array(kinds) != "good").tolist() == find_bad(0, 2_500).tolist()


def test_bad_rows_do_not_depend_on_the_split() -> None:
    pieces = [find_bad(start, start + 700) for start in range(0, 70_000, 700)]
    assert np.concatenate(pieces).tolist() == find_bad(0, 70_000).tolist()


def test_pixels_are_intensities(tmp_path: Path) -> None:
    write_demo_lake(tmp_path, n_rows=1_000, n_files=1)
    vectors = pq.read_table(tmp_path)["embedding"].to_pylist()
    pixels = np.array([vector for vector in vectors if kind_of(vector) == "good"])
    assert pixels.min() == 0
    assert pixels.max() == 1
    assert 0.2 < pixels.mean() < 0.4


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_demo_lake(tmp_path / name, n_rows=2_000, n_files=2, seed=seed)
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b")
    assert read_bytes(tmp_path / "a") != read_bytes(tmp_path / "c")


def test_held_out_digits_are_a_tenth_of_each_class_and_no_others() -> None:
    digits = load_sources(0)
    for label in range(10):
        assert digits.held_out[digits.labels == label].mean() == pytest.approx(0.1, abs=0.003)
    _, sources = deform_digits(50_000, np.random.default_rng(0), digits)
    held_out = digits.held_out[sources]
    assert not set(sources[held_out]) & set(sources[~held_out])
    assert (load_sources(1).held_out != digits.held_out).any()


def test_classes_stay_recognisable() -> None:
    digits = load_sources(0)
    pixels, sources = deform_digits(CHUNK_ROWS, np.random.default_rng(0), digits)
    labels, held_out = digits.labels[sources], digits.held_out[sources]
    train, test = np.flatnonzero(~held_out)[:20_000], np.flatnonzero(held_out)[:2_000]
    model = KNeighborsClassifier(10).fit(pixels[train], labels[train])
    assert model.score(pixels[test], labels[test]) >= 0.97


def test_without_deformation_the_digits_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURN_DEGREES", "SCALE_LOG", "SHIFT_PIXELS", "STROKE_LOG", "NOISE"):
        monkeypatch.setattr(demo_lake, name, 0.0)
    digits = load_sources(0)
    pixels, sources = deform_digits(500, np.random.default_rng(0), digits)
    real = digits.pixels[sources, 1:-1, 1:-1].reshape(500, WIDTH)
    np.testing.assert_allclose(pixels, real, atol=0.5 / 255 + 1e-6)


def test_a_shift_moves_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURN_DEGREES", "SCALE_LOG", "STROKE_LOG", "NOISE"):
        monkeypatch.setattr(demo_lake, name, 0.0)
    draws = np.zeros((4, 1), dtype=np.float32)
    draws[2] = 1 / demo_lake.SHIFT_PIXELS
    x, y = demo_lake._source_places(draws)
    digits = load_sources(0)
    moved = demo_lake._sample_bilinear(digits.pixels, np.array([5]), x, y).reshape(8, 8)
    np.testing.assert_allclose(moved, digits.pixels[5, 1:-1, :8], atol=1e-6)


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Which files there are and when each was written; not when it was last read."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (found.st_ino, found.st_mtime_ns) for name, found in stats.items()}


def test_second_call_rewrites_nothing(tmp_path: Path) -> None:
    first = write_demo_lake(tmp_path, n_rows=2_000, n_files=2)
    before = written(tmp_path)
    told: list[int] = []
    assert write_demo_lake(tmp_path, n_rows=2_000, n_files=2, progress=told.append) == first
    assert written(tmp_path) == before
    assert told == [1_000, 1_000]


def test_only_missing_files_are_written(tmp_path: Path) -> None:
    write_demo_lake(tmp_path, n_rows=3_000, n_files=3)
    before = read_bytes(tmp_path)
    kept = written(tmp_path)["part-00000.parquet"]
    (tmp_path / "part-00001.parquet").unlink()
    write_demo_lake(tmp_path, n_rows=3_000, n_files=3)
    assert read_bytes(tmp_path) == before
    assert written(tmp_path)["part-00000.parquet"] == kept


def test_another_demo_is_replaced(tmp_path: Path) -> None:
    write_demo_lake(tmp_path / "lake", n_rows=3_000, n_files=3, seed=1)
    (tmp_path / "lake" / ".part-00007.parquet.tmp").touch()
    write_demo_lake(tmp_path / "lake", n_rows=2_000, n_files=2)
    write_demo_lake(tmp_path / "fresh", n_rows=2_000, n_files=2)
    assert read_bytes(tmp_path / "lake") == read_bytes(tmp_path / "fresh")


@pytest.mark.parametrize("content", ["table", "garbage"])
def test_somebody_elses_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "part-00000.parquet"
    if content == "table":
        pq.write_table(pa.table({"digit_id": [1]}), path)
    else:
        path.write_bytes(b"not parquet")
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"part-00000\.parquet is not a file of the demo lake"):
        write_demo_lake(tmp_path, n_rows=100, n_files=1)
    assert path.read_bytes() == before


def test_an_interruption_leaves_no_half_file(tmp_path: Path) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_demo_lake(tmp_path, n_rows=100, n_files=1, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("n_rows", "n_files"), [(0, 0), (10, 0), (3, 4)])
def test_files_need_rows(tmp_path: Path, n_rows: int, n_files: int) -> None:
    with pytest.raises(ConfigError, match="rows do not make"):
        write_demo_lake(tmp_path, n_rows=n_rows, n_files=n_files)


def test_a_file_is_row_groups_of_one_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_lake, "CHUNK_ROWS", 400)
    told: list[int] = []
    write_demo_lake(tmp_path / "long", n_rows=1_000, n_files=1, progress=told.append)
    write_demo_lake(tmp_path / "short", n_rows=800, n_files=1)
    long = pq.ParquetFile(tmp_path / "long" / "part-00000.parquet")
    short = pq.ParquetFile(tmp_path / "short" / "part-00000.parquet")
    assert told == [400, 400, 200]
    assert [long.metadata.row_group(i).num_rows for i in range(3)] == told
    # A chunk has a generator of its own: what follows it changes nothing. repr, for NaN != NaN.
    for i in range(2):
        left, right = long.read_row_group(i).to_pylist(), short.read_row_group(i).to_pylist()
        assert repr(left) == repr(right)


def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_lake, "CHUNK_ROWS", 2_000)
    load_sources(0)
    peaks = []
    for n_rows in (2_000, 20_000):
        tracemalloc.start()
        write_demo_lake(tmp_path / str(n_rows), n_rows=n_rows, n_files=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
