"""The scikit-learn estimator: scikit-learn's own checks, the same map as the pipeline's parts."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from pipeline.estimator import Lakemap

QUICK: dict[str, Any] = {"steps": 5, "batch": 16, "hidden": 8, "layers": 1}


@parametrize_with_checks([Lakemap(**QUICK), Lakemap("umap", **QUICK)])  # type: ignore[untyped-decorator]
def test_scikit_learn_accepts_the_estimator(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rows, labels = load_digits(return_X_y=True)
    return rows.astype(np.uint8), labels


@pytest.mark.parametrize(
    ("objective", "batches"),
    [
        ("tsne", "edges"),
        ("tsne", "points"),
        ("largevis", "edges"),
        ("largevis", "negatives"),
        ("umap", "edges"),
        ("umap", "negatives"),
    ],
)
def test_every_objective_separates_the_digits(
    digits: tuple[Any, Any], objective: Any, batches: Any
) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    rows, labels = digits
    mapped = Lakemap(
        objective,
        batches=batches,
        steps=300,
        batch=512,
        learning_rate=3e-3,
        exaggerated_share=0.3,  # of so few steps
    )
    places = mapped.fit_transform(rows[:1200])
    scorer = KNeighborsClassifier(10).fit(places, labels[:1200])
    # Five negatives a head say less about a batch than all its points.
    wanted = 0.75 if batches == "negatives" else 0.85
    assert scorer.score(mapped.transform(rows[1200:]), labels[1200:]) > wanted


def test_a_seed_gives_the_same_map_and_another_seed_another(digits: tuple[Any, Any]) -> None:
    rows = digits[0][:300]
    one, again = (Lakemap(**QUICK).fit_transform(rows) for _ in range(2))
    other = Lakemap(**QUICK, random_state=1).fit_transform(rows)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_saved_and_loaded_and_pickled_estimators_place_rows_alike(
    digits: tuple[Any, Any], tmp_path: Path
) -> None:
    rows = digits[0][:300]
    fitted = Lakemap(**QUICK).fit(rows)
    fitted.save(tmp_path / "encoder")
    for other in (Lakemap.load(tmp_path / "encoder"), pickle.loads(pickle.dumps(fitted))):
        assert np.array_equal(other.transform(rows), fitted.transform(rows))
        assert other.get_feature_names_out().tolist() == ["lakemap0", "lakemap1"]


def test_it_works_in_a_pipeline(digits: tuple[Any, Any]) -> None:
    rows = digits[0][:300].astype(np.float64)
    places = make_pipeline(StandardScaler(), Lakemap(**QUICK)).fit_transform(rows)
    assert places.shape == (300, 2)


def test_few_rows_have_fewer_neighbors() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 3))
    assert Lakemap(**QUICK).fit_transform(rows).shape == (5, 2)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="objective"):
        Lakemap("pca").fit(np.zeros((10, 2)))  # type: ignore[arg-type]
