import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from encoders.artifact import (
    EMBED_BATCH,
    HEADER_FILE,
    WEIGHTS_FILE,
    ArtifactError,
    Encoder,
    set_threads,
)
from encoders.networks import NetworkConfig, build_network
from encoders.preprocessing import Array, PreprocessingConfig, fit_preprocessing

WIDTHS = (1, 3, 16, 64, 100, 784)


def make_rows(n_rows: int, width: int, dtype: type = np.float32) -> Array:
    rng = np.random.default_rng(width)
    rows: Array = (100 + 30 * rng.normal(size=(n_rows, width))).clip(0, 255).astype(dtype)
    return rows


def make_encoder(width: int = 16, normalize: bool = False, hidden: int = 32) -> Encoder:
    config = NetworkConfig(hidden=hidden)
    network = build_network(config, width, seed=3).eval()
    preprocessing = fit_preprocessing(make_rows(500, width), PreprocessingConfig(normalize))
    return Encoder(config, preprocessing, network, {"recall": 0.97, "snapshot": "ab12"})


@pytest.mark.parametrize(
    ("dtype", "normalize"), [(np.uint8, False), (np.float32, False), (np.float32, True)]
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("hidden", [128, 256])
def test_position_does_not_depend_on_the_rows_around(
    width: int, dtype: type, normalize: bool, hidden: int
) -> None:
    encoder, rows = make_encoder(width, normalize, hidden), make_rows(2500, width, dtype)
    whole = encoder.embed(rows)
    assert np.array_equal(encoder.embed(rows[::-1])[::-1], whole)
    for shift in (1, 3, 1001):
        assert np.array_equal(np.roll(encoder.embed(np.roll(rows, shift, 0)), -shift, 0), whole)
    for number in (0, 5, 2048, 2499):
        assert np.array_equal(encoder.embed(rows[number : number + 1]), whole[number : number + 1])
    picked = np.random.default_rng(0).permutation(2500)[:777]
    assert np.array_equal(encoder.embed(rows[picked]), whole[picked])


@pytest.mark.parametrize(("width", "hidden"), [(7, 5), (13, 10), (50, 33), (127, 11)])
def test_widths_whose_products_depend_on_the_place_are_padded(width: int, hidden: int) -> None:
    encoder, rows = make_encoder(width, hidden=hidden), make_rows(2500, width)
    whole = encoder.embed(rows)
    for shift in (1, 2, 3, 5):
        assert np.array_equal(np.roll(encoder.embed(np.roll(rows, shift, 0)), -shift, 0), whole)


def test_position_does_not_depend_on_the_number_of_threads() -> None:
    encoder, rows = make_encoder(100, hidden=256), make_rows(100, 100)
    one = encoder.embed(rows)
    set_threads(2)
    assert torch.get_num_threads() == 2
    assert np.array_equal(encoder.embed(rows), one)


@pytest.mark.parametrize("width", WIDTHS)
def test_embed_equals_the_plain_network(width: int) -> None:
    encoder, rows = make_encoder(width), make_rows(50, width)
    with torch.inference_mode():
        plain = encoder.network(encoder.preprocessing.apply(torch.from_numpy(rows)))
    np.testing.assert_allclose(encoder.embed(rows), plain.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16])
def test_narrow_rows_are_placed_like_their_float32_copies(dtype: type) -> None:
    encoder = make_encoder()
    rows: Array = make_rows(300, 16).clip(0, 100).astype(dtype)
    rows.setflags(write=False)
    assert np.array_equal(encoder.embed(rows), encoder.embed(rows.astype(np.float32)))


def test_embed_returns_float32_pairs_even_for_no_rows() -> None:
    for n_rows in (0, 1, EMBED_BATCH, EMBED_BATCH + 1):
        positions = make_encoder().embed(make_rows(n_rows, 16))
        assert positions.shape == (n_rows, 2)
        assert positions.dtype == np.float32


def test_a_bad_row_spoils_only_itself() -> None:
    encoder, rows = make_encoder(), make_rows(10, 16)
    whole = encoder.embed(rows)
    rows[4, 0], rows[6, 1] = np.nan, np.inf
    positions = encoder.embed(rows)
    kept = np.delete(np.arange(10), [4, 6])
    assert np.array_equal(positions[kept], whole[kept])
    assert not np.isfinite(positions[[4, 6]]).any()


def test_embed_leaves_threads_and_generator_alone() -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    make_encoder().embed(make_rows(3, 16))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(16,), (4, 15), (2, 16, 1)])
def test_rows_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"the encoder takes \(n, 16\)"):
        make_encoder().embed(np.zeros(shape, np.float32))


@pytest.mark.parametrize("normalize", [False, True])
def test_loaded_encoder_places_rows_alike(tmp_path: Path, normalize: bool) -> None:
    encoder, rows = make_encoder(100, normalize), make_rows(20, 100)
    encoder.save(tmp_path / "model")
    loaded = Encoder.load(tmp_path / "model")
    assert np.array_equal(loaded.embed(rows), encoder.embed(rows))
    assert loaded.info == encoder.info
    assert loaded.config == encoder.config
    assert loaded.digest == encoder.digest
    assert not loaded.network.training


def test_equal_encoders_give_equal_bytes_and_reloading_keeps_them() -> None:
    files = make_encoder().to_files()
    assert make_encoder().to_files() == files
    assert Encoder.from_files(files).to_files() == files


def test_digest_covers_what_moves_positions_and_not_the_info() -> None:
    encoder = make_encoder()
    assert replace(encoder, info={}).digest == encoder.digest
    assert make_encoder(normalize=True).digest != encoder.digest
    shifted = replace(encoder.preprocessing, scale=2.0)
    assert replace(encoder, preprocessing=shifted).digest != encoder.digest
    other = build_network(encoder.config, 16, seed=4)
    assert replace(encoder, network=other).digest != encoder.digest


