"""The calls that stores get, by one library in a process of its own; imports nothing of ours.

python store_calls.py NAME BUCKET PREFIX N_LARGE N_SMALL

Keys and endpoint come from the environment. Prints the version and the seconds of every kind of
call as JSON. Exit code 3: the library is not installed.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

NOT_INSTALLED = 3
LARGE_BYTES = 8 << 20
RANGE_BYTES = 64 << 10


class Obstore:
    """obstore, called as `pipeline.stores` calls it."""

    def __init__(self, module: Any, bucket: str) -> None:
        self._module = module
        store = importlib.import_module("obstore.store")
        self._store = store.S3Store(
            bucket,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            client_options={"allow_http": True},
        )

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._module.put(self._store, key, data, use_multipart=False)

    def create(self, key: str, data: bytes) -> bool:
        """Write it if it is not there; whether it was not."""
        try:
            self._module.put(self._store, key, data, mode="create", use_multipart=False)
        except self._module.exceptions.AlreadyExistsError:
            return False
        return True

    def get(self, key: str) -> bytes:
        """All its bytes."""
        return bytes(self._module.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Some of its bytes."""
        return bytes(self._module.get_range(self._store, key, start=start, end=stop))

    def list(self, prefix: str) -> int:
        """How many objects there are below the prefix."""
        return sum(len(page) for page in self._module.list(self._store, prefix))


class S3fs:
    """fsspec's store for S3, each call as its documentation has it."""

    def __init__(self, module: Any, bucket: str) -> None:
        self._bucket = bucket
        self._files = module.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._files.pipe_file(f"{self._bucket}/{key}", data)

    def create(self, key: str, data: bytes) -> bool:
        """Write it if it is not there; whether it was not."""
        try:
            self._files.pipe_file(f"{self._bucket}/{key}", data, mode="create")
        except OSError as error:  # EINVAL, of which only the text says why
            if "pre-conditions" not in str(error):
                raise
            return False
        return True

    def get(self, key: str) -> bytes:
        """All its bytes."""
        return bytes(self._files.cat_file(f"{self._bucket}/{key}"))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Some of its bytes."""
        return bytes(self._files.cat_file(f"{self._bucket}/{key}", start=start, end=stop))

    def list(self, prefix: str) -> int:
        """How many objects there are below the prefix."""
        self._files.invalidate_cache()
        return len(self._files.find(f"{self._bucket}/{prefix}"))


LIBRARIES = {"obstore": Obstore, "s3fs": S3fs}


def main(name: str, bucket: str, prefix: str, n_large: str, n_small: str) -> None:
    """Call and tell."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        sys.exit(NOT_INSTALLED)
    store = LIBRARIES[name](module, bucket)
    seconds = dict(calls(store, prefix, int(n_large), int(n_small)))
    print(json.dumps({"version": version(name), "seconds": seconds}))


def calls(store: Any, prefix: str, n_large: int, n_small: int) -> Iterator[tuple[str, float]]:
    """Every kind of call and its seconds; what comes back is checked."""
    data = os.urandom(LARGE_BYTES)
    large = [f"{prefix}/large/{number}" for number in range(n_large)]
    small = [f"{prefix}/small/{number}" for number in range(n_small)]
    store.put(f"{prefix}/first", b"{}")  # connections are made at the first call

    def read_range(number: int) -> bool:
        start = number * RANGE_BYTES % (LARGE_BYTES - RANGE_BYTES)
        found = store.get_range(large[number % n_large], start, start + RANGE_BYTES)
        return bool(found == data[start : start + RANGE_BYTES])

    yield "write", timed(lambda: [store.put(key, data) for key in large])
    yield "read", timed(lambda: [len(store.get(key)) for key in large], [LARGE_BYTES] * n_large)
    yield "range", timed(lambda: [read_range(n) for n in range(n_small)], [True] * n_small)
    yield "create", timed(lambda: [store.create(key, b"{}") for key in small], [True] * n_small)
    yield "refused", timed(lambda: [store.create(key, b"{}") for key in small], [False] * n_small)
    yield "list", timed(lambda: store.list(f"{prefix}/small"), n_small)


def timed(run: Callable[[], Any], expected: Any = None) -> float:
    """Seconds that it takes; what it gives must be as expected, where something is."""
    started = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - started
    assert expected is None or found == expected, f"found {found}"
    return seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
