"""The spatial key of a map: places on a grid of 65,536 by 65,536 cells, in the order of a Z curve.

A square of the grid with corners at multiples of its size, 2^s cells wide, is one range of 4^s
keys, so the tile (column, row) of zoom level z has the keys from m << 2 (16 - z), where m are the
interleaved bits of column and row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BITS = 16  # of each coordinate


def morton_keys(xy: NDArray[np.float32], extent: Sequence[float]) -> NDArray[np.uint32]:
    """The keys (n,) of places (n, 2) in the frame x0, x1, y0, y1; those outside go to its edge."""
    x0, x1, y0, y1 = extent
    low, high = np.array([x0, y0]), np.array([x1, y1])
    share = (xy.astype(np.float64) - low) / np.maximum(high - low, np.finfo(np.float64).tiny)
    cells = np.clip(share * (1 << BITS), 0, (1 << BITS) - 1).astype(np.uint32)
    keys: NDArray[np.uint32] = _spread(cells[:, 0]) | (_spread(cells[:, 1]) << np.uint32(1))
    return keys


def _spread(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The 16 low bits of each value, moved to the even places."""
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        values = (values | (values << np.uint32(shift))) & np.uint32(mask)
    return values
