"""Gates: figures of a map that a job demands before anything is published."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipeline.config import GatesConfig
from pipeline.errors import GateError
from pipeline.report import Gate

# Gates that are not to be exceeded, and what they are of; refreshes and retrainings measure it.
MOST = {"rows_lost": "rows_lost", "displacement": "displacement_p95"}


def check_gates(gates: GatesConfig, metrics: Mapping[str, Any]) -> None:
    """Refuse when a measured figure does not pass its gate."""
    for gate in judge(gates, metrics):
        if MOST.get(gate.name, gate.name) in metrics and not gate.passed:
            found = "not measured" if gate.found is None else f"{gate.found:.4f}"
            needs, cure = f"the job needs {gate.needed:g}", "improve the map or lower"
            if gate.at_most:
                needs, cure = f"the job allows {gate.needed:g}", "look at the lake or raise"
            raise GateError(
                f"gate {gate.name}: {found}, {needs}; nothing was published, "
                f"CURRENT is as it was; {cure} gates.{gate.name}"
            )


def judge(gates: GatesConfig, metrics: Mapping[str, Any]) -> list[Gate]:
    """Every gate the job sets, with what was found; those of refreshes only where they apply."""
    found: list[Gate] = []
    for name, needed in asdict(gates).items():
        measured, at_most = MOST.get(name, name), name in MOST
        if needed is None or (at_most and measured not in metrics):
            continue
        value = metrics.get(measured)
        passed = value is not None and (value <= needed if at_most else value >= needed)
        found.append(Gate(name, needed, value, passed, at_most))
    return found


def share_lost(n_now: int, n_before: int) -> float:
    """The share of the rows of the map that it has no more."""
    return max(0.0, 1 - n_now / max(1, n_before))
