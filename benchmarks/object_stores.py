"""obstore, which all stores go through, beside fsspec's s3fs: the calls of the ledger and of lakes.

Both talk to the same S3 server on loopback, one after the other, one call at a time.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.store_calls import LARGE_BYTES, LIBRARIES, NOT_INSTALLED, RANGE_BYTES
from tests.s3 import BUCKET, OWNER, run_server

KINDS = {
    "write": f"write {LARGE_BYTES >> 20} MiB",
    "read": f"read {LARGE_BYTES >> 20} MiB",
    "range": f"read a range of {RANGE_BYTES >> 10} KiB",
    "create": "create if absent",
    "refused": "create, refused because it is there",
    "list": "list, per object",
}


def main() -> None:
    """Measure both, a few times in turn."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has s3fs")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions")
    options = parser.parse_args()
    n_large, n_small = (2, 10) if options.quick else (32, 500)
    facts = measure.machine()
    pythons = {"obstore": sys.executable, "s3fs": options.peers_python}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LIBRARIES}
    versions = measure.versions(("lakemap",))
    with (
        tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder,
        run_server(Path(folder)) as server,
    ):
        os.environ |= server.environment(OWNER)
        for number in range(options.rounds):
            for name, python in pythons.items():
                told = _call(name, python, f"{name}-{number}", n_large, n_small)
                if told is not None:
                    found[name].append(told["seconds"])
                    versions[name] = told["version"]
    document = {
        "machine": facts,
        "versions": versions,
        "quick": options.quick,
        "n_large": n_large,
        "n_small": n_small,
        "rounds": found,
    }
    measure.publish(options, "object_stores", document, report(document))


def _call(name: str, python: str, prefix: str, n_large: int, n_small: int) -> Any:
    """What the library's process tells; None when it is not installed."""
    script = Path(__file__).with_name("store_calls.py")
    sizes = [str(n_large), str(n_small)]
    try:
        measured = measure.run_measured([python, str(script), name, BUCKET, prefix, *sizes])
    except measure.CommandError as error:
        if error.code != NOT_INSTALLED:
            raise
        print(f"{name} not installed in {python}: pip install {name}", file=sys.stderr)
        return None
    return json.loads(measured.stdout.splitlines()[-1])


def report(document: dict[str, Any]) -> str:
    """Milliseconds of a call as Markdown."""
    counts = dict.fromkeys(("write", "read"), document["n_large"])
    names = [name for name, rounds in document["rounds"].items() if rounds]
    rows = []
    for kind, title in KINDS.items():
        n_calls = counts.get(kind, document["n_small"])
        each = {
            name: statistics.median(found[kind] for found in document["rounds"][name]) / n_calls
            for name in names
        }
        ratio = f"{each['s3fs'] / each['obstore']:.1f}" if len(each) == len(LIBRARIES) else ""
        rows.append([title, *(f"{1000 * each[name]:.2f}" for name in names), ratio])
    lines = ["# Object stores", "", measure.conditions(document["machine"], document["versions"])]
    if document["quick"]:
        lines += ["", "**A quick run of a few calls: these figures mean nothing.**"]
    lines += ["", "Milliseconds a call, one call at a time, medians of the rounds.", ""]
    return "\n".join([*lines, measure.table(["call", *names, "ratio"], rows)]) + "\n"


if __name__ == "__main__":
    main()
