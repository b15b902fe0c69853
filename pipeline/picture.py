"""The map as a picture: rows per pixel in, PNG bytes out."""

import io
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

DPI = 100
WIDTH, HEIGHT = 1440, 1200
MAP_LEFT, MAP_BOTTOM, MAP_SIDE = 24, 64, 1076
LEGEND_LEFT, LEGEND_RIGHT, LEGEND_LINE = 1128, 1416, 30
LINE = 24 / MAP_SIDE  # height of a name on the map
FONT = "DejaVu Sans"
OTHER_NAME = "(other)"  # a category of this name is what its maker had no name for
INK, FAINT, OTHER = "#22262b", "#6b7280", "#a8adb4"
# Ten that differ most first, none so light that it is lost on white, no grey: that is "other".
PALETTE = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#8c5fc4", "#8c564b", "#e66fb8", "#17becf"),
    *("#b5a900", "#1b3a6b", "#7a0f3c", "#00796b", "#f4b183", "#8fd13f", "#b8a6e8", "#4b3fd1"),
    *("#c2187f", "#ffcb2e", "#5a5410", "#45d6a4"),
)
DENSITY = ("#bfd8ee", "#62a8d3", "#2171b5", "#08306b")
# Opacity of the emptiest pixel that holds a row: a lone row must be seen, a crowd stand out.
FAINTEST = 0.35


class Raster(NamedTuple):
    """Rows per category and pixel: counts (C, H, W), row 0 at the bottom, over x0, x1, y0, y1.

    Without labels there is one category, named "".
    """

    counts: NDArray[np.integer[Any]]
    categories: tuple[str, ...]
    extent: tuple[float, float, float, float]
    n_outside: int


class Group(NamedTuple):
    """What is drawn in one colour: counts (H, W) of one category, or of all the small ones."""

    name: str
    colour: str
    counts: NDArray[np.integer[Any]]
    n_rows: int


class Scale(NamedTuple):
    """How many rows per pixel (levels, rising) give which share of full colour (shares)."""

    levels: NDArray[np.float64]
    shares: NDArray[np.float64]


def rasterize(
    xy: NDArray[np.float32],
    codes: NDArray[np.integer[Any]],
    n_categories: int,
    extent: tuple[float, float, float, float],
    pixels: int,
) -> NDArray[np.uint32]:
    """Rows per category and pixel, (n_categories, pixels, pixels) uint32, row 0 at the bottom.

    Rows outside the extent, or not finite, are not counted.
    """
    if codes.size and not 0 <= codes.min() <= codes.max() < n_categories:
        raise ValueError(f"codes are {codes.min()}..{codes.max()}, need 0..{n_categories - 1}")
    x0, x1, y0, y1 = extent
    x, y = xy[:, 0].astype(np.float64), xy[:, 1].astype(np.float64)
    # NaN compares false, so rows that are not finite fall out here.
    inside = (x >= x0) & (x <= x1) & (y >= y0) & (y <= y1)
    column = np.minimum(((x[inside] - x0) / (x1 - x0) * pixels).astype(np.int64), pixels - 1)
    row = np.minimum(((y[inside] - y0) / (y1 - y0) * pixels).astype(np.int64), pixels - 1)
    place, code = row * pixels + column, codes[inside]
    counts = np.empty((n_categories, pixels * pixels), dtype=np.uint32)
    # One category at a time: bincount is int64, and all at once would triple the memory.
    for category in range(n_categories):
        counts[category] = np.bincount(place[code == category], minlength=pixels * pixels)
    return counts.reshape(n_categories, pixels, pixels)


def draw_map(raster: Raster, title: str) -> bytes:
    """PNG of the map, 1440 by 1200 pixels; equal rasters give equal bytes."""
    figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, facecolor="white")
    axes = figure.add_axes(_rectangle(MAP_LEFT, MAP_BOTTOM, MAP_SIDE, MAP_SIDE))
    groups, scale, radius = paint(axes, raster)
    n_rows = sum(group.n_rows for group in groups)
    if raster.categories != ("",):
        _draw_legend(figure, groups)
        if len(raster.categories) <= len(PALETTE):
            _draw_names(axes, groups)
    elif n_rows:
        _draw_bar(figure, scale, radius)
    _write(figure, MAP_LEFT, HEIGHT - 36, _shorten(title, 90), size=17, weight="bold")
    _write(figure, MAP_LEFT, 32, _caption(n_rows, raster.n_outside), size=11, color=FAINT)
    return save_figure(figure, "png", {"Software": None})


