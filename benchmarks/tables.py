"""The paper's tables: accuracy and trustworthiness of every method, capacity, batch, sample, time.

quality      COIL-20, Fashion-MNIST, MNIST: ours in three objectives, the baselines, the peers
earlier      Letter, MNIST, USPS: t-SNE on training and on test rows
study        hidden units, batch size, training rows, kinds of network, seconds against rows (MNIST)
objectives   MNIST: ours in three objectives on all training rows

Elsewhere every set has at most 10,000 training rows, as in the paper's release, drawn by the seed.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import measure, table_methods, table_pictures
from benchmarks.lake_to_map import Rows
from benchmarks.peers import DISTRIBUTIONS
from benchmarks.table_methods import Found, Places, mean

TABLES = ("quality", "earlier", "study", "objectives")
OBJECTIVES = ("tsne", "largevis", "umap")
PACKAGES = ("lakemap", "torch", "numpy", "scikit-learn", "faiss-cpu", "numba")
QUICK: dict[str, Any] = {"steps": 50, "batch": 256}
ALL = sys.maxsize

# The paper's width, no noise, which it does not have, and the neighbours of UMAP's own paper.
WIDE: dict[str, Any] = {"hidden": 256, "noise": 0.0}
PAPER_SETTINGS = {"tsne": WIDE, "largevis": WIDE, "umap": {**WIDE, "n_neighbors": 15}}
EARLIER_STEPS = 6000  # the paper does not say how many it has
AS_PAPER = ", as the paper"
# Per cent and trustworthiness by the paper, set by set. It does not say how they were measured;
# those of the peers show it: with 1-NN and k=5 on all training rows they come out again.
QUALITY_SETS = ("coil20", "fashion_mnist", "mnist")
PAPER_QUALITY = {
    f"tsne{AS_PAPER}": ((97.1, 0.993), (78.3, 0.989), (93.3, 0.964)),
    f"largevis{AS_PAPER}": ((92.7, 0.983), (67.5, 0.964), (89.6, 0.946)),
    f"umap{AS_PAPER}": ((88.8, 0.987), (69.0, 0.974), (89.1, 0.958)),
    "autoencoder": ((89.7, 0.987), (68.0, 0.977), (82.5, 0.974)),
    "umap-learn": ((91.0, 0.993), (71.9, 0.980), (89.3, 0.962)),
    "openTSNE": ((99.4, 0.998), (79.6, 0.993), (94.3, 0.993)),
}
PAPER_EARLIER = {"letter": (94.3, 79.7), "mnist": (93.4, 87.8), "usps": (96.8, 88.9)}
HIDDEN = (4, 8, 16, 32, 64, 128, 256, 512)
PARTS = ("train", "test")
BATCHES = (64, 128, 256, 512, 1024, 2048)
SAMPLES = (500, 1000, 2000, 5000, 10_000)
SHAPES = {"mnist": (28, 28)}


def main() -> None:
    """Make the tables that were asked for."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--tables", nargs="+", default=TABLES, choices=TABLES)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each of our methods")
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has the peers")
    options = parser.parse_args()
    for name in options.tables:
        bench = Bench(options)
        found, markdown = getattr(bench, name)()
        document = {**bench.facts(), "table": found}
        measure.publish(options, f"table_{name}", document, markdown)


