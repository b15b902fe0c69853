import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import manifold
from sklearn.neighbors import KNeighborsClassifier

from pipeline.kernels import metrics
from pipeline.kernels.metrics import continuity, knn_accuracy, neighbor_recall, trustworthiness

Doubles = NDArray[np.float64]


def _blobs(n_rows: int, seed: int) -> tuple[Doubles, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(6, size=n_rows) * 3 - 4
    angle = labels * 0.7
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) * 3 + rng.normal(
        size=(n_rows, 2)
    ), labels


def _rows_and_map(kind: str, n_rows: int) -> tuple[Doubles, Doubles]:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(n_rows, 7)) * [9, 6, 3, 1, 1, 1, 1] + 500
    return rows, {"pca": rows[:, :2], "random": rng.normal(size=(n_rows, 2))}[kind].copy()


@pytest.mark.parametrize("k", [1, 5, 10])
def test_accuracy_agrees_with_sklearn(k: int) -> None:
    (xy, labels), (query_xy, query_labels) = _blobs(3000, 0), _blobs(2000, 1)
    peer = KNeighborsClassifier(k).fit(xy, labels).score(query_xy, query_labels)
    assert abs(knn_accuracy(xy, labels, query_xy, query_labels, k) - peer) < 0.005


@pytest.mark.parametrize("n_values", [1 << 22, 1000])
def test_leave_one_out_equals_leaving_each_out(
    n_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_BLOCK_VALUES", n_values)
    xy, labels = _blobs(200, 2)
    alone = [
        knn_accuracy(np.delete(xy, i, 0), np.delete(labels, i), xy[i : i + 1], labels[i : i + 1], 5)
        for i in range(200)
    ]
    assert knn_accuracy(xy, labels, xy, labels, 5, leave_one_out=True) == np.mean(alone)


def test_votes_that_tie_go_to_the_nearest() -> None:
    xy = np.array([[0.0, 0], [1, 0], [2, 0], [3, 0]])
    labels = np.array([9, 1, 1, 9])
    query = np.array([[-1.0, 0]])
    assert knn_accuracy(xy, labels, query, np.array([9]), 4) == 1.0
    assert knn_accuracy(xy, labels, query, np.array([1]), 3) == 1.0


def test_equal_points_never_vote_for_themselves() -> None:
    xy = np.zeros((60, 2))
    labels = np.arange(60)
    assert knn_accuracy(xy, labels, xy, labels, 1, leave_one_out=True) == 0.0


def test_accuracy_needs_enough_references() -> None:
    xy, labels = _blobs(5, 0)
    assert 0 <= knn_accuracy(xy, labels, xy, labels, 5) <= 1
    with pytest.raises(ValueError, match="5 neighbors of 5 queries among 4 references"):
        knn_accuracy(xy, labels, xy, labels, 5, leave_one_out=True)
    with pytest.raises(ValueError, match="2 neighbors of 0 queries"):
        knn_accuracy(xy, labels, xy[:0], labels[:0], 2)


@pytest.mark.parametrize("kind", ["pca", "random"])
@pytest.mark.parametrize(("n_rows", "k"), [(700, 12), (50, 24), (31, 1)])
def test_trustworthiness_equals_sklearn(
    kind: str, n_rows: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_BLOCK_VALUES", 100_000)
    rows, xy = _rows_and_map(kind, n_rows)
    peer = manifold.trustworthiness(rows, xy, n_neighbors=k)
    assert abs(trustworthiness(rows, xy, k) - peer) < 1e-9
    swapped = manifold.trustworthiness(xy, rows, n_neighbors=k)
    assert abs(continuity(rows, xy, k) - swapped) < 1e-9


def test_float32_input_is_measured_in_float64() -> None:
    rows, xy = (part.astype(np.float32) for part in _rows_and_map("pca", 600))
    wide = manifold.trustworthiness(rows.astype(np.float64), xy.astype(np.float64), n_neighbors=9)
    assert abs(trustworthiness(rows, xy, 9) - wide) < 1e-9


@pytest.mark.parametrize("kind", ["pca", "random"])
def test_recall_equals_sets_of_neighbors(kind: str) -> None:
    rows, xy = _rows_and_map(kind, 300)
    near_rows, near_xy = (
        np.argsort(((part[:, None] - part[None]) ** 2).sum(axis=2), axis=1)[:, 1:11]
        for part in (rows, xy)
    )
    shared = [len(set(a) & set(b)) for a, b in zip(near_rows, near_xy, strict=True)]
    assert neighbor_recall(rows, xy, 10) == pytest.approx(np.mean(shared) / 10)


def test_rows_far_from_the_origin_score_the_same() -> None:
    rows, xy = _rows_and_map("pca", 400)
    for score in (trustworthiness, neighbor_recall):
        assert score(rows + 1e9, xy, 8) == pytest.approx(score(rows, xy, 8), abs=1e-4)


def test_a_perfect_map_scores_one() -> None:
    _, xy = _rows_and_map("random", 200)
    flat = np.concatenate([xy, np.full((200, 3), 1e4)], axis=1)
    scores = [score(flat, xy, 8) for score in (trustworthiness, continuity, neighbor_recall)]
    assert scores == [1.0, 1.0, 1.0]


def test_a_map_of_one_point_is_defined() -> None:
    rows, _ = _rows_and_map("pca", 100)
    xy = np.zeros((100, 2))
    for score in (trustworthiness, continuity, neighbor_recall):
        assert 0 <= score(rows, xy, 8) <= 1


def test_k_must_be_below_half_the_rows() -> None:
    rows, xy = _rows_and_map("pca", 20)
    with pytest.raises(ValueError, match="k is 10 for 20 rows"):
        trustworthiness(rows, xy, 10)
    with pytest.raises(ValueError, match="20 neighbors of 20 points"):
        neighbor_recall(rows, xy, 20)
