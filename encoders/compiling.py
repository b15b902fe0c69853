"""Loops over arrays, compiled to machine code."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(assumptions: set[str]) -> Callable[[F], F]:
    """Compile a function at its first call, and keep it on disk where there is a place for it.

    assumptions: what the compiler may assume of numbers, by LLVM's names of fast-math flags.
    """
    compile_loosely = partial(numba.njit, nogil=True, error_model="numpy", fastmath=assumptions)

    def compile_later(function: F) -> F:
        try:
            return cast("F", compile_loosely(cache=True)(function))
        except RuntimeError:  # neither the package's folder nor the home folder can be written
            return cast("F", compile_loosely()(function))

    return compile_later
