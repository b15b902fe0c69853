"""The picture of a map before and after a retraining, and the curve of drift."""

import io
from typing import Any

import numpy as np
from matplotlib.image import imread
from numpy.typing import NDArray

from pipeline.curves import draw_drift
from pipeline.moved import draw_moved, keep_colours
from pipeline.picture import OTHER_NAME, PALETTE, Raster

UNIT = (0.0, 1.0, 0.0, 1.0)
NO_WAYS = np.empty((0, 4), np.float32)


def raster(row: int, names: tuple[str, ...] = ("a", "b"), filled: int = 0) -> Raster:
    """A block of rows of one category, at that height of 20."""
    counts = np.zeros((len(names), 20, 20), np.int64)
    counts[filled, row : row + 3, 8:12] = 50
    return Raster(counts, names, UNIT, 0)


def halves(png: bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The colours of the left and the right map."""
    pixels: NDArray[np.float32] = imread(io.BytesIO(png), format="png")[60:, :, :3]
    return pixels[:, :720], pixels[:, 720:]


def coloured(pixels: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Where the picture is neither white, grey nor black."""
    return np.asarray(np.ptp(pixels, axis=-1) > 0.2)


def test_a_label_keeps_its_colour_and_new_ones_come_after() -> None:
    """A new label that sorts before the others would take the first one's colour."""
    kept = keep_colours(raster(2, ("a", "c", "z", OTHER_NAME), filled=1), ("b", "c", OTHER_NAME))
    assert kept.categories == ("b", "c", "a", "z", OTHER_NAME)
    assert kept.counts.sum(axis=(1, 2)).tolist() == [0, 600, 0, 0, 0]


def test_labels_without_rows_give_way_to_new_ones_when_colours_run_out() -> None:
    earlier = tuple(f"old {i}" for i in range(len(PALETTE)))
    assert keep_colours(raster(2, ("new", "old 3")), earlier).categories == ("old 3", "new")


def test_without_labels_there_is_nothing_to_keep() -> None:
    for names, earlier in ((("",), ("a",)), (("a", "b"), ("",))):
        given = raster(2, names)
        assert keep_colours(given, earlier) is given


def test_both_maps_are_shown_in_one_frame() -> None:
    png = draw_moved(raster(2), raster(15), NO_WAYS)
    assert png == draw_moved(raster(2), raster(15), NO_WAYS)
    low, high = (np.nonzero(coloured(half))[0].mean() for half in halves(png))
    assert low - high > 200  # pixels count from the top


def test_ways_are_drawn_on_the_new_map_alone() -> None:
    ways = np.array([[0.1, 0.1, 0.9, 0.1]], np.float32)
    plain, drawn = (draw_moved(raster(5), raster(5), found) for found in (NO_WAYS, ways))
    changed = [(a != b).any() for a, b in zip(halves(plain), halves(drawn), strict=True)]
    assert changed == [False, True]


def test_a_label_has_one_colour_on_both_whatever_its_place_in_the_list() -> None:
    png = draw_moved(raster(5), raster(5, ("b", "c", "a"), filled=2), NO_WAYS)
    left, right = (half[coloured(half)] for half in halves(png))
    assert np.abs(left.mean(axis=0) - right.mean(axis=0)).max() < 0.02
    other = draw_moved(raster(5), raster(5, filled=1), NO_WAYS)
    left, right = (half[coloured(half)] for half in halves(other))
    assert np.abs(left.mean(axis=0) - right.mean(axis=0)).max() > 0.1


def make_log(**columns: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        "at": ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"],
        "action": ["refresh", "retrain"],
        "novel_share": [0.01, 0.4],
        "occupancy_shift": [0.1, 0.6],
        "domain_auc": [0.5, 0.9],
    }
    return found | columns


def test_the_curve_of_drift_shows_every_night_that_was_judged() -> None:
    svg = draw_drift(make_log())
    for text in ("2026-01-01", "2026-01-02", "retrained", "novel_share", "domain_auc"):
        assert text in svg
    svg = draw_drift(make_log(novel_share=[0.01, None]))
    assert "2026-01-02" not in svg
    assert "retrained" not in svg
    assert not draw_drift(make_log(novel_share=[None, None]))
