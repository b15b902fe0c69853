"""A batch's points, cut into parts that threads work on side by side."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")


class Team(NamedTuple):
    """Threads; the caller's own is one of them."""

    size: int
    others: ThreadPoolExecutor


_current: ContextVar[Team | None] = ContextVar("team", default=None)


@contextmanager
def team(size: int) -> Iterator[None]:
    """Share work among so many threads inside the block; torch has one in each of them.

    Torch's own threads meet after every operation and spin while they wait; these meet after a
    whole pass.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(
            max(1, size - 1), initializer=torch.set_num_threads, initargs=(1,)
        ) as others:
            token = _current.set(Team(size, others))
            try:
                yield
            finally:
                _current.reset(token)
    finally:
        torch.set_num_threads(before)


def parts(length: int) -> list[slice]:
    """The parts of so many points, one for each thread of the team; outside of one, one part."""
    current = _current.get()
    count = max(1, min(length, current.size if current else 1))
    bounds = [length * part // count for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def side_by_side(work: Callable[..., Result], *arguments: Iterable[object]) -> list[Result]:
    """The results of `map`, one part in each thread of the team."""
    current = _current.get()
    first, *rest = zip(*arguments, strict=True)
    if current is None or not rest:
        return [work(*part) for part in (first, *rest)]
    others = [current.others.submit(work, *part) for part in rest]
    return [work(*first), *(other.result() for other in others)]


def ahead(work: Callable[..., Result], *arguments: object) -> Callable[[], Result]:
    """A function that gives work's result; another thread of the team, if there is one, begins."""
    current = _current.get()
    if current is None or current.size == 1:
        return partial(work, *arguments)
    return current.others.submit(work, *arguments).result
