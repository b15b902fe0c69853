import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import StoreError
from pipeline.manifest import (
    FORMAT,
    Commit,
    Effort,
    Manifest,
    Part,
    Plan,
    Record,
    Store,
    Timing,
    commit_part,
    find_store,
    fingerprint,
    from_json,
    load_commit,
    load_commits,
    load_plan,
    missing_partitions,
    open_store,
    save_plan,
    to_json,
)
from pipeline.partitions import Partition, Piece, split_rows
from pipeline.stores import Folder
from tests.faults import DAMAGES, make_commit, make_record

EFFORT = Effort(1.5, 1 << 20)
PARTITION = Partition(3, 0, 2)

text = st.text(st.characters(codec="utf-8"), max_size=9)
counts = st.integers(0, 2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | counts | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
facts = st.dictionaries(text, plain, max_size=3)
pieces = st.builds(Piece, text, st.integers(-1, 99), counts, counts)
partitions = st.builds(Partition, counts, counts, counts, st.lists(pieces, max_size=3).map(tuple))
objects = st.dictionaries(text, counts, max_size=3)
records = st.builds(Record, partitions, counts, text, objects, objects, text, facts)
efforts = st.builds(Effort, numbers, counts)
documents = st.one_of(
    st.builds(Plan, st.lists(partitions, max_size=3), facts),
    st.builds(Commit, records, efforts, text),
    st.builds(Timing, numbers, numbers, counts),
    st.builds(
        Manifest,
        stage=text,
        version=counts,
        fingerprint=text,
        inputs=st.dictionaries(text, text, max_size=3),
        settings=facts,
        facts=facts,
        metrics=facts,
        n_rows=counts,
        records=st.lists(records, max_size=3),
    ),
)


def make_manifest(records: list[Record], **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "stage": "toy",
        "version": 1,
        "fingerprint": "0a1b",
        "inputs": {},
        "settings": {},
        "facts": {},
        "metrics": {},
        "n_rows": sum(record.n_rows for record in records),
        "records": records,
    }
    return Manifest(**(values | changes))


def make_store(folder: Folder, blocks: list[NDArray[Any]]) -> Store:
    """A finished store with one partition per block."""
    ends = np.cumsum([len(block) for block in blocks]).tolist()
    commits = [
        commit_part(
            folder, Partition(index, end - len(block), end), Part(len(block), {"a": block}), EFFORT
        )
        for index, (block, end) in enumerate(zip(blocks, ends, strict=True))
    ]
    folder.put("manifest.json", to_json(make_manifest([commit.record for commit in commits])))
    store = find_store(folder)
    assert store is not None
    return store


@given(document=documents)
def test_documents_survive_the_way_through_json(document: Any) -> None:
    found: object = from_json(type(document), to_json(document), "here")
    assert found == document


def test_figures_that_are_no_numbers_survive_too() -> None:
    plan = Plan([], {"loss": float("nan"), "drift": float("inf")})
    found = from_json(Plan, to_json(plan), "here")
    assert {name: str(value) for name, value in found.facts.items()} == {
        "loss": "nan",
        "drift": "inf",
    }


def test_documents_are_readable_and_in_order() -> None:
    data = to_json(Plan([PARTITION, PARTITION], {"b": 1, "a": 2}))
    assert data == to_json(Plan([PARTITION, PARTITION], {"a": 2, "b": 1}))
    assert json.loads(data)["format"] == FORMAT
    assert len(data.splitlines()) == 4  # facts, format and a line for each partition


@pytest.mark.parametrize("kind", [Plan, Commit, Manifest, Timing])
@pytest.mark.parametrize("found", [FORMAT + 1, 0, None])
def test_another_format_is_refused(kind: type[Plan], found: int | None) -> None:
    data = json.dumps({"format": found}).encode()
    with pytest.raises(
        StoreError, match=f"^here: format {found}, this version reads {FORMAT}; remove it$"
    ):
        from_json(kind, data, "here")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"7", b"\xff", b"null", b'{"format": 1}', b'{"format": 1, "x": 2}']
)
@pytest.mark.parametrize("kind", [Plan, Commit, Manifest, Timing])
def test_a_damaged_document_is_refused_by_name(kind: type[Plan], data: bytes) -> None:
    name = kind.__name__.lower()
    with pytest.raises(StoreError, match=f"^here: not a {name} record; remove it$"):
        from_json(kind, data, "here")