def paint(axes: Axes, raster: Raster) -> tuple[list[Group], Scale, int]:
    """What was painted on the axes: groups, the scale of shades, the radius rows were spread by."""
    groups = _group_categories(raster)
    mixed, radius = _mix(groups)
    scale = _equalize(mixed[..., 3])
    has_labels = raster.categories != ("",)
    image = _tint(mixed, scale) if has_labels else _shade(mixed[..., 3], scale)
    axes.imshow(
        image, origin="lower", extent=raster.extent, interpolation="bilinear", aspect="equal"
    )
    _frame(axes)
    return groups, scale, radius


def _rectangle(
    left: float, bottom: float, width: float, height: float
) -> tuple[float, float, float, float]:
    """The place in pixels as shares of the figure."""
    return left / WIDTH, bottom / HEIGHT, width / WIDTH, height / HEIGHT


def _write(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    """Nothing; writes text at pixel x, y."""
    # A name with dollar signs is a name, not mathematics.
    style = {"family": FONT, "color": INK, "va": "center", "parse_math": False, **style}
    figure.text(x / WIDTH, y / HEIGHT, text, **style)


def _shorten(text: str, n_characters: int) -> str:
    """Text on one line, printable, at most n_characters long."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    clean = " ".join(clean.split())
    return clean if len(clean) <= n_characters else clean[: n_characters - 1].rstrip() + "…"


def _caption(n_rows: int, n_outside: int) -> str:
    """The line below the map."""
    outside = f", {n_outside:,} more outside the frame" if n_outside else ""
    return f"{n_rows:,} rows{outside}. The axes have no unit: near rows are alike."


def _group_categories(raster: Raster) -> list[Group]:
    """Groups in the given order; beyond twenty the twenty largest by size, then the others."""
    n_rows = raster.counts.sum(axis=(1, 2), dtype=np.int64)
    n_colours = len(PALETTE)
    order = np.array([i for i, name in enumerate(raster.categories) if name != OTHER_NAME], int)
    if len(order) > n_colours:
        order = order[np.argsort(-n_rows[order], kind="stable")]
    groups = [
        Group(raster.categories[i], colour, raster.counts[i], int(n_rows[i]))
        for i, colour in zip(order[:n_colours], PALETTE, strict=False)
    ]
    rest = np.setdiff1d(np.arange(len(n_rows)), order[:n_colours])
    if rest.size:
        counts = raster.counts[rest].sum(axis=0, dtype=np.int64)
        name = "others" if OTHER_NAME in raster.categories else f"{rest.size:,} others"
        groups.append(Group(name, OTHER, counts, int(n_rows[rest].sum())))
    return groups


def _mix(groups: Sequence[Group]) -> tuple[NDArray[np.float64], int]:
    """Sum over groups of (colour, 1) times rows, (H, W, 4), and the radius rows were spread by."""
    mixed = np.zeros((*groups[0].counts.shape, 4))
    for group in groups:
        # Squares, because eyes mix light, and stored colours are about its square root.
        colour = np.square(to_rgb(group.colour))
        mixed += group.counts[..., None] * np.append(colour, 1.0)
    radius = _choose_radius(mixed[..., 3] > 0)
    return _spread(mixed, radius), radius


def _choose_radius(occupied: NDArray[np.bool_]) -> int:
    """The radius in pixels that makes a sparse picture half full where it has rows, at most 4.

    A lone pixel out of a million cannot be seen; the idea is datashader's dynspread.
    """
    if not occupied.any():
        return 0
    window = 15
    sums = np.pad(occupied, window // 2 + 1).astype(np.int64).cumsum(0).cumsum(1)
    near = sums[window:, window:] - sums[:-window, window:] - sums[window:, :-window]
    near = (near + sums[:-window, :-window])[: occupied.shape[0], : occupied.shape[1]]
    density = float((near[occupied] - 1).mean()) / (window**2 - 1)
    largest = round(4 * max(occupied.shape) / MAP_SIDE)
    sizes = [len(_disc(radius)) for radius in range(largest + 1)]
    return next((r for r, size in enumerate(sizes) if size * density >= 0.5), largest)


def _disc(radius: int) -> list[tuple[int, int]]:
    """Offsets (row, column) of the pixels of a disc."""
    side = range(-radius, radius + 1)
    return [(i, j) for i in side for j in side if i * i + j * j <= radius * (radius + 0.8)]


def _spread(image: NDArray[np.float64], radius: int) -> NDArray[np.float64]:
    """The image with every pixel added to the disc around it."""
    if radius == 0:
        return image
    height, width, _ = image.shape
    padded = np.pad(image, ((radius, radius), (radius, radius), (0, 0)))
    spread = np.zeros_like(image)
    for i, j in _disc(radius):
        spread += padded[radius + i : radius + i + height, radius + j : radius + j + width]
    return spread


def _equalize(counts: NDArray[np.float64]) -> Scale:
    """The scale that uses all shades, whatever the number of rows.

    Half histogram equalisation, which shows structure at any density, half logarithm, which
    keeps the order of magnitude readable.
    """
    levels, n_pixels = np.unique(counts[counts > 0], return_counts=True)
    if levels.size == 0:
        return Scale(np.ones(1), np.ones(1))
    ranks = np.cumsum(n_pixels) / n_pixels.sum()
    logs = np.log1p(levels) / np.log1p(levels[-1])
    return Scale(levels, (ranks + logs) / 2)


def _tint(mixed: NDArray[np.float64], scale: Scale) -> NDArray[np.float64]:
    """The picture (H, W, 3) on white: hue from the mix of categories, opacity from the rows."""
    total = mixed[..., 3:]
    colour = np.sqrt(mixed[..., :3] / np.maximum(total, 1))
    share = np.interp(total, scale.levels, scale.shares)
    opacity = np.where(total > 0, FAINTEST + (1 - FAINTEST) * share, 0)
    tinted: NDArray[np.float64] = 1 - opacity * (1 - colour)
    return tinted


def _shade(total: NDArray[np.float64], scale: Scale) -> NDArray[np.float64]:
    """The picture (H, W, 3) on white: one hue, darker where there are more rows."""
    shaded = _density_colour(np.interp(total, scale.levels, scale.shares))
    return np.where(total[..., None] > 0, shaded, 1.0)


def _density_colour(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Colours (..., 3) of the shares of full density."""
    stops = np.array([to_rgb(colour) for colour in DENSITY])
    places = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(share, places, channel) for channel in stops.T], axis=-1)


