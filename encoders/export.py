"""The encoder as one ONNX graph, from raw rows to positions, for systems without torch."""

import importlib.util
import logging
import warnings

import torch

from encoders.artifact import ArtifactError, Encoder
from encoders.preprocessing import Preprocessing

OPSET = 20


class _Whole(torch.nn.Module):
    """Preprocessing and network in one."""

    def __init__(self, preprocessing: Preprocessing, network: torch.nn.Module) -> None:
        super().__init__()
        self._preprocessing, self._network = preprocessing, network

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, d) float32 rows to (n, 2) positions."""
        positions: torch.Tensor = self._network(self._preprocessing.apply(rows))
        return positions


def to_onnx(encoder: Encoder) -> bytes:
    """An ONNX model that takes `rows`, (n, d) float32, and gives `positions`, (n, 2) float32."""
    if importlib.util.find_spec("onnxscript") is None:  # torch needs it to export
        raise ArtifactError("export: onnxscript is not installed; pip install 'lakemap[onnx]'")
    whole = _Whole(encoder.preprocessing, encoder.network).eval()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of torchvision's absence
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        program = torch.onnx.export(
            whole,
            (torch.zeros(2, encoder.n_inputs),),
            input_names=["rows"],
            output_names=["positions"],
            dynamic_shapes={"rows": {0: torch.export.Dim("n")}},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    model.metadata_props.add(key="digest", value=encoder.digest)
    return bytes(model.SerializeToString())
