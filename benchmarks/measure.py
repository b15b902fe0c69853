"""What the benchmarks share: measured commands, finished runs, versions, results as files."""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from jobs.flow import STAGES
from pipeline.history import current_run
from pipeline.stores import Folder

RESULTS = Path(__file__).parent / "results"
SAMPLE_SECONDS = 0.1
IDLE_LOAD = 0.5
NO_GATES = "gates={recall: null, trustworthiness: null, accuracy: null}"


class Measured(NamedTuple):
    """A finished command; memory is sampled ten times a second."""

    seconds: float
    peak_bytes: int  # resident, all processes together; pages they share count in each
    largest_bytes: int  # resident, the largest single process
    own_bytes: int  # resident, the command's first process: the driver of a run
    stdout: str


class StageTime(NamedTuple):
    """What one step of a run cost."""

    rows: int
    wall_seconds: float
    task_seconds: float
    peak_bytes: int


class FinishedRun(NamedTuple):
    """A published run: its folder, its metrics, and every step in order."""

    folder: Path
    metrics: dict[str, Any]
    stages: dict[str, StageTime]


class CommandError(RuntimeError):
    """A measured command ended with an exit code other than 0; holds its output."""

    def __init__(self, code: int, stdout: str) -> None:
        super().__init__(f"exit code {code}: {stdout.strip()[-500:]}")
        self.code = code


def stop(message: str) -> NoReturn:
    """End with exit code 2 and one line on what is missing."""
    print(f"benchmarks: {message}", file=sys.stderr)
    raise SystemExit(2)


def parser(purpose: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    found = argparse.ArgumentParser(description=purpose)
    found.add_argument("--quick", action="store_true", help="a small subset, to try the script")
    found.add_argument(
        "--results",
        type=Path,
        help="folder for the JSON and Markdown; by default results/ here, nowhere with --quick",
    )
    return found


def lakemap_command() -> str:
    """The console script of the running environment."""
    path = Path(sys.executable).with_name("lakemap")
    if not path.exists():
        stop(f"{path} is missing; install lakemap into this environment first")
    return str(path)


def run_measured(command: Sequence[str], added: Mapping[str, str] | None = None) -> Measured:
    """The command's time, memory and standard output; its standard error passes through.

    `added` is laid over the environment.
    """
    started = time.perf_counter()
    # A session of its own, by which all its processes are found.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | dict(added or {}),
    )
    with Peaks(session=process.pid) as peaks:
        stdout, _ = process.communicate()
    if process.returncode:
        raise CommandError(process.returncode, stdout)
    seconds = time.perf_counter() - started
    return Measured(seconds, peaks.total, peaks.largest, peaks.own, stdout)


class Peaks:
    """Watches, while the body runs, the memory of a session's processes or of our own children."""

    def __init__(self, session: int | None = None) -> None:
        self.total = 0
        self.largest = 0
        self.own = 0  # of the process that leads the session
        # In /proc/PID/stat, after the name: state, parent, group, session.
        self._field, self._value = (1, os.getpid()) if session is None else (3, session)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            found = [memory for memory in map(self._memory, _process_folders()) if memory]
            self.total = max(self.total, sum(now for now, _ in found))
            self.largest = max(self.largest, max((peak for _, peak in found), default=0))
            if self._field == 3:
                leader = self._memory(Path("/proc", str(self._value)))
                self.own = max(self.own, leader[1] if leader else 0)

    def _memory(self, process: Path) -> tuple[int, int] | None:
        """Bytes resident now and at their peak; None if the process is not one we watch."""
        try:
            # The name, in brackets, may hold spaces.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            watched = int(fields[self._field]) == self._value
            status = (process / "status").read_text() if watched else ""
        except (OSError, ValueError, IndexError):
            return None  # it has just ended
        sizes = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "VmRSS" not in sizes:
            return None
        return _in_bytes(sizes["VmRSS"]), _in_bytes(sizes["VmHWM"])


def _in_bytes(size: str) -> int:
    """A size as /proc writes it (`1234 kB`), in bytes."""
    return int(size.split(maxsplit=1)[0]) * 1024


def _process_folders() -> Iterable[Path]:
    return (Path("/proc", name) for name in os.listdir("/proc") if name.isdigit())


def read_json(path: Path) -> Any:
    """The document in the file."""
    return json.loads(path.read_text())


def read_run(output: Path) -> FinishedRun:
    """The published run, with the cost of every step."""
    folder = published_folder(output)
    manifest = read_json(folder / "manifest.json")
    stages = {
        stage.name: stage_time(output / "stores" / stage.name / manifest["stores"][stage.name])
        for stage in STAGES
    }
    return FinishedRun(folder, manifest["metrics"], stages)


def published_folder(output: Path) -> Path:
    """Where the published run is."""
    return output / "runs" / str(current_run(Folder(str(output))))


def stage_time(store: Path) -> StageTime:
    """What the step that left the store cost."""
    rows = read_json(store / "manifest.json")["n_rows"]
    timing = read_json(store / "timing.json")
    return StageTime(rows, timing["wall_seconds"], timing["task_seconds"], timing["peak_bytes"])


def stage_table(stages: Mapping[str, StageTime]) -> str:
    """Seconds, rows per second and memory of every step."""
    rows = [
        [
            name,
            f"{found.rows:,}",
            f"{found.wall_seconds:.1f}",
            f"{found.rows / max(found.wall_seconds, 1e-9):,.0f}",
            mebibytes(found.peak_bytes),
        ]
        for name, found in stages.items()
    ]
    total = sum(found.wall_seconds for found in stages.values())
    rows.append(["all steps", "", f"{total:.1f}", "", ""])
    return table(["step", "rows", "seconds", "rows/s", "peak MiB of one task"], rows)


def plain_stages(stages: Mapping[str, StageTime]) -> dict[str, dict[str, float]]:
    """The steps as JSON has them."""
    return {name: found._asdict() for name, found in stages.items()}


def machine() -> dict[str, Any]:
    """Where the figures come from; a load above 0.5 at the start makes them too slow."""
    load = os.getloadavg()[0]
    if load > IDLE_LOAD:
        print(f"warning: load {load:.1f} before the start; measure alone", file=sys.stderr)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_at_start": round(load, 2),
    }


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the installed ones among the distributions."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def mebibytes(n_bytes: int) -> str:
    """The size in MiB, with thousands marked."""
    return f"{n_bytes / (1 << 20):,.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is set to the right."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("| --- " + "| ---: " * (len(head) - 1) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def conditions(facts: Mapping[str, Any], packages: Mapping[str, str]) -> str:
    """One paragraph on machine and versions."""
    memory = facts["memory_bytes"] / (1 << 30)
    listed = ", ".join(f"{name} {number}" for name, number in packages.items())
    return (
        f"{facts['cores']} cores, {memory:.0f} GiB, {facts['system']}, "
        f"Python {facts['python']}, load {facts['load_at_start']} at the start. {listed}."
    )


def publish(options: argparse.Namespace, name: str, document: Any, markdown: str) -> None:
    """Print the Markdown; write it and the JSON where results go."""
    print(markdown)
    folder = options.results or (None if options.quick else RESULTS)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown.rstrip() + "\n")
    print(f"\nwritten: {folder / name}.json and .md", file=sys.stderr)
