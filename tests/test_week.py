"""A week of refreshes on a small lake: after every night the map is that of the lake as it is."""

from pathlib import Path

import pytest

from jobs import week
from pipeline import history
from pipeline.published import load_snapshot

SETTINGS = (
    "cluster.kind=serial",
    "input.partition_bytes=65536",
    "input.max_bad_fraction=0.05",
    "sample.rows=800",
    "neighbors.k=15",
    "neighbors.recall_queries=100",
    "affinity.perplexity=5",
    "train.steps=60",
    "train.batch=128",
    "train.encoder.hidden=32",
    "train.encoder.layers=1",
    "evaluate.rows=120",
    "evaluate.reference_rows=300",
    "gates.trustworthiness=0.5",
)


@pytest.mark.slow
def test_the_week(tmp_path: Path) -> None:
    lived = week.make_week(tmp_path / "week", 6400, SETTINGS)
    nights = {day: week.live(lived, day) for day in week.DAYS}  # every map is checked there
    story = {day: night.story for day, night in nights.items()}
    runs = {day: night.run for day, night in nights.items()}
    assert "encoder trained" in story["sunday"]
    assert "new" in story["monday"]
    assert story["tuesday"] == "nothing to do"
    assert runs["tuesday"] == runs["monday"] != runs["sunday"]
    assert story["wednesday"].startswith("refused (2), then refused (3); corrected: ")
    assert "removed" in story["thursday"]
    assert "changed" in story["thursday"]
    assert story["friday"].startswith("killed half way, then ")
    assert "encoder trained again" in story["saturday"]
    assert runs["saturday"] != runs["friday"]
    assert story["next sunday"].endswith("rolled back; then nothing to do")
    assert runs["next sunday"] == runs["saturday"]
    assert nights["friday"].n_rows > nights["thursday"].n_rows > 0

    log = history.entries(lived.root)
    actions = [entry.action for entry in log]
    assert actions[0] == "run"
    assert actions[1:5] == ["refresh"] * 4
    assert actions[5:] == ["retrain", "refresh", "rollback"]
    assert len(log) == 8
    first, fifth = (load_snapshot(lived.root.join(f"runs/{log[at].run}")) for at in (0, 4))
    assert first.encoder == fifth.encoder  # it was never trained again for ordinary nights
