"""publish: the run's files, its manifest, CURRENT, the gates."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import history
from pipeline.config import GatesConfig
from pipeline.errors import GateError, StageError, StoreError
from pipeline.gates import check_gates
from pipeline.job_file import build_job
from pipeline.manifest import Store
from pipeline.stages import publish
from pipeline.stores import Folder
from tests.data import Finished, tree

PNG = b"\x89PNG\r\n\x1a\n"


def stores_of(done: Finished) -> dict[str, Store]:
    return {name: done.store(name) for name in done.refs if name != "lake"}


def test_the_manifest_lists_every_file_with_its_size(done: Finished) -> None:
    manifest = json.loads((done.run / "manifest.json").read_bytes())
    on_disk = {name: size for name, (size, _) in tree(done.run, ("manifest.json",)).items()}
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == on_disk
    assert manifest["run"] == done.run.name
    assert set(manifest["stores"]) == set(done.refs) - {"lake"}
    expected = {"map.png", "report.html", "metrics.json", "job.yaml", "telemetry.parquet"}
    expected |= {"snapshot.json", "density.parquet"}
    assert {name for name in on_disk if "/" not in name} == expected
    folders = {name.split("/")[0] for name in on_disk if "/" in name}
    assert folders == {"map", "model", "quarantine"}


def test_current_points_at_the_run(done: Finished) -> None:
    pointer = json.loads((done.root / "CURRENT").read_bytes())
    assert pointer["run"] == done.run.name
    assert (done.root / pointer["manifest"]).exists()


def test_the_rows_of_the_files_add_up(done: Finished) -> None:
    metrics, lake = done.published.metrics, done.lake
    mapped = pq.read_table(done.run / "map")
    quarantined = pq.read_table(done.run / "quarantine")
    assert sorted(mapped["id"].to_pylist()) == lake.ids[lake.good].tolist()
    assert sorted(map(int, quarantined["id"].to_pylist())) == lake.ids[sorted(lake.bad)].tolist()
    assert metrics["rows_read"] == len(lake.vectors)
    assert metrics["rows_mapped"] == mapped.num_rows
    assert metrics["rows_quarantined"] == quarantined.num_rows
    assert metrics["rows_held_out"] == lake.held_out[lake.good].sum()
    assert metrics["rows_trained"] == 500


def test_the_report_has_the_numbers_and_needs_no_other_file(done: Finished) -> None:
    page, metrics = (done.run / "report.html").read_text(), done.published.metrics
    for name in ("recall", "trustworthiness", "continuity", "neighbor_recall", "accuracy"):
        assert name in page
        assert f"{metrics[name]:.4g}" in page
    assert "990" in page
    assert "null vector" in page
    assert done.run.name in page
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:|#)', page)
    assert (done.run / "map.png").read_bytes().startswith(PNG)


def test_metrics_and_job_are_for_programs(done: Finished) -> None:
    assert json.loads((done.run / "metrics.json").read_bytes()) == done.published.metrics
    text = (done.run / "job.yaml").read_text()
    again = build_job(yaml.safe_load(text), "job.yaml", Path("/"))
    assert again.neighbors == done.job.neighbors
    assert again.input == done.job.input
    assert again.output == done.job.output


@pytest.mark.parametrize(
    ("gates", "metrics", "message"),
    [
        ({"recall": 0.9}, {"recall": 0.8999}, "gate recall: 0.8999, the job needs 0.9;"),
        ({"accuracy": 0.5}, {"accuracy": None}, "gate accuracy: not measured, the job needs 0.5;"),
        ({"continuity": 1.0}, {"continuity": 0.99996}, "gate continuity: 1.0000, the job needs 1;"),
    ],
)
def test_a_quality_below_its_gate_is_refused(
    gates: dict[str, Any], metrics: dict[str, Any], message: str
) -> None:
    with pytest.raises(GateError, match=re.escape(message)) as caught:
        check_gates(GatesConfig(**gates), metrics)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("gates", "metrics"),
    [
        ({"recall": 0.9}, {"recall": 0.9}),
        ({"recall": None}, {"recall": 0.0}),
        ({"accuracy": 1.0}, {"recall": 1.0}),  # measured by a later step
    ],
)
def test_a_gate_that_is_met_lets_pass(gates: dict[str, Any], metrics: dict[str, Any]) -> None:
    check_gates(GatesConfig(**gates), metrics)


def test_rows_that_do_not_add_up_are_never_published(
    done: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = stores_of(done)

    class Context:
        def read(self, name: str) -> Store:
            store = stores[name]
            if name != "ingest":
                return store
            facts = {**store.manifest.facts, "n_rows": 1001}
            return Store(store.folder, replace(store.manifest, facts=facts))

    with pytest.raises(StageError, match=r"rows do not add up: .*'rows_read': 1001"):
        publish.gather_metrics(Context())  # type: ignore[arg-type]


def release(root: Folder, stores: dict[str, Store]) -> tuple[Folder, bool]:
    return publish.release(root, stores, history.head(root))


def copy_stores(done: Finished, root: Path) -> dict[str, Store]:
    """The finished run's stores at another place, to be damaged there."""
    shutil.copytree(done.root / "stores", root / "stores")
    moved = {}
    for name, store in stores_of(done).items():
        place = store.folder.url.replace(done.job.output, str(root))
        moved[name] = Store(Folder(place), store.manifest)
    return moved


