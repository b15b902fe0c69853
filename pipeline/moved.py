"""A map before and after a retraining: two rasters and the ways of some rows in, PNG bytes out."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipeline.picture import (
    DPI,
    FONT,
    INK,
    OTHER_NAME,
    PALETTE,
    Raster,
    paint,
    save_figure,
)

WIDTH, HEIGHT = 1440, 780
ARROWS = 400


def draw_moved(old: Raster, new: Raster, ways: NDArray[np.float32]) -> bytes:
    """PNG of both maps in one frame, arrows on the new one for some of the rows that are on both.

    ways is (n, 4): x and y on the old map, then on the new one.
    """
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor="white")
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.93, wspace=0.02)
    extents = np.array([old.extent, new.extent])
    low, high = extents[:, ::2].min(axis=0), extents[:, 1::2].max(axis=0)
    for axes, raster, title in zip(panels, _alike(old, new), ("before", "after"), strict=True):
        paint(axes, raster)
        axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        axes.set_title(title, family=FONT, size=14, color=INK, weight="bold")
    some = ways[:: max(1, -(-len(ways) // ARROWS))]
    way = some[:, 2:] - some[:, :2]
    panels[1].quiver(
        *(some[:, 0], some[:, 1], way[:, 0], way[:, 1]),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.002,
        color=INK,
    )
    return save_figure(figure, "png", {"Software": None})


def keep_colours(raster: Raster, earlier: tuple[str, ...]) -> Raster:
    """The raster with its categories where an earlier map had them: a label keeps its colour.

    Those that have no rows any more keep their place too, while there are colours for all.
    """
    if ("",) in (raster.categories, earlier):
        return raster
    known = [name for name in earlier if name != OTHER_NAME]
    others = [name for name in raster.categories if name == OTHER_NAME]
    new = [name for name in raster.categories if name not in (*known, *others)]
    if len(known) + len(new) > len(PALETTE):
        known = [name for name in known if name in raster.categories]
    return _with(raster, (*known, *new, *others))


def _alike(old: Raster, new: Raster) -> tuple[Raster, Raster]:
    """Both rasters with the same categories in the same order, so that a label has one colour."""
    if ("",) in (old.categories, new.categories):
        both = [
            raster._replace(counts=raster.counts.sum(axis=0, keepdims=True), categories=("",))
            for raster in (old, new)
        ]
        return both[0], both[1]
    names = (*old.categories, *(name for name in new.categories if name not in old.categories))
    return _with(old, names), _with(new, names)


def _with(raster: Raster, names: tuple[str, ...]) -> Raster:
    counts = np.zeros((len(names), *raster.counts.shape[1:]), np.int64)
    counts[[names.index(name) for name in raster.categories]] = raster.counts
    return raster._replace(counts=counts, categories=names)