class Bench:
    """One table: what is measured, and on what."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._machine, self._versions = measure.machine(), measure.versions(PACKAGES)
        self._seeds = range(1 if options.quick else options.seeds)
        self._settings = QUICK if options.quick else {}
        self._n_train = table_methods.MOST_TRAINING

    def facts(self) -> dict[str, Any]:
        """Machine, versions, and how the figures came about."""
        return {
            "machine": self._machine,
            "versions": self._versions,
            "quick": self._options.quick,
            "seeds": len(self._seeds),
        }

    def quality(self) -> tuple[Found, str]:
        """Every method on the paper's three sets."""
        found: Found = {}
        pictures: dict[str, dict[str, tuple[Rows, Places]]] = {}
        for name in QUALITY_SETS:
            found[name], pictures[name] = self._compare(name)
        self._save(table_pictures.draw_maps(pictures), "table_quality")
        parts = _quality_tables(found)
        return found, self._page("Accuracy and trustworthiness", parts, QUALITY_NOTES)

    def _compare(self, name: str) -> tuple[dict[str, Any], dict[str, tuple[Rows, Places]]]:
        """All methods on one set; ours for every seed, the others once."""
        found: dict[str, Any] = {}
        shown: dict[str, tuple[Rows, Places]] = {}
        rows = self._load(name, 0)
        for objective in OBJECTIVES:
            run = self._ours(objective=objective)
            found[objective] = self._repeat(name, run, shown, objective)
            title = f"{objective}{AS_PAPER}"
            run = self._ours(objective=objective, **PAPER_SETTINGS[objective])
            found[title] = self._repeat(name, run, shown, title)
        found["autoencoder"] = self._repeat(name, table_methods.autoencoder, shown, "autoencoder")
        for package, title in DISTRIBUTIONS.items():
            measured = table_methods.peer(package, rows, self._options.peers_python)
            if measured is None:
                continue
            places, self._versions[title] = measured
            found[title], shown[title] = [table_methods.score(rows, places)], (rows, places)
            if title == "openTSNE":
                taught = table_methods.supervised(rows, 0, places.train)
                found["supervised"] = [table_methods.score(rows, taught)]
        places = table_methods.pca(rows, 0)
        found["pca"], shown["pca"] = [table_methods.score(rows, places)], (rows, places)
        return found, shown

    def _repeat(
        self,
        name: str,
        run: Callable[[Rows, int], Places],
        shown: dict[str, tuple[Rows, Places]],
        title: str,
    ) -> list[dict[str, float]]:
        """The scores of every seed; the first map is kept for the picture."""
        scores = []
        for seed in self._seeds:
            rows = self._load(name, seed)
            places = run(rows, seed)
            scores.append(table_methods.score(rows, places))
            shown.setdefault(title, (rows, places))
            told = ", ".join(f"{key} {value:.4f}" for key, value in scores[-1].items())
            print(f"{name} {title} seed {seed}: {told}", file=sys.stderr, flush=True)
        return scores

    def earlier(self) -> tuple[Found, str]:
        """t-SNE on the sets of earlier parametric methods, with the paper's settings."""
        found: Found = {}
        for name in PAPER_EARLIER:
            run = self._ours(**PAPER_SETTINGS["tsne"], steps=EARLIER_STEPS)
            found[name] = {"tsne": self._repeat(name, run, {}, "tsne")}
            if peers := self._open_tsne(name):
                found[name]["openTSNE"] = peers
        self._save(table_pictures.draw_earlier(found, PAPER_EARLIER), "table_earlier")
        table = measure.table(*_earlier_table(found))
        return found, self._page("t-SNE on training and on test rows", [table], EARLIER_NOTES)

    def _open_tsne(self, name: str) -> list[dict[str, float]]:
        """What openTSNE reaches on the rows of every seed; nothing where it is not installed."""
        scores = []
        for seed in self._seeds:
            rows = self._load(name, seed)
            measured = table_methods.peer("openTSNE", rows, self._options.peers_python)
            if measured is None:
                return []
            places, self._versions["openTSNE"] = measured
            scores.append(table_methods.score(rows, places))
        return scores

    def objectives(self) -> tuple[Found, str]:
        """The three objectives on all rows of MNIST."""
        self._n_train = ALL
        shown: dict[str, tuple[Rows, Places]] = {}
        found: Found = {
            objective: {
                "mnist": self._repeat("mnist", self._ours(objective=objective), shown, objective)
            }
            for objective in OBJECTIVES
        }
        self._save(table_pictures.draw_maps({"mnist": shown}), "table_objectives")
        head = ["objective", "10-NN, train", "10-NN, test", "trust, train", "trust, test", "fit, s"]
        rows = [
            [
                objective,
                *(_percent(scores["mnist"], f"{part}_accuracy") for part in PARTS),
                *(_number(scores["mnist"], f"{part}_trustworthiness") for part in PARTS),
                f"{mean(scores['mnist'], 'fit_seconds'):.1f}",
            ]
            for objective, scores in found.items()
        ]
        table = measure.table(head, rows)
        return found, self._page("The objectives on all of MNIST", [table], NOTES)

    def _ours(self, **settings: Any) -> Callable[[Rows, int], Places]:
        """Lakemap with these settings."""
        changed = {**settings, **self._settings}
        return lambda rows, seed: table_methods.ours(rows, seed, **changed)

    def study(self) -> tuple[Found, str]:
        """What the map of MNIST depends on."""
        found: Found = {
            "hidden units (mlp)": self._vary(HIDDEN, lambda n: {"network": "mlp", "hidden": n}),
            "batch": self._vary(BATCHES, lambda n: {"batch": n}),
            "network": {
                **self._vary(("residual", "mlp"), lambda kind: {"network": kind}),
                **self._vary(("cnn",), lambda kind: {"network": kind, "shape": SHAPES["mnist"]}),
            },
            "training rows": self._grow(),
        }
        self._save(table_pictures.draw_study(found), "table_study")
        parts = []
        for title, table in found.items():
            head = [title, "10-NN, train", "10-NN, test", "trustworthiness, test", "fit, s"]
            parts += [f"## {title}", "", measure.table(head, _study_rows(table)), ""]
        return found, self._page("What the map of MNIST depends on", parts, STUDY_NOTES)

    def _vary(
        self, values: Iterable[Any], settings: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """t-SNE with each of the values."""
        return {
            str(value): self._repeat("mnist", self._ours(**settings(value)), {}, str(value))
            for value in values
        }

    def _grow(self) -> dict[str, Any]:
        """Ours and the peers on more and more training rows."""
        found: dict[str, Any] = {}
        for n_train in SAMPLES[:2] if self._options.quick else SAMPLES:
            rows = table_methods.load(self._options.data, "mnist", 0, n_train)
            found[f"{n_train:,} tsne"] = [table_methods.score(rows, self._ours()(rows, 0))]
            for package, title in DISTRIBUTIONS.items():
                measured = table_methods.peer(package, rows, self._options.peers_python)
                if measured is not None:
                    found[f"{n_train:,} {title}"] = [table_methods.score(rows, measured[0])]
        return found

    def _load(self, name: str, seed: int) -> Rows:
        if not self._options.quick:
            return table_methods.load(self._options.data, name, seed, self._n_train)
        rows = table_methods.load(self._options.data, name, seed, 1000)
        return rows._replace(x_test=rows.x_test[:500], y_test=rows.y_test[:500])

    def _page(self, title: str, parts: Sequence[str], notes: Sequence[str]) -> str:
        most = "all" if self._n_train == ALL else f"at most {self._n_train:,}"
        lines = [f"# {title}", "", measure.conditions(self._machine, self._versions), ""]
        lines += [f"- {most} training rows, drawn by the seed, and {TEST_ROWS}.", *notes]
        lines.append(f"- seeds: {len(self._seeds)}.")
        if self._options.quick:
            lines += ["", "**A quick run on a few rows: these figures mean nothing.**"]
        return "\n".join([*lines, "", *parts]) + "\n"

    def _save(self, figure: Figure, name: str) -> None:
        """The figure as a PNG beside the other results."""
        folder = self._options.results or (None if self._options.quick else measure.RESULTS)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=100)


