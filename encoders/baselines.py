"""What the paper compares with: an autoencoder, and an encoder taught a given embedding."""

import math

import numpy as np
import torch

from encoders.fit import Draw, Drawn, FitConfig, Trained, fit
from encoders.networks import NetworkConfig, build_decoder, build_network
from encoders.objectives import Batch, Objective, PairLoss, clip
from encoders.preprocessing import Array, Preprocessing


def fit_autoencoder(
    rows: Array, preprocessing: Preprocessing, network: NetworkConfig, config: FitConfig, batch: int
) -> torch.nn.Module:
    """An encoder trained, with its mirror image behind it, to give the prepared rows back."""
    encoder = build_network(network, preprocessing.n_outputs, config.seed)
    decoder = build_decoder(network, preprocessing.n_outputs, config.seed + 1)
    both = torch.nn.Sequential(encoder, decoder)
    objective = _regress(preprocessing.apply_all(rows), config.objective.clip)
    trained = Trained(rows, preprocessing, both, objective)
    fit(trained, _draw_rows(len(rows), batch, config.seed), config)
    return encoder.eval()


def fit_embedding(
    rows: Array,
    places: Array,
    preprocessing: Preprocessing,
    network: NetworkConfig,
    config: FitConfig,
    batch: int,
) -> torch.nn.Module:
    """An encoder trained to put the rows where another method, places (n, 2), has put them."""
    encoder = build_network(network, preprocessing.n_outputs, config.seed)
    targets = torch.from_numpy(np.asarray(places, np.float32))
    trained = Trained(rows, preprocessing, encoder, _regress(targets, config.objective.clip))
    fit(trained, _draw_rows(len(rows), batch, config.seed), config)
    return encoder.eval()


def _regress(targets: torch.Tensor, threshold: float) -> Objective:
    """The mean squared distance of the points from their targets."""

    def objective(y: torch.Tensor, batch: Batch, _: float) -> PairLoss:
        off = y - targets.to(y.device)[batch.rows]
        loss = off.square().sum(1).mean()
        cut = clip(2 * off, threshold)
        return PairLoss(float(loss), cut.gradient / len(y), cut.largest, cut.share)

    return objective


def _draw_rows(n_rows: int, batch: int, seed: int) -> Draw:
    """Rows in random order, all of them once an epoch."""
    batch = min(batch, n_rows)

    def draw(step: int) -> Drawn:
        epoch, number = divmod(step, math.floor(n_rows / batch))
        order = np.random.default_rng([seed, epoch]).permutation(n_rows)
        return Drawn(order[number * batch : (number + 1) * batch])

    return draw