def test_header_is_readable_json() -> None:
    header = json.loads(make_encoder().to_files()[HEADER_FILE])
    wanted = {"kind": "mlp", "hidden": 32, "layers": 3, "shape": None}
    assert header["architecture"] == wanted
    assert header["preprocessing"] == {"normalize": False, "components": None}
    assert (header["format"], header["n_inputs"]) == (3, 16)
    assert header["digest"] == make_encoder().digest


def test_a_fresh_process_needs_no_other_package(tmp_path: Path) -> None:
    encoder, rows = make_encoder(), make_rows(5, 16)
    encoder.save(tmp_path)
    np.save(tmp_path / "rows.npy", rows)
    program = (
        "import sys, pathlib, numpy as np\n"
        "from encoders.artifact import Encoder\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "y = Encoder.load(folder).embed(np.load(folder / 'rows.npy'))\n"
        "np.save(folder / 'y.npy', y)\n"
        "others = {'pipeline', 'jobs', 'dask', 'zarr', 'pyarrow', 'sklearn', 'faiss'}\n"
        "assert not others & {name.split('.')[0] for name in sys.modules}\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=root)
    assert np.array_equal(np.load(tmp_path / "y.npy"), encoder.embed(rows))


def edited(**changes: object) -> dict[str, bytes]:
    """The files of an encoder whose header was edited by hand."""
    files = make_encoder().to_files()
    header = json.loads(files[HEADER_FILE]) | changes
    return files | {HEADER_FILE: json.dumps(header).encode()}


def test_other_format_is_refused() -> None:
    with pytest.raises(ArtifactError, match="format 99, this version reads 3; use the version"):
        Encoder.from_files(edited(format=99))


def test_edited_header_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"encoder\.json has digest .*changed or cut short"):
        Encoder.from_files(edited(n_inputs=17))


@pytest.mark.parametrize("cut", [1, 1000])
def test_damaged_weights_are_refused(cut: int) -> None:
    files = make_encoder().to_files()
    with pytest.raises(ArtifactError, match=r"encoder\.safetensors has digest .*cut short"):
        Encoder.from_files(files | {WEIGHTS_FILE: files[WEIGHTS_FILE][:-cut]})


@pytest.mark.parametrize("name", [WEIGHTS_FILE, HEADER_FILE])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_encoder().save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing; copy both files"):
        Encoder.load(tmp_path)


@pytest.mark.parametrize("header", [b"", b"[]", b"{}", b"\xff"])
def test_header_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"encoder\.json is no encoder header"):
        Encoder.from_files(make_encoder().to_files() | {HEADER_FILE: header})


def test_tensors_of_another_shape_are_refused() -> None:
    encoder = make_encoder()
    files = replace(encoder, config=NetworkConfig(hidden=48)).to_files()
    with pytest.raises(ArtifactError, match=r"tensor network\.0\.bias is \(32,\), needs .*\(48,\)"):
        Encoder.from_files(files)


def test_missing_tensors_are_refused() -> None:
    files = replace(make_encoder(), config=NetworkConfig(hidden=32, layers=4)).to_files()
    with pytest.raises(ArtifactError, match=r"tensor network\.10\.bias is missing"):
        Encoder.from_files(files)


def test_info_that_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(make_encoder(), info={"loss": float("nan")}).to_files()


OTHER_NETWORKS = [
    (NetworkConfig("residual", hidden=40, layers=2), None),
    (NetworkConfig("residual", hidden=10, layers=1), 7),
    (NetworkConfig("cnn", hidden=32, shape=(8, 8)), None),
    (NetworkConfig("cnn", hidden=24, shape=(4, 4, 4)), None),
    (NetworkConfig("tests.encoders.own:Own"), 9),
]


def other_encoder(config: NetworkConfig, pca: int | None) -> tuple[Encoder, Array]:
    rows = make_rows(2500, 64)
    preprocessing = fit_preprocessing(rows, PreprocessingConfig(pca=pca))
    network = build_network(config, preprocessing.n_outputs, seed=3).eval()
    return Encoder(config, preprocessing, network), rows


@pytest.mark.parametrize(("config", "pca"), OTHER_NETWORKS)
def test_other_networks_place_a_row_alike_wherever_it_stands(
    config: NetworkConfig, pca: int | None
) -> None:
    encoder, rows = other_encoder(config, pca)
    whole = encoder.embed(rows)
    for shift in (1, 3, 1001):
        assert np.array_equal(np.roll(encoder.embed(np.roll(rows, shift, 0)), -shift, 0), whole)
    for number in (0, 5, 2048, 2499):
        assert np.array_equal(encoder.embed(rows[number : number + 1]), whole[number : number + 1])
    for n_threads in (1, 2, 3, 7):  # 3 and 7 cut a batch in the middle of a row
        set_threads(n_threads)
        assert np.array_equal(encoder.embed(rows), whole)
    with torch.inference_mode():
        plain = encoder.network(encoder.preprocessing.apply(torch.from_numpy(rows)))
    np.testing.assert_allclose(whole, plain.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("config", "pca"), OTHER_NETWORKS)
def test_other_networks_are_loaded_as_they_were_saved(
    config: NetworkConfig, pca: int | None, tmp_path: Path
) -> None:
    encoder, rows = other_encoder(config, pca)
    encoder.save(tmp_path)
    loaded = Encoder.load(tmp_path)
    assert loaded.digest == encoder.digest
    assert loaded.config == config
    assert np.array_equal(loaded.embed(rows), encoder.embed(rows))