TEST_ROWS = f"{table_methods.MOST_TEST:,} test rows; sets without a split: a fifth of the rows"
NOTES = (
    f"- accuracy: {table_methods.K}-NN on the map, per cent; of training rows among the others.",
    f"- trustworthiness: k={table_methods.TRUST_K}, at most {table_methods.TRUST_ROWS:,} rows.",
    "- ours: the defaults.",
)
QUALITY_NOTES = (
    *NOTES,
    f"- paper: as printed there; beside it what it measured: {table_methods.PAPER_K}-NN, and "
    f"trustworthiness with k={table_methods.PAPER_TRUST_K} on all training rows.",
    "- as the paper: ours with 256 columns and no noise; umap with 15 neighbours.",
    "- autoencoder and supervised: our default network, as many steps of as many points.",
    "- peers, supervised and PCA: one run, with the rows of the first seed.",
)
STUDY_NOTES = (*NOTES, "- training rows: one run each, of ours and of the peers.")
EARLIER_NOTES = (
    f"- accuracy: {table_methods.PAPER_K}-NN on the map, per cent; of training rows among the "
    "others.",
    "- paper: as printed there.",
    f"- ours: with 256 columns and no noise, as in the paper, and {EARLIER_STEPS:,} steps.",
    "- openTSNE: as it comes, on the same rows.",
)


def _earlier_table(found: Found) -> tuple[list[str], list[list[str]]]:
    """Head and rows: every set's training and test rows, ours, the paper's and openTSNE's."""
    head = ["set", *(f"{part}, {who}" for part in PARTS for who in ("ours", "paper", "openTSNE"))]
    rows = []
    for name, printed in PAPER_EARLIER.items():
        cells = [name]
        for part, figure in zip(PARTS, printed, strict=True):
            peers = found[name].get("openTSNE")
            cells += [_percent(found[name]["tsne"], f"{part}_nearest"), f"{figure}"]
            cells.append(_percent(peers, f"{part}_nearest") if peers else "")
        rows.append(cells)
    return head, rows


def _quality_tables(found: Found) -> list[str]:
    parts: list[str] = []
    head = ["method", "10-NN, train", "10-NN, test", "trust, train", "trust, test"]
    head += ["1-NN, train", "paper", "trust k=5, train", "paper", "fit, s"]
    for name, methods in found.items():
        rows = []
        for method, scores in methods.items():
            paper = dict(zip(QUALITY_SETS, PAPER_QUALITY.get(method, ()), strict=False))
            accuracy, trust = paper.get(name, ("", ""))
            rows.append(
                [
                    method,
                    _percent(scores, "train_accuracy"),
                    _percent(scores, "test_accuracy"),
                    _number(scores, "train_trustworthiness"),
                    _number(scores, "test_trustworthiness"),
                    _percent(scores, "train_nearest"),
                    f"{accuracy}",
                    _number(scores, "train_paper_trustworthiness"),
                    f"{trust}",
                    f"{mean(scores, 'fit_seconds'):.1f}",
                ]
            )
        parts += [f"## {name}", "", measure.table(head, rows), ""]
    return parts


def _study_rows(table: dict[str, Any]) -> list[list[str]]:
    return [
        [
            value,
            _percent(scores, "train_accuracy"),
            _percent(scores, "test_accuracy"),
            _number(scores, "test_trustworthiness"),
            f"{mean(scores, 'fit_seconds'):.1f}",
        ]
        for value, scores in table.items()
    ]


def _percent(scores: Sequence[dict[str, float]], key: str) -> str:
    return _with_spread([100 * found[key] for found in scores], 1)


def _number(scores: Sequence[dict[str, float]], key: str) -> str:
    return _with_spread([found[key] for found in scores], 3)


def _with_spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    main()
