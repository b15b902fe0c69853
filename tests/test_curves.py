import re
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline import curves
from pipeline.curves import draw_curves


def make_telemetry(n_steps: int = 300) -> dict[str, NDArray[np.float64]]:
    rng = np.random.default_rng(0)
    step = np.arange(n_steps, dtype=np.float64)
    columns = {name: rng.uniform(1, 2, n_steps) for name in ("loss", "learning_rate")}
    for place in ("pair", "layer"):
        columns[f"{place}_gradient"] = rng.lognormal(size=n_steps)
        columns[f"{place}_clipped"] = np.zeros(n_steps)
    return {"step": step, "exaggeration": np.where(step < 100, 4.0, 1.0), **columns}


def read_texts(svg: str) -> list[str]:
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()).strip() for node in found]


def test_curves_are_equal_for_equal_telemetry_and_stand_alone() -> None:
    svg = draw_curves(make_telemetry())
    assert svg == draw_curves(make_telemetry())
    assert svg.startswith("<svg")
    assert not re.search(r"(?:href|src)=\"(?!#)", svg)
    assert "<metadata" not in svg


def test_curves_say_what_was_recorded() -> None:
    texts = read_texts(draw_curves(make_telemetry()))
    for text in ("loss", "largest gradient", "clipped", "step", "exaggeration ends"):
        assert text in texts
    assert "no clipping on record" in texts
    assert "pair, before clip" in texts


def test_a_clip_that_acted_shows_its_threshold() -> None:
    telemetry = make_telemetry()
    gradient = telemetry["layer_gradient"]
    telemetry["layer_gradient_after"] = np.minimum(gradient, 2)
    telemetry["layer_clipped"] = np.where(gradient > 2, 0.01, 0.0)
    telemetry["pair_gradient"][3] = np.inf
    texts = read_texts(draw_curves(telemetry))
    assert "layer, after clip at 2" in texts
    assert "pair, before clip (1 infinite)" in texts
    assert "no clipping on record" not in texts


def test_exaggeration_that_never_ends_is_not_marked() -> None:
    telemetry = make_telemetry() | {"exaggeration": np.full(300, 4.0)}
    assert "exaggeration ends" not in read_texts(draw_curves(telemetry))


@pytest.mark.parametrize("n_steps", [1, 2, 100_000])
def test_curves_have_a_bounded_size(n_steps: int) -> None:
    telemetry = make_telemetry(n_steps)
    telemetry["loss"][0] = np.nan
    assert len(draw_curves(telemetry)) < 300_000


def test_no_steps_give_no_curves() -> None:
    assert draw_curves({"step": np.empty(0), "loss": np.empty(0)}) == ""


def test_bins_keep_extremes_and_mean() -> None:
    values = np.arange(1_000.0)
    values[7] = np.nan
    bins = curves._bin({"step": np.arange(1_000.0), "loss": values}, "loss")
    assert len(bins.step) <= curves.MAX_BINS
    assert (bins.low[0], bins.high[-1]) == (0, 999)
    assert bins.mean[0] == pytest.approx(np.mean([0, 1]), abs=0.6)
