"""ONNX: the same positions in another runtime."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from encoders.artifact import Encoder
from encoders.export import to_onnx
from encoders.networks import NetworkConfig, build_network
from encoders.preprocessing import PreprocessingConfig, fit_preprocessing

PLAIN, PROJECTED = PreprocessingConfig(), PreprocessingConfig(True, pca=16)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (NetworkConfig(hidden=32), PLAIN),
        (NetworkConfig(hidden=32), PROJECTED),
        (NetworkConfig("residual", hidden=32, layers=2), PROJECTED),
        (NetworkConfig("cnn", hidden=32, shape=(8, 8)), PLAIN),
        (NetworkConfig("tests.encoders.own:Own"), PROJECTED),
    ],
)
def test_onnxruntime_gives_the_same_positions(
    config: NetworkConfig, steps: PreprocessingConfig, tmp_path: Path
) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (300, 64)).astype(np.float32)
    preprocessing = fit_preprocessing(rows, steps)
    network = build_network(config, preprocessing.n_outputs, seed=1).eval()
    encoder = Encoder(config, preprocessing, network)
    (tmp_path / "encoder.onnx").write_bytes(to_onnx(encoder))
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx")
    for part in (rows, rows[:1], rows[:7]):
        (found,) = session.run(["positions"], {"rows": part})
        np.testing.assert_allclose(found, encoder.embed(part), rtol=1e-5, atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["digest"] == encoder.digest
    assert torch.is_grad_enabled()
