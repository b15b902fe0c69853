"""Training and drift as curves: telemetry in, SVG text out."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from pipeline.picture import FAINT, PALETTE, save_figure

MAX_BINS = 400
PLACES = {"pair": PALETTE[1], "layer": PALETTE[4]}


class Bins(NamedTuple):
    """A telemetry column over at most MAX_BINS runs of steps; NaN where no value is finite."""

    step: NDArray[np.float64]
    low: NDArray[np.float64]
    mean: NDArray[np.float64]
    high: NDArray[np.float64]
    n_infinite: int


def draw_curves(telemetry: Mapping[str, NDArray[Any]]) -> str:
    """SVG text of loss, gradient magnitudes and clipped share per step, to put inside a page.

    Columns step and loss are needed; exaggeration, pair_gradient, pair_gradient_after,
    pair_clipped and the same of layer_ are drawn where they are there. No steps, no text.
    """
    if len(telemetry["step"]) == 0:
        return ""
    with mpl.rc_context({"svg.hashsalt": "lakemap", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 8.4), facecolor="white", layout="constrained")
        loss, gradient, clipped = figure.subplots(3, sharex=True, height_ratios=[3, 3, 2])
        _draw_loss(loss, telemetry)
        _draw_gradients(gradient, telemetry)
        _draw_clipped(clipped, telemetry)
        _mark_exaggeration((loss, gradient, clipped), telemetry)
        for axes, name in ((loss, "loss"), (gradient, "largest gradient"), (clipped, "clipped")):
            axes.set_ylabel(name)
            axes.grid(color="#e5e7eb", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.get_legend_handles_labels()[0]:
                # Above the panel, where it hides no curve.
                axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
        figure.align_ylabels()
        clipped.set_xlabel("step")
        return _svg(figure)


def _bin(telemetry: Mapping[str, NDArray[Any]], name: str) -> Bins:
    """The column over runs of steps, so that a million steps make no larger picture."""
    step = np.asarray(telemetry["step"], dtype=np.float64)
    values = np.asarray(telemetry.get(name, np.full(len(step), np.nan)), dtype=np.float64)
    n_infinite = int(np.isinf(values).sum())
    finite = np.isfinite(values)
    values = np.where(finite, values, np.nan)
    n_bins = min(MAX_BINS, len(step))
    starts = np.arange(n_bins) * len(step) // n_bins
    n_finite = np.add.reduceat(finite, starts, dtype=np.float64)
    n_finite[n_finite == 0] = np.nan
    mean = np.add.reduceat(np.where(finite, values, 0), starts) / n_finite
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return Bins(step[starts], low, mean, high, n_infinite)


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The moving average over a twentieth of the values, NaN left out."""
    kernel = np.ones(max(1, len(values) // 20))
    finite = np.isfinite(values)
    weight = np.convolve(finite, kernel, mode="same")
    total = np.convolve(np.where(finite, values, 0), kernel, mode="same")
    return np.where(weight > 0.5, total / np.maximum(weight, 1), np.nan)


def _draw_loss(axes: Axes, telemetry: Mapping[str, NDArray[Any]]) -> None:
    """Nothing; draws the loss, raw in light and smoothed."""
    loss = _bin(telemetry, "loss")
    axes.fill_between(loss.step, loss.low, loss.high, color=PALETTE[0], alpha=0.15, linewidth=0)
    axes.plot(loss.step, loss.mean, color=PALETTE[0], alpha=0.4, linewidth=0.8, label="raw")
    axes.plot(loss.step, _smooth(loss.mean), color=PALETTE[0], linewidth=1.8, label="smoothed")


def _draw_gradients(axes: Axes, telemetry: Mapping[str, NDArray[Any]]) -> None:
    """Nothing; draws the largest gradient of pairs and layers, shaded where a clip cut it off."""
    for place, colour in PLACES.items():
        before = _bin(telemetry, f"{place}_gradient")
        after = _bin(telemetry, f"{place}_gradient_after").high
        acted = _bin(telemetry, f"{place}_clipped").high > 0
        high = np.where(before.high > 0, before.high, np.nan)
        if np.isfinite(high).any():
            infinite = f" ({before.n_infinite:,} infinite)" if before.n_infinite else ""
            label = f"{place}, before clip{infinite}"
            axes.plot(before.step, high, color=colour, linewidth=1, label=label)
            axes.set_yscale("log")
        if (acted & (after > 0)).any():
            limit = float(np.nanmax(after[acted]))
            axes.fill_between(before.step, after, high, color=colour, alpha=0.2, linewidth=0)
            label = f"{place}, after clip at {limit:.3g}"
            axes.axhline(limit, color=colour, linestyle="--", linewidth=1.4, label=label)


def _draw_clipped(axes: Axes, telemetry: Mapping[str, NDArray[Any]]) -> None:
    """Nothing; draws the share of gradient entries that were clipped, mean and largest."""
    for place, colour in PLACES.items():
        share = _bin(telemetry, f"{place}_clipped")
        if (share.high > 0).any():
            axes.fill_between(share.step, 0, share.high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(share.step, share.mean, color=colour, linewidth=1.4, label=place)
    if not axes.lines:
        text = "no clipping on record"
        axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color=FAINT)
    axes.set_ylim(0, None if axes.lines else 1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _mark_exaggeration(panels: Sequence[Axes], telemetry: Mapping[str, NDArray[Any]]) -> None:
    """Nothing; draws a line through all panels where early exaggeration ends, if it does."""
    exaggerated = np.asarray(telemetry.get("exaggeration", [])) > 1
    ends = np.flatnonzero(exaggerated[:-1] & ~exaggerated[1:])
    if ends.size == 0:
        return
    step = float(telemetry["step"][ends[-1] + 1])
    for axes in panels:
        axes.axvline(step, color=FAINT, linestyle=":", linewidth=1)
    across = panels[0].get_xaxis_transform()
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "top"}
    panels[0].annotate("exaggeration ends", (step, 1), xycoords=across, color=FAINT, **place)


def draw_drift(log: Mapping[str, Sequence[Any]]) -> str:
    """SVG text of the drift scores of every refresh that was judged; no text if none was.

    Columns: at, action, novel_share, occupancy_shift, domain_auc.
    """
    judged = [i for i, share in enumerate(log["novel_share"]) if share is not None]
    if not judged:
        return ""
    with mpl.rc_context({"svg.hashsalt": "lakemap", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 2.8), facecolor="white", layout="constrained")
        axes = figure.subplots()
        for colour, name in enumerate(("novel_share", "occupancy_shift", "domain_auc")):
            found = [log[name][i] for i in judged]
            axes.plot(judged, found, marker="o", markersize=4, color=PALETTE[colour], label=name)
        for i in (i for i in judged if log["action"][i] == "retrain"):
            axes.axvline(i, color=FAINT, linestyle=":", linewidth=1)
            axes.annotate("retrained", (i, 1.0), color=FAINT, rotation=90, va="top", ha="right")
        axes.set(ylim=(0, 1.02), xlim=(judged[0] - 0.5, judged[-1] + 0.5))
        step = -(-len(judged) // 12)
        axes.set_xticks(judged[::step], [log["at"][i][:10] for i in judged[::step]])
        axes.grid(color="#e5e7eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    """The figure as SVG text to put inside a page."""
    unwanted = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    text = save_figure(figure, "svg", unwanted).decode()
    return text[text.index("<svg") :]  # the XML prolog is not allowed there