def _frame(axes: Axes) -> None:
    """Nothing; leaves a thin frame and no ticks, as coordinates have no meaning."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color="#d1d5db", linewidth=0.8)


def _draw_legend(figure: Figure, groups: Sequence[Group]) -> None:
    """Nothing; lists colour, name and rows of each group right of the map."""
    top = MAP_BOTTOM + MAP_SIDE - 12
    _write(figure, LEGEND_RIGHT, top, "rows", size=11, color=FAINT, ha="right")
    for i, group in enumerate(groups, start=1):
        y = top - i * LEGEND_LINE
        swatch = _rectangle(LEGEND_LEFT, y - 8, 16, 16)
        figure.add_artist(Rectangle(swatch[:2], *swatch[2:], color=group.colour, linewidth=0))
        rows = f"{group.n_rows:,}"
        name = _shorten(group.name, 28 - len(rows)) or "(no name)"
        _write(figure, LEGEND_LEFT + 26, y, name, size=11)
        _write(figure, LEGEND_RIGHT, y, rows, size=11, ha="right")


def _densest_place(counts: NDArray[np.integer[Any]]) -> tuple[float, float]:
    """Where to name most rows, x and y as shares of the picture: amid those near the fullest tile.

    A crowd smaller than its name would be hidden by it, so the name goes above.
    """
    height, width = counts.shape
    tile = max(1, min(height, width) // 24)
    rows, columns = np.nonzero(counts)
    weights = counts[rows, columns].astype(np.float64)
    n_tiles = width // tile + 1
    tiles = np.bincount(rows // tile * n_tiles + columns // tile, weights=weights)
    row, column = np.divmod(int(tiles.argmax()), n_tiles)
    near = (abs(rows // tile - row) <= 1) & (abs(columns // tile - column) <= 1)
    x = np.average(columns[near], weights=weights[near])
    y = np.average(rows[near], weights=weights[near])
    spread = float(np.sqrt(np.average((rows[near] - y) ** 2, weights=weights[near]))) / height
    above = 2 * spread + LINE / 2 if spread < LINE / 2 else 0.0
    return (float(x) + 0.5) / width, (float(y) + 0.5) / height + above


def _draw_names(axes: Axes, groups: Sequence[Group]) -> None:
    """Nothing; names each group at its densest place, the largest first."""
    style: dict[str, Any] = {"family": FONT, "size": 14, "weight": "bold", "color": INK}
    style |= {"transform": axes.transAxes, "ha": "center", "va": "center", "parse_math": False}
    placed: list[tuple[float, float, float]] = []
    for group in sorted(groups, key=lambda group: -group.n_rows):
        name = _shorten(group.name, 18)
        if group.n_rows and name:
            placed.append(_find_room(*_densest_place(group.counts), len(name), placed))
            halo = [withStroke(linewidth=4, foreground="white")]
            axes.text(*placed[-1][:2], name, path_effects=halo, **style)


def _find_room(
    x: float, y: float, n_characters: int, placed: Sequence[tuple[float, float, float]]
) -> tuple[float, float, float]:
    """Centre and half width of a name near x, y that hides no name already placed."""
    half = n_characters * 5.5 / MAP_SIDE
    x = min(max(x, half), 1 - half)
    for step in (0, 1, -1, 2, -2, 3, -3):
        low = min(max(y + step * LINE, LINE / 2), 1 - LINE / 2)
        if all(abs(x - a) > half + c or abs(low - b) >= 0.9 * LINE for a, b, c in placed):
            return x, low, half
    return x, y, half


def _choose_ticks(scale: Scale) -> list[float]:
    """Levels to write beside the bar: both ends, and the powers of ten that have room."""
    powers = 10.0 ** np.arange(1, np.ceil(np.log10(scale.levels[-1])))
    chosen = [float(scale.levels[-1])]
    gap = 0.05 * (1 - scale.shares[0])
    for level in (float(scale.levels[0]), *powers):
        places = np.interp([level, *chosen], scale.levels, scale.shares)
        if np.abs(places[1:] - places[0]).min() > gap:
            chosen.append(level)
    return sorted(chosen)


def _draw_bar(figure: Figure, scale: Scale, radius: int) -> None:
    """Nothing; draws the colour bar right of the map."""
    axes = figure.add_axes(_rectangle(LEGEND_LEFT + 4, MAP_BOTTOM + MAP_SIDE - 440, 24, 400))
    low = float(scale.shares[0]) if scale.levels.size > 1 else 0.0
    shades = _density_colour(np.linspace(low, 1, 256))
    axes.imshow(shades[:, None], origin="lower", extent=(0, 1, low, 1), aspect="auto")
    _frame(axes)
    ticks = _choose_ticks(scale)
    places = np.interp(ticks, scale.levels, scale.shares)
    axes.set_yticks(places, [f"{level:,.0f}" for level in ticks], family=FONT, size=11, color=INK)
    axes.yaxis.tick_right()
    text = "rows per pixel" if radius == 0 else f"rows within {radius} px"
    _write(figure, LEGEND_LEFT + 4, MAP_BOTTOM + MAP_SIDE - 16, text, size=12)


def save_figure(figure: Figure, kind: str, metadata: dict[str, str | None]) -> bytes:
    """The figure as a file of that kind."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script the font lacks gets boxes on the map; the rest is still worth it.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return buffer.getvalue()