def test_a_truncated_commit_is_refused_by_name(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    commit_part(folder, PARTITION, Part(2), EFFORT)
    path = tmp_path / "commits/000003.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreError, match=f"^{path}: not a commit record; remove it$"):
        load_commits(folder)


def test_fingerprints_tell_values_apart() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    values: list[tuple[Any, ...]] = [(), (1,), ("1",), (1, 2), ([1, 2],), ({"1": 2},), (None,)]
    assert len({fingerprint(*value) for value in values}) == len(values)


def test_the_first_plan_stays(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    assert load_plan(folder) is None
    first = Plan(split_rows(10, 3), {"width": 4})
    assert save_plan(folder, first) == first
    assert save_plan(folder, Plan(split_rows(10, 5))) == first
    assert load_plan(folder) == first


# Commits.


def test_a_commit_says_what_was_written(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    part = Part(
        2,
        {"values": np.arange(2)},
        {"ids": pa.table({"id": [1, 2]})},
        {"model.bin": b"12345"},
        {"sum": 1.5},
    )
    commit = commit_part(folder, PARTITION, part, EFFORT)
    record = commit.record
    assert (record.partition, record.n_rows, record.metrics) == (PARTITION, 2, {"sum": 1.5})
    assert commit.effort == EFFORT
    assert record.key == f"data/000003-{record.sha256[:16]}"
    assert folder.join(record.key).list() == record.objects
    assert {name.split("/")[0] for name in record.objects} == {"arrays", "ids.parquet", "model.bin"}
    assert load_commit(folder, 3) == commit
    assert load_commit(folder, 4) is None


def test_an_equal_attempt_shares_the_data(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    first = commit_part(folder, PARTITION, Part(2, {"a": np.arange(2)}), EFFORT)
    before = folder.list()
    second = commit_part(folder, PARTITION, Part(2, {"a": np.arange(2)}), Effort(9.0, 9))
    assert second == first
    assert folder.list() == before


def test_another_attempt_that_differs_loses_and_leaves_nothing(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    first = commit_part(folder, PARTITION, Part(2, {"a": np.arange(2)}), EFFORT)
    before = folder.list()
    second = commit_part(
        folder, PARTITION, Part(2, {"a": np.arange(2) + 1}, files={"more": b"1"}), EFFORT
    )
    assert second == first
    assert folder.list() == before


def test_a_lost_reply_is_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path))
    create = Folder.create

    def create_twice(self: Folder, key: str, data: bytes) -> bool:
        """As a store's client does whose first answer was lost: it asks again."""
        create(self, key, data)
        return create(self, key, data)

    monkeypatch.setattr(Folder, "create", create_twice)
    commit = commit_part(folder, PARTITION, Part(2, {"a": np.arange(2)}), EFFORT)
    assert commit == load_commit(folder, 3)
    assert commit.effort == EFFORT
    assert folder.join(commit.record.key).list() == commit.record.objects


def test_data_are_written_before_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path))
    seen: list[int] = []
    create = Folder.create

    def watch(self: Folder, key: str, data: bytes) -> bool:
        seen.append(len(self.list("data")))
        return create(self, key, data)

    monkeypatch.setattr(Folder, "create", watch)
    commit = commit_part(folder, PARTITION, Part(2, {"a": np.arange(2)}), EFFORT)
    assert seen == [len(commit.record.objects)]


def test_what_is_missing_is_what_has_no_commit(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    plan = Plan(split_rows(10, 2))
    assert load_commits(folder) == {}
    assert missing_partitions(plan, {}) == plan.partitions
    made = {
        index: commit_part(folder, plan.partitions[index], Part(2), EFFORT) for index in (4, 0, 3)
    }
    assert load_commits(folder) == made
    assert [part.index for part in missing_partitions(plan, made)] == [1, 2]


# Finished stores.


def test_the_digest_is_of_contents_not_of_effort() -> None:
    records = [make_commit(part).record for part in split_rows(6, 2)]
    manifest = make_manifest(records)
    slower = [replace(make_commit(part), effort=Effort(99.0, 99)) for part in split_rows(6, 2)]
    assert make_manifest([commit.record for commit in slower]).digest == manifest.digest
    others = [
        make_manifest(records, stage="other"),
        make_manifest(records, version=2),
        make_manifest(records, fingerprint="2c3d"),
        make_manifest(records[:-1]),
        make_manifest([*records[:-1], replace(records[-1], sha256="1" * 64)]),
        make_manifest([*records[:-1], replace(records[-1], n_rows=3)]),
    ]
    assert len({manifest.digest, *(other.digest for other in others)}) == len(others) + 1


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    bounds=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=8),
)
def test_rows_are_those_of_all_blocks_together(sizes: list[int], bounds: list[list[int]]) -> None:
    whole = np.arange(2 * sum(sizes), dtype=np.int64).reshape(-1, 2)
    blocks = np.split(whole, np.cumsum(sizes)[:-1])
    with TemporaryDirectory() as place:
        store = make_store(Folder(place), blocks)
        assert store.n_rows == len(whole)
        for start, stop in np.minimum([(0, 30), (30, 30), *bounds], len(whole)).tolist():
            found = store.rows("a", start, stop)
            assert found.dtype == np.int64
            assert found.shape == (stop - start, 2)
            np.testing.assert_array_equal(found, whole[start:stop])


