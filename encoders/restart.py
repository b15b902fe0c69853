"""What a training starts from: nothing, or an earlier encoder whose map should stay in place."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from encoders.artifact import Encoder
from encoders.fit import Anchors
from encoders.networks import NetworkConfig
from encoders.preprocessing import Array, Preprocessing, PreprocessingConfig, fit_preprocessing
from encoders.reference import Reference, diameter

# Measured on digits, with and without a new one among them. More pull moves rows less (100: half a
# hundredth of the map) but leaves new clusters less room; rows of a new cluster that look
# familiar must not be held either, and at 0.99 a third of them would be.
PULL = 100.0
LANDMARK_NOVELTY = 0.8
# More rows off the plane of the components than this, and new ones are found: a network that
# cannot see what makes rows new cannot give them a place.
MOST_OFF_PLANE = 0.01


class Start(NamedTuple):
    """What a training starts from; without weights they are drawn."""

    preprocessing: Preprocessing
    weights: Mapping[str, torch.Tensor] | None = None
    anchors: Anchors | None = None


def start_anew(rows: Array, config: PreprocessingConfig) -> Start:
    """A start that knows of no earlier map."""
    return Start(fit_preprocessing(rows, config))


def start_from(
    encoder: Encoder,
    reference: Reference,
    rows: Array,
    architecture: NetworkConfig,
    config: PreprocessingConfig,
) -> Start:
    """A start from the encoder: its weights, and familiar rows held where it has them.

    Preprocessing is kept, so that the weights mean the same, unless its components miss too many
    of the rows: then it is fitted anew, and the landmarks alone hold the map. So they do where the
    job asks for another network.
    """
    if rows.shape[1] != encoder.n_inputs:
        raise ValueError(
            f"rows have {rows.shape[1]} columns, the published encoder takes {encoder.n_inputs}; "
            "a lake of another width needs a map of its own"
        )
    places = encoder.embed(rows)
    places[reference.score(rows) >= LANDMARK_NOVELTY] = np.nan
    anchors = Anchors(places, diameter(reference.extent), PULL)
    if architecture != encoder.config or off_plane(reference, rows) > MOST_OFF_PLANE:
        return Start(fit_preprocessing(rows, config), None, anchors)
    return Start(encoder.preprocessing, encoder.network.state_dict(), anchors)


def off_plane(reference: Reference, rows: Array) -> float:
    """The share of rows of which the projection leaves out more than of any reference row."""
    if reference.preprocessing.components is None:
        return 0.0
    return float((reference.view(rows)[:, -1] > reference.rows[:, -1].max()).mean())
