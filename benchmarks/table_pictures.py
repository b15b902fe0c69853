"""Pictures of the tables."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.lake_to_map import Rows
from benchmarks.table_methods import Found, Places, mean


def draw_maps(pictures: dict[str, dict[str, tuple[Rows, Places]]]) -> Figure:
    """The test rows of every set and method, coloured by label."""
    n_columns = max(len(shown) for shown in pictures.values())
    figure = Figure(figsize=(3 * n_columns, 3 * len(pictures)))
    axes = figure.subplots(len(pictures), n_columns, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for row, (title, shown) in zip(axes, pictures.items(), strict=True):
        for axis, (method, (rows, places)) in zip(row, shown.items(), strict=False):
            axis.scatter(*places.test.T, c=rows.y_test, s=1, cmap="tab20", linewidths=0)
            axis.set_title(f"{title}: {method}", fontsize=8)
    return figure


def draw_earlier(found: Found, printed: dict[str, tuple[float, float]]) -> Figure:
    """Accuracies of training and test rows beside the paper's and openTSNE's."""
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, part, column in zip(axes, ("train", "test"), (0, 1), strict=True):
        bars = {
            "ours": [100 * mean(found[name]["tsne"], f"{part}_nearest") for name in printed],
            "paper": [figures[column] for figures in printed.values()],
        }
        if all("openTSNE" in found[name] for name in printed):
            bars["openTSNE"] = [
                100 * mean(found[name]["openTSNE"], f"{part}_nearest") for name in printed
            ]
        for offset, (title, values) in enumerate(bars.items()):
            places = [place + 0.25 * offset for place in range(len(printed))]
            axis.bar(places, values, 0.25, label=title)
        axis.set_xticks([place + 0.25 for place in range(len(printed))], [*printed])
        axis.set_ylim(70, 105)  # room for the legend
        axis.set_title(f"1-NN accuracy of {part} rows, per cent", fontsize=9)
        axis.legend(fontsize=7, ncols=3, loc="upper left")
    return figure


def draw_study(found: Found) -> Figure:
    """Accuracy and trustworthiness of test rows, and seconds, against what is varied."""
    titles = {
        "test_accuracy": "10-NN, test",
        "test_trustworthiness": "trustworthiness, test",
        "fit_seconds": "fit, s",
    }
    figure = Figure(figsize=(4 * len(found), 8))
    axes = figure.subplots(len(titles), len(found), squeeze=False)
    for column, (name, table) in enumerate(found.items()):
        lines: dict[str, dict[str, Sequence[dict[str, float]]]] = {}
        for value, scores in table.items():
            number, _, method = value.partition(" ")
            lines.setdefault(method, {})[number] = scores
        for axis, (key, title) in zip(axes[:, column], titles.items(), strict=True):
            for method, points in lines.items():
                axis.plot([*points], [mean(s, key) for s in points.values()], "o-", label=method)
            axis.set_title(f"{title} against {name}", fontsize=9)
            axis.tick_params(labelsize=7)
            if len(lines) > 1:
                axis.legend(fontsize=6)
    return figure