def test_a_store_gives_its_tables_and_files(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    table = pa.table({"id": [1, 2], "x": [0.5, 1.5]})
    record = commit_part(
        folder, PARTITION, Part(2, {}, {"map": table}, {"model.bin": b"12345"}), EFFORT
    ).record
    store = Store(folder, make_manifest([record]))
    assert store.records == [record]
    assert store.table(record, "map").equals(table)
    assert store.table(record, "map", ["x"]).equals(table.select(["x"]))
    assert store.file(record, "model.bin") == b"12345"


@pytest.mark.parametrize("name", ["map.parquet", "model.bin"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_or_file_is_named(tmp_path: Path, damage: Any, name: str) -> None:
    folder = Folder(str(tmp_path))
    table = pa.table({"id": np.arange(100)})
    part = Part(100, {}, {"map": table}, {"model.bin": bytes(100)})
    record = commit_part(folder, PARTITION, part, EFFORT).record
    damage(tmp_path / record.key / name)
    store = Store(folder, make_manifest([record]))
    match = f"^{tmp_path}/{record.key}/{name} is damaged: .*; remove {tmp_path} and run again$"
    with pytest.raises(StoreError, match=match):
        _ = store.table(record, "map") if name == "map.parquet" else store.file(record, name)


def test_a_store_without_a_manifest_is_not_there(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    save_plan(folder, Plan([PARTITION]))
    commit_part(folder, PARTITION, Part(2), EFFORT)
    assert find_store(folder) is None
    with pytest.raises(StoreError, match=f"^{tmp_path}: changed or removed during the run"):
        open_store(folder, "digest")


def test_a_changed_store_is_refused(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    digest = make_store(folder, [np.arange(3)]).manifest.digest
    changed = make_manifest([make_record(Partition(0, 0, 3))])
    folder.put("manifest.json", to_json(changed))
    with pytest.raises(StoreError, match=f"^{tmp_path}: changed or removed during the run; run ag"):
        open_store(folder, digest)
    assert open_store(folder, changed.digest).manifest == changed


def test_a_store_is_opened_once_per_process(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    digest = make_store(folder, [np.arange(3)]).manifest.digest
    store = open_store(folder, digest)
    assert open_store(Folder(str(tmp_path)), digest) is store
