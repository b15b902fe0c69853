"""What the two clips do: every objective with neither, one or both of them, on MNIST.

The papers' own batches are used, without epsilon: where two points meet, the gradient of LargeVis
and UMAP is infinite, so the place that clipping was made for is there. The picture shows the
largest gradient of every step, before and after the clip.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks import measure, table_methods
from benchmarks.lake_to_map import Rows
from benchmarks.table_methods import Places
from encoders.fit import DivergedError
from pipeline.config import EncoderConfig, InputConfig, Job, NeighborsConfig, TrainConfig
from pipeline.estimator import train_encoder
from pipeline.graph import find_neighbors, join_graph
from pipeline.stages import cells

PACKAGES = ("lakemap", "torch", "numpy", "scikit-learn")
NEVER = 1e30
QUICK_STEPS = 60


class Case(NamedTuple):
    """An objective in its paper's batches, and the thresholds that are tried."""

    objective: str
    batches: str
    pairwise: float
    layer: float


CASES = (
    Case("tsne", "points", 16.0, 1.0),
    Case("tsne", "edges", 16.0, 1.0),
    Case("largevis", "negatives", 16.0, 1.0),
    Case("umap", "negatives", 16.0, 1.0),
)
CLIPS = {
    "none": (False, False),
    "pairwise": (True, False),
    "layer": (False, True),
    "both": (True, True),
}


def main() -> None:
    """Train every case with every choice of clips."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    options = parser.parse_args()
    facts = measure.machine()
    rows = table_methods.load(options.data, "mnist", 0, 1000 if options.quick else 10_000)
    found: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    for case in CASES:
        name = f"{case.objective}, {case.batches}"
        for clips, (pairwise, layer) in CLIPS.items():
            job = make_job(case, pairwise, layer, options.quick)
            found[f"{name}: {clips}"], telemetry = run(rows, job)
            if clips in ("none", "both"):
                curves[f"{name}: {clips}"] = telemetry
            print(f"{name}: {clips}: {found[f'{name}: {clips}']}", file=sys.stderr, flush=True)
    document = {"machine": facts, "versions": measure.versions(PACKAGES), "runs": found}
    folder = options.results or (None if options.quick else measure.RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw(curves, folder / "clipping.png")
    measure.publish(options, "clipping", document, report(document, options.quick))


def make_job(case: Case, pairwise: bool, layer: bool, quick: bool) -> Job:
    """The paper's network on the case's objective."""
    train = TrainConfig(
        objective=case.objective,  # type: ignore[arg-type]
        batches=case.batches,  # type: ignore[arg-type]
        encoder=EncoderConfig("mlp", hidden=256),
        epsilon=0.0,
        clip_pairwise=case.pairwise if pairwise else NEVER,
        clip_layer=case.layer if layer else NEVER,
        steps=3000,
        batch=1024,
        learning_rate=3e-3,
        exaggerated_share=0.3,
    )
    if quick:
        train = replace(train, steps=QUICK_STEPS, batch=256)
    return Job(InputConfig("memory"), "memory", neighbors=NeighborsConfig(), train=train)


def run(rows: Rows, job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """The map's figures, or the step at which the training ended; and its telemetry."""
    neighbors = find_neighbors(rows.x_train, cells.settings(job))
    perplexity = job.affinity.perplexity if job.affinity_kind == "gaussian" else None
    try:
        encoder, telemetry = train_encoder(rows.x_train, join_graph(neighbors, perplexity), job)
    except DivergedError as error:
        return {"diverged": str(error).split(", caused")[0]}, {}
    places = Places(encoder.embed(rows.x_train), encoder.embed(rows.x_test), 0.0)
    scores = table_methods.score(rows, places)
    return {
        "accuracy": scores["test_accuracy"],
        "trustworthiness": scores["test_trustworthiness"],
        "largest_pair_gradient": float(telemetry["pair_gradient"].max()),
        "largest_layer_gradient": float(telemetry["layer_gradient"].max()),
        "pair_clipped": float(telemetry["pair_clipped"].mean()),
        "layer_clipped": float(telemetry["layer_clipped"].mean()),
    }, telemetry


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
    """The largest gradients of every step, before and after the clip, on a logarithmic scale."""
    names = list(dict.fromkeys(name.split(": ")[0] for name in curves))
    figure = Figure(figsize=(4 * len(names), 6))
    axes = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        for axis, place in zip(axes[:, column], ("pair", "layer"), strict=True):
            telemetry = curves[f"{name}: both"] or curves[f"{name}: none"]
            if telemetry:
                for part, label in ((f"{place}_gradient", "before"), ("after", "after")):
                    key = part if part != "after" else f"{place}_gradient_after"
                    values = np.minimum(telemetry[key], 1e30)
                    axis.semilogy(telemetry["step"], values, lw=0.6, label=label)
            axis.set_title(f"{name}: {place}", fontsize=9)
            axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def report(document: dict[str, Any], quick: bool) -> str:
    """The runs as Markdown."""
    head = ["objective, batches: clips", "10-NN, test", "trustworthiness"]
    head += ["largest dL/d(pair)", "largest dL/d(weight)", "pairs cut", "weights cut"]
    rows = []
    for name, found in document["runs"].items():
        if "diverged" in found:
            rows.append([name, found["diverged"], "", "", "", "", ""])
            continue
        sizes = [found["largest_pair_gradient"], found["largest_layer_gradient"]]
        rows.append(
            [
                name,
                f"{found['accuracy']:.4f}",
                f"{found['trustworthiness']:.4f}",
                *("infinite" if math.isinf(size) else f"{size:.3g}" for size in sizes),
                f"{found['pair_clipped']:.2%}",
                f"{found['layer_clipped']:.2%}",
            ]
        )
    lines = ["# What the two clips do", ""]
    lines += [measure.conditions(document["machine"], document["versions"]), "", *NOTES]
    if quick:
        lines += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    return "\n".join([*lines, "", measure.table(head, rows)]) + "\n"


NOTES = (
    "- MNIST, 10,000 training rows, 10,000 test rows, the paper's mlp, one seed, epsilon 0.",
    "- clips: layer at 1; pairwise at 16, in units of one point's own loss: dL/dy of a point for "
    "tsne, dL/dd² of a pair for largevis and umap.",
)


if __name__ == "__main__":
    main()
