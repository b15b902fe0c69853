import io

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from pipeline import picture
from pipeline.picture import PALETTE, Raster, draw_map, rasterize

UNIT = (0.0, 1.0, 0.0, 1.0)


def make_raster(n_rows: int, n_categories: int, pixels: int = 200) -> Raster:
    rng = np.random.default_rng(0)
    codes = rng.integers(n_categories, size=n_rows)
    centres = rng.uniform(0.2, 0.8, (n_categories, 2))
    xy = (centres[codes] + 0.03 * rng.standard_normal((n_rows, 2))).astype(np.float32)
    counts = rasterize(xy, codes, n_categories, UNIT, pixels)
    names = tuple(f"name {i}" for i in range(n_categories)) if n_categories > 1 else ("",)
    return Raster(counts, names, UNIT, n_rows - int(counts.sum()))


def read_pixels(png: bytes) -> NDArray[np.float32]:
    image: NDArray[np.float32] = imread(io.BytesIO(png), format="png")
    return image[..., :3]


def test_rasterize_equals_a_loop() -> None:
    rng = np.random.default_rng(1)
    xy = rng.uniform(-3, 3, (2_000, 2)).astype(np.float32)
    codes = rng.integers(3, size=2_000)
    extent = (-2.0, 2.0, -1.0, 2.5)
    expected = np.zeros((3, 7, 7), dtype=np.uint32)
    for (x, y), code in zip(xy.astype(float), codes, strict=True):
        if -2 <= x <= 2 and -1 <= y <= 2.5:
            expected[code, min(int((y + 1) / 3.5 * 7), 6), min(int((x + 2) / 4 * 7), 6)] += 1
    counts = rasterize(xy, codes, 3, extent, 7)
    assert counts.dtype == np.uint32
    np.testing.assert_array_equal(counts, expected)


def test_rows_on_the_edge_count_and_rows_without_a_place_do_not() -> None:
    xy = np.array([[0, 0], [1, 1], [1.01, 0], [np.nan, 0], [0, np.inf]], dtype=np.float32)
    counts = rasterize(xy, np.zeros(5, dtype=np.int64), 1, UNIT, 4)
    assert counts.sum() == 2
    assert counts[0, 0, 0] == counts[0, 3, 3] == 1


@pytest.mark.parametrize("code", [-1, 2])
def test_an_unknown_category_is_an_error(code: int) -> None:
    with pytest.raises(ValueError, match=r"need 0\.\.1"):
        rasterize(np.zeros((1, 2), dtype=np.float32), np.array([code]), 2, UNIT, 4)


def test_no_rows_make_an_empty_raster() -> None:
    counts = rasterize(np.empty((0, 2), dtype=np.float32), np.empty(0, dtype=int), 2, UNIT, 4)
    assert counts.shape == (2, 4, 4)
    assert counts.sum() == 0


@pytest.mark.parametrize("n_categories", [1, 2, 20, 40])
def test_the_same_raster_gives_the_same_picture(n_categories: int) -> None:
    raster = make_raster(5_000, n_categories)
    png = draw_map(raster, "a map")
    assert png == draw_map(raster, "a map")
    assert read_pixels(png).shape == (1200, 1440, 3)
    assert b"Software" not in png


@pytest.mark.parametrize("names", [("",), ("a", "b")])
def test_a_map_without_rows_can_be_drawn(names: tuple[str, ...]) -> None:
    counts = np.zeros((len(names), 50, 50), dtype=np.uint32)
    assert draw_map(Raster(counts, names, UNIT, 0), "nothing")


def test_a_single_row_can_be_seen_where_it_is() -> None:
    counts = np.zeros((1, 1000, 1000), dtype=np.uint32)
    counts[0, 750, 250] = 1
    pixels = read_pixels(draw_map(Raster(counts, ("",), UNIT, 0), ""))
    side, left = picture.MAP_SIDE, picture.MAP_LEFT
    top = 1200 - picture.MAP_BOTTOM - side
    inside = pixels[top + 5 : top + side - 5, left + 5 : left + side - 5].min(axis=2)
    rows, columns = np.nonzero(inside < 0.8)
    assert 20 < len(rows) < 120
    assert rows.mean() / side == pytest.approx(0.25, abs=0.01)
    assert columns.mean() / side == pytest.approx(0.25, abs=0.01)


