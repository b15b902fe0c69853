"""The demo: a lake of deformed handwritten digits, and the job that maps it."""

import logging
from pathlib import Path

from jobs.demo_lake import write_demo_lake

log = logging.getLogger("lakemap")

JOB = """\
# Made by lakemap demo. Run it again with: lakemap run {path}
name: digits
input:
  path: lake
  vector: embedding
  id: digit_id
  label: digit
  holdout: held_out         # made from source digits no training row comes from
  partition_bytes: 4MiB     # small, so that a small lake occupies several workers
output: maps
sample: {{rows: 20000}}
gates:
  recall: 0.95
  trustworthiness: 0.90
  accuracy: 0.90            # of the held-out rows
"""


def make_demo(folder: Path, n_rows: int, n_files: int) -> Path:
    """The demo's job file, beside its lake; both are made unless they are there."""
    lake = folder / "lake"
    log.info("demo: writing %s rows in %d files to %s", f"{n_rows:,}", n_files, lake)
    made = write_demo_lake(lake, n_rows, n_files)
    log.info("demo: %d bad rows on purpose, %d rows held out", made.n_bad, made.n_holdout)
    path = folder / "job.yaml"
    if not path.exists():  # it may have been edited
        path.write_text(JOB.format(path=path))
    return path
