"""All pairs of a batch on the CPU, in compiled loops: no array of pairs fills the caches."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoders.compiling import compiled

# Sums in any order, which makes vector instructions of the loops. NaN and infinity are what
# they are: training looks for them.
_ANY_ORDER = {"nsz", "reassoc", "contract"}


def repel(y: NDArray[Any], rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """S and the repulsion of `objectives.tsne_edges`: (b, 1) and (b, 2), for (b, 2) positions."""
    across, up = np.ascontiguousarray(y.T)
    _, numbers = np.unique(rows, return_inverse=True)
    numbers = numbers.astype(np.int32)  # as wide as a position, so that both fill one vector
    S, s, repulsion = np.empty_like(across), np.empty_like(across), np.empty_like(y)
    _sum_weights(across, up, numbers, S, s)
    _sum_forces(across, up, numbers, s, repulsion)
    return S[:, np.newaxis], repulsion


@compiled(_ANY_ORDER)
def _sum_weights(across: Any, up: Any, rows: Any, S: Any, s: Any) -> None:
    """S_i, the sum of w_ik = 1 / (1 + |y_i - y_k|^2) over points k of other rows; s = 1 / S."""
    one, nothing = across.dtype.type(1), across.dtype.type(0)
    for i in range(len(across)):
        x, y, row, total = across[i], up[i], rows[i], nothing
        for k in range(len(across)):
            dx, dy = x - across[k], y - up[k]
            w = one / (one + dx * dx + dy * dy)
            total += w if rows[k] != row else nothing
        S[i], s[i] = total, one / total


@compiled(_ANY_ORDER)
def _sum_forces(across: Any, up: Any, rows: Any, s: Any, repulsion: Any) -> None:
    """The sum of w_ik^2 (s_i + s_k) (y_i - y_k) over points k of other rows."""
    one, nothing = across.dtype.type(1), across.dtype.type(0)
    for i in range(len(across)):
        x, y, row, s_i = across[i], up[i], rows[i], s[i]
        right = above = nothing
        for k in range(len(across)):
            dx, dy = x - across[k], y - up[k]
            w = one / (one + dx * dx + dy * dy)
            force = w * w * (s_i + s[k]) if rows[k] != row else nothing
            right += force * dx
            above += force * dy
        repulsion[i, 0] = right
        repulsion[i, 1] = above