def test_sparse_pictures_are_spread_and_dense_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    radii = [
        picture._choose_radius(rng.random((1000, 1000)) < share)
        for share in (0.001, 0.02, 0.15, 0.9)
    ]
    assert radii[0] == 4
    assert radii == sorted(radii, reverse=True)
    assert radii[2:] == [1, 0]


def test_spreading_adds_each_pixel_to_its_disc() -> None:
    image = np.zeros((9, 9, 4))
    image[4, 4], image[0, 0] = 2, 1
    spread = picture._spread(image, 1)
    assert spread[..., 0].sum() == 2 * 5 + 3
    assert spread[3:6, 4, 0].tolist() == [2, 2, 2]


@pytest.mark.parametrize("n_rows", [100, 10**6, 10**9])
def test_all_shades_are_used_at_every_size(n_rows: int) -> None:
    rng = np.random.default_rng(0)
    density = rng.exponential(size=(300, 300)) ** 2
    scale = picture._equalize(rng.poisson(density / density.sum() * n_rows).astype(float))
    assert (np.diff(scale.shares) > 0).all()
    assert scale.shares[-1] == 1
    assert np.interp(np.median(scale.levels), scale.levels, scale.shares) > 0.2


def test_a_pixel_has_the_colour_of_its_category() -> None:
    counts = np.zeros((2, 10, 10), dtype=np.uint32)
    counts[0, :5], counts[1, 5:] = 7, 7
    pixels = read_pixels(draw_map(Raster(counts, ("low", "high"), UNIT, 0), ""))
    for row, colour in ((1000, PALETTE[0]), (250, PALETTE[1])):
        expected = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        np.testing.assert_allclose(pixels[row, 300], expected, atol=0.01)


def test_beyond_twenty_the_smallest_are_one_grey_group() -> None:
    counts = np.arange(1, 41, dtype=np.uint32)[:, None, None] * np.ones((1, 2, 2), dtype=np.uint32)
    names = tuple(f"name {i}" for i in range(40))
    groups = picture._group_categories(Raster(counts, names, UNIT, 0))
    assert [group.name for group in groups[:2]] == ["name 39", "name 38"]
    assert groups[-1].name == "20 others"
    assert groups[-1].n_rows == sum(range(1, 21)) * 4
    assert len({group.colour for group in groups}) == 21


def test_names_are_placed_on_their_rows_and_apart() -> None:
    counts = np.zeros((240, 240), dtype=np.int64)
    counts[95:110, 30:34] = 50
    counts[:, 200] = 3
    assert picture._densest_place(counts) == pytest.approx((32 / 240, 102.5 / 240))
    dot = np.zeros((240, 240), dtype=np.int64)
    dot[100, 30] = 50
    assert picture._densest_place(dot)[1] > 100.5 / 240 + 0.01
    first = picture._find_room(0.5, 0.5, 10, [])
    second = picture._find_room(0.5, 0.5, 10, [first])
    assert abs(first[1] - second[1]) > 0.02
    assert picture._find_room(0.0, 1.0, 10, [])[0] > 0.04


@pytest.mark.parametrize("name", ["$x^", "a\nb\x00", "数字", "long " * 40, "", "<b>"])
def test_any_name_can_be_drawn(name: str) -> None:
    raster = make_raster(500, 2)._replace(categories=(name, "other"))
    assert draw_map(raster, name)


def test_text_is_shortened_to_one_printable_line() -> None:
    assert picture._shorten("a\n b\x00c", 10) == "a b c"
    assert picture._shorten("abcdef", 4) == "abc…"


def test_colour_bar_names_both_ends_and_powers_of_ten() -> None:
    levels = np.arange(1.0, 5_001.0)
    assert picture._choose_ticks(picture._equalize(levels)) == [1, 10, 100, 1000, 5000]
    assert picture._choose_ticks(picture._equalize(np.ones(3))) == [1]
