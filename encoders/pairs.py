"""All pairs of a batch on the CPU, in compiled loops: no array of pairs fills the caches."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoders.compiling import compiled
from encoders.team import parts, side_by_side

# Sums in any order, which makes vector instructions of the loops. NaN and infinity are what
# they are: training looks for them.
_ANY_ORDER = {"nsz", "reassoc", "contract"}


def repel(y: NDArray[Any], rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """S and the repulsion of `objectives.tsne_edges`: (b, 1) and (b, 2), for (b, 2) positions."""
    across, up = np.ascontiguousarray(y.T)
    numbers = rows.astype(np.int32)  # as wide as a position, so that both fill one vector
    S, s, repulsion = np.empty_like(across), np.empty_like(across), np.empty_like(y)
    cut = parts(len(y))

    def sum_weights(part: slice) -> None:
        _sum_weights(across, up, numbers, part.start, S[part], s[part])

    def sum_forces(part: slice) -> None:
        _sum_forces(across, up, numbers, part.start, s, repulsion[part])

    side_by_side(sum_weights, cut)
    side_by_side(sum_forces, cut)
    return S[:, np.newaxis], repulsion


@compiled(_ANY_ORDER)
def _sum_weights(across: Any, up: Any, rows: Any, start: int, S: Any, s: Any) -> None:
    """S_i, the sum of w_ik = 1 / (1 + |y_i - y_k|^2) over points k of other rows; s = 1 / S.

    For the points i from `start` on, as many as S has room for.
    """
    one, nothing = across.dtype.type(1), across.dtype.type(0)
    for n in range(len(S)):
        i = start + n
        x, y, row, total = across[i], up[i], rows[i], nothing
        for k in range(len(across)):
            dx, dy = x - across[k], y - up[k]
            w = one / (one + dx * dx + dy * dy)
            total += w if rows[k] != row else nothing
        S[n], s[n] = total, one / total


@compiled(_ANY_ORDER)
def _sum_forces(across: Any, up: Any, rows: Any, start: int, s: Any, repulsion: Any) -> None:
    """The sum of w_ik^2 (s_i + s_k) (y_i - y_k) over points k of other rows, i as above."""
    one, nothing = across.dtype.type(1), across.dtype.type(0)
    for n in range(len(repulsion)):
        i = start + n
        x, y, row, s_i = across[i], up[i], rows[i], s[i]
        right = above = nothing
        for k in range(len(across)):
            dx, dy = x - across[k], y - up[k]
            w = one / (one + dx * dx + dy * dy)
            force = w * w * (s_i + s[k]) if rows[k] != row else nothing
            right += force * dx
            above += force * dy
        repulsion[n, 0] = right
        repulsion[n, 1] = above
