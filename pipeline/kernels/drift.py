"""Whether new rows are like those an encoder was trained on, and how far a map has moved."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

from pipeline.kernels.metrics import neighbor_recall

Counts = NDArray[np.integer[Any]]
Reals = NDArray[np.floating[Any]]

_NULL_DRAWS = 20
_FOLDS = 3


class Displacement(NamedTuple):
    """How far rows have moved, in shares of the map's diameter, and how many neighbours stayed."""

    median: float
    p95: float
    overlap: float


def occupancy_shift(old: Counts, new: Counts, seed: int = 0) -> float:
    """Return how differently two sets of rows fill the tiles of a map, 0 (alike) to 1 (apart).

    old and new are rows per tile, of one shape. It is the Jensen-Shannon distance, less what
    samples of these sizes have by chance: few rows leave many tiles empty, which alone looks like
    a shift. Chance is the most of twenty pairs of samples from both sets together, seeded.
    """
    a, b = old.ravel().astype(np.int64), new.ravel().astype(np.int64)
    n_old, n_new = int(a.sum()), int(b.sum())
    if not n_old or not n_new:
        raise ValueError(f"{n_old} old and {n_new} new rows; both must be there to compare")
    occupied = (a + b) > 0
    a, b = a[occupied], b[occupied]
    together = (a + b) / (n_old + n_new)
    rng = np.random.default_rng(seed)
    drawn_old = rng.multinomial(n_old, together, size=_NULL_DRAWS)
    drawn_new = rng.multinomial(n_new, together, size=_NULL_DRAWS)
    chance = _divergence(drawn_old / n_old, drawn_new / n_new).max()
    found = _divergence(a / n_old, b / n_new)
    return float(np.sqrt(np.clip((found - chance) / (1 - chance), 0, 1)))


def _divergence(p: Reals, q: Reals) -> Any:
    """Return the Jensen-Shannon divergences of the rows of p and q, 0..1 (base 2)."""
    middle = (p + q) / 2
    terms = [
        np.where(
            part > 0,
            part * np.log2(np.where(part > 0, part, 1) / np.where(middle > 0, middle, 1)),
            0,
        )
        for part in (p, q)
    ]
    return (terms[0] + terms[1]).sum(-1) / 2


def domain_auc(old: Reals, new: Reals, seed: int = 0) -> float:
    """Return how well a classifier tells new rows from old ones, 0.5 (not at all) to 1.

    old is (n, d), new (m, d). The area under the ROC curve of a random forest, on rows that it was
    not trained on (three folds); below a half is chance and counts as a half.
    """
    if min(len(old), len(new)) < 2 * _FOLDS:
        raise ValueError(
            f"{len(old)} old and {len(new)} new rows; at least {2 * _FOLDS} of each are needed"
        )
    rows = np.concatenate([old, new])
    is_new = np.arange(len(rows)) >= len(old)
    areas = []
    for train, test in StratifiedKFold(_FOLDS, shuffle=True, random_state=seed).split(rows, is_new):
        # Boosted trees see as much, but use OpenMP, whose threads take 20 times as long on a
        # busy machine.
        model = RandomForestClassifier(50, min_samples_leaf=5, random_state=seed)
        guessed = model.fit(rows[train], is_new[train]).predict_proba(rows[test])[:, 1]
        areas.append(roc_auc_score(is_new[test], guessed))
    return max(float(np.mean(areas)), 0.5)


def displacement(old_xy: Reals, new_xy: Reals, diameter: float, k: int) -> Displacement:
    """Return how far the same rows, (n, 2) on the old and the new map, have moved.

    overlap is the mean share of a row's k nearest rows on the old map that are so on the new one.
    """
    moved = np.linalg.norm(new_xy.astype(np.float64) - old_xy, axis=1) / diameter
    median, p95 = np.quantile(moved, [0.5, 0.95])
    return Displacement(float(median), float(p95), neighbor_recall(old_xy, new_xy, k))
