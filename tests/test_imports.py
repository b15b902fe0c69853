"""Who may import whom: read from the sources, so that no test has to run them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"pipeline", "encoders", "jobs", "tests", "benchmarks"}
DASK = {"dask", "distributed", "dask_jobqueue", "dask_kubernetes"}
HEAVY = {"torch", "faiss", "numba", "sklearn", "scipy", "zarr", "pyarrow"} | DASK
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for package in ("pipeline", "encoders", "jobs")
    for path in (ROOT / package).rglob("*.py")
)


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


def imports(tree: ast.Module) -> set[str]:
    """Full names of all modules the source imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, packages: set[str]) -> bool:
    """Whether the name is one of the packages, or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def foreign(tree: ast.Module, allowed: set[str]) -> set[str]:
    """What the source imports beyond the standard library and the allowed packages."""
    return {
        name
        for name in imports(tree)
        if name.split(".")[0] not in sys.stdlib_module_names and not within(name, allowed)
    }


def below(folder: str) -> list[str]:
    found = [path for path in SOURCES if path.startswith(f"{folder}/")]
    assert found
    return found


def test_the_tools_of_this_file_see_imports() -> None:
    tree = parse("jobs/cluster.py")
    assert {"distributed.get_worker", "pipeline.runner.Task", "torch"} <= imports(tree)
    assert foreign(ast.parse("import numpy.linalg, numpyx\nfrom os import path"), {"numpy"}) == {
        "numpyx"
    }
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES)
def test_every_module_says_what_it_is(path: str) -> None:
    text = ast.get_docstring(parse(path))
    assert text
    assert text.splitlines()[0].rstrip().endswith(".")


@pytest.mark.parametrize("path", below("pipeline"))
def test_the_pipeline_knows_neither_cluster_nor_command_line(path: str) -> None:
    names = imports(parse(path))
    refused = DASK | {"typer", "click", "argparse", "jobs", "tests", "benchmarks"}
    assert not {name for name in names if within(name, refused)}


@pytest.mark.parametrize(
    "path",
    # Credentials are no settings of ours: they are where the stores' own tools have them.
    [path for path in below("pipeline") + below("encoders") if path != "pipeline/remote.py"],
)
def test_no_setting_comes_from_the_environment(path: str) -> None:
    tree = parse(path)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & {"environ", "getenv", "putenv", "environb"}
    assert not {name for name in imports(tree) if name.startswith(("os.environ", "os.getenv"))}


@pytest.mark.parametrize("path", below("pipeline/kernels"))
def test_kernels_are_arrays_in_arrays_out(path: str) -> None:
    tree = parse(path)
    arrays = {"numpy", "scipy", "faiss", "torch", "sklearn"}
    assert not foreign(tree, arrays | {"encoders.compiling", "pipeline.kernels"})
    assert not {name for name in imports(tree) if within(name, {"logging", "pathlib", "io", "os"})}


@pytest.mark.parametrize("path", below("encoders"))
def test_encoders_know_neither_stores_nor_pipeline(path: str) -> None:
    allowed = {"numpy", "torch", "safetensors", "encoders"}
    assert not foreign(parse(path), allowed | ({"numba"} if "compiling" in path else set()))


KNOW_DASK = ("jobs/cluster.py", "jobs/crew.py", "jobs/flights.py", *below("jobs/sites"))


@pytest.mark.parametrize("path", [path for path in SOURCES if path not in KNOW_DASK])
def test_the_runner_and_its_sites_alone_know_dask(path: str) -> None:
    assert not {name for name in imports(parse(path)) if within(name, DASK)}


@pytest.mark.parametrize("path", below("jobs/sites"))
def test_how_a_cluster_is_opened_knows_no_runner(path: str) -> None:
    ours = {name for name in imports(parse(path)) if name.split(".")[0] in OURS}
    allowed = {"jobs.sites", "pipeline.cluster_config", "pipeline.errors"}
    assert not {name for name in ours if not within(name, allowed)}


@pytest.mark.parametrize("path", below("jobs"))
def test_jobs_import_no_tests(path: str) -> None:
    assert not {name for name in imports(parse(path)) if within(name, {"tests", "benchmarks"})}


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("pipeline/errors.py", set()),
        ("pipeline/partitions.py", set()),
        ("pipeline/cluster_config.py", {"errors"}),
        ("pipeline/config.py", {"cluster_config", "errors"}),
        ("pipeline/remote.py", set()),
        ("pipeline/stores.py", {"errors", "partitions", "remote"}),
        ("pipeline/manifest.py", {"errors", "partitions", "stores"}),
        ("pipeline/runner.py", {"errors", "partitions", "manifest"}),
        ("pipeline/stage.py", {"errors", "partitions", "manifest", "stores", "runner", "config"}),
    ],
)
def test_the_spine_has_one_direction(path: str, allowed: set[str]) -> None:
    ours = {name for name in imports(parse(path)) if name.split(".")[0] in OURS}
    assert {name.split(".")[1] for name in ours} <= allowed
    assert {name.split(".")[0] for name in ours} <= {"pipeline"}


@pytest.mark.parametrize(
    "code",
    ["import jobs.cli", "import sys; sys.argv[1:] = ['--help']; import jobs.cli as c; c.main()"],
)
def test_help_costs_no_heavy_import(code: str) -> None:
    assert loaded_by(code, HEAVY) == "[]"


def test_the_driver_leaves_torch_and_sklearn_to_the_workers() -> None:
    """They take seconds and hundreds of MiB, also of a refresh with nothing to do."""
    assert loaded_by("import jobs.work", {"torch", "sklearn"}) == "[]"


def loaded_by(code: str, modules: set[str]) -> str:
    """Those of the modules that a process has loaded after running the code."""
    script = f"""
import sys
try:
    exec({code!r})
except SystemExit as stop:
    assert not stop.code
print([name for name in {sorted(modules)} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]