def test_a_second_release_changes_nothing(done: Finished, tmp_path: Path) -> None:
    stores, root = copy_stores(done, tmp_path), Folder(str(tmp_path))
    run, changed = release(root, stores)
    assert changed
    before = tree(tmp_path)
    assert release(root, stores) == (run, False)
    assert tree(tmp_path) == before


def test_a_release_that_was_cut_short_is_completed(
    done: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, root = copy_stores(done, tmp_path), Folder(str(tmp_path))
    copy_to, n_copied = Folder.copy_to, 0

    def fails(self: Folder, key: str, target: Folder, target_key: str) -> None:
        nonlocal n_copied
        n_copied += 1
        if n_copied == 8:
            raise StoreError("the disk is full")
        copy_to(self, key, target, target_key)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "copy_to", fails)
        with pytest.raises(StoreError, match="disk is full"):
            release(root, stores)
    run = tmp_path / "runs" / done.run.name
    assert not (run / "manifest.json").exists()
    assert not (tmp_path / "CURRENT").exists()
    assert any(run.rglob("*"))

    release(root, stores)
    assert {name: size for name, (size, _) in tree(run).items()} == {
        name: size for name, (size, _) in tree(done.run).items()
    }
    assert pq.read_table(run / "map").num_rows == 990


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [lose, cut])
def test_a_damaged_map_file_is_not_released(
    damage: Callable[[Path], None], done: Finished, tmp_path: Path
) -> None:
    stores = copy_stores(done, tmp_path)
    file = Path(stores["embed"].folder.url) / stores["embed"].records[2].key / "map.parquet"
    damage(file)
    with pytest.raises(StoreError, match=re.escape(f"{file} is damaged")) as caught:
        release(Folder(str(tmp_path)), stores)
    assert caught.value.exit_code == 4
    assert not (tmp_path / "CURRENT").exists()
    assert not (tmp_path / "runs" / done.run.name / "manifest.json").exists()


def test_current_returns_to_an_older_run(done: Finished, tmp_path: Path) -> None:
    stores, root = copy_stores(done, tmp_path), Folder(str(tmp_path))
    release(root, stores)
    pointer = (tmp_path / "CURRENT").read_bytes()
    (tmp_path / "CURRENT").write_text('{"run": "another"}')
    assert release(root, stores)[1]
    assert (tmp_path / "CURRENT").read_bytes() == pointer
