from typing import Any

import numba
import pytest

from encoders.compiling import compiled


def test_functions_compile_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def refuse(*functions: Any, **options: Any) -> Any:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return real(*functions, **options)

    monkeypatch.setattr(numba, "njit", refuse)
    assert compiled(set())(lambda x: x + 1)(2) == 3
