"""From runs to what is claimed of them: means over seeds, intervals, paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from rsipo_lightning.compare.statistics import Estimate, at, estimate, paired

BUDGETS = ("updates", "env_steps", "cpu_s")
CLOSE, FEW = 0.03, 8  # a smaller difference over fewer seeds says little


def results(arms: Sequence[Mapping[str, Any]], reference: str) -> list[dict[str, Any]]:
    """A row for each look after training ("after", "after_skill", ...) of each arm.

    Means over seeds of success, of its change since the look before training, and of its difference
    to the reference arm's "after", seed by seed.
    """
    found = []
    base = next((_looks(arm["runs"], "after") for arm in arms if arm["name"] == reference), {})
    for arm in arms:
        runs: Mapping[str, Any] = arm["runs"]
        names = dict.fromkeys(
            look for run in runs.values() for look in run["looks"] if look.startswith("after")
        )
        for name in names or ("after",):
            success = _looks(runs, name)
            before = _looks(runs, name.replace("after", "before", 1)) or _looks(runs, "before")
            own = arm["name"] == reference and name == "after"
            found.append(
                {
                    "arm": arm["name"],
                    "look": name,
                    "runs": {seed: run["folder"] for seed, run in runs.items()},
                    "tasks": max(
                        (r["looks"][name]["n"] for r in runs.values() if name in r["looks"]),
                        default=0,
                    ),
                    "success": _plain(estimate(list(success.values()))),
                    "change": _plain(paired(success, before)),
                    "difference": None if own else _plain(paired(success, base)),
                    "types": _types(runs, name),
                    "env_steps": _mean(runs, "env_steps") if arm["trains"] else 0.0,
                    "cpu_s": _mean(runs, "cpu_s") if arm["trains"] else 0.0,
                    "peak_rss_mib": max((r["peak_rss_mib"] for r in runs.values()), default=None),
                }
            )
    return found


def at_budget(
    arms: Sequence[Mapping[str, Any]], reference: str, kind: str
) -> tuple[float | None, list[dict[str, Any]]]:
    """Validation success at the largest budget that every run reached, and that budget.

    Linear between two looks; a run whose first look came later has no value and is left out. An
    arm that trains nothing has its one value at every budget.
    """
    ends = [
        run["curve"][kind][-1]
        for arm in arms
        if arm["trains"]
        for run in arm["runs"].values()
        if run["curve"][kind]
    ]
    if not ends:
        return None, []
    budget = min(ends)
    values = {arm["name"]: _at(arm, kind, budget) for arm in arms}
    rows = [
        {
            "arm": arm["name"],
            "runs": {
                seed: run["folder"]
                for seed, run in arm["runs"].items()
                if int(seed) in values[arm["name"]]
            },
            "success": _plain(estimate(list(values[arm["name"]].values()))),
            "difference": None
            if arm["name"] == reference
            else _plain(paired(values[arm["name"]], values.get(reference, {}))),
        }
        for arm in arms
    ]
    return budget, rows


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must not conclude."""
    known = [row for row in rows if row["success"]]
    pairs = [
        (
            abs(one["success"]["mean"] - other["success"]["mean"]),
            min(one["success"]["n"], other["success"]["n"]),
            label(one),
            label(other),
        )
        for one, other in combinations(known, 2)
    ]
    close = [pair for pair in pairs if pair[0] < CLOSE and pair[1] < FEW]
    if not close:
        return []
    gap, seeds, one, other = min(close)
    return [
        f"{len(close)} of {len(pairs)} pairs of rows are closer than {100 * CLOSE:.0f} points "
        f"(closest: {one} and {other}, {100 * gap:.1f}); with {seeds} seeds, fewer than {FEW}, "
        "their order says little."
    ]


def label(row: Mapping[str, Any]) -> str:
    """Name of a row: the arm, and which look if it has several."""
    look = row.get("look", "after")
    return row["arm"] if look == "after" else f"{row['arm']} ({look})"


def _looks(runs: Mapping[str, Any], name: str) -> dict[int, float]:
    return {
        int(seed): run["looks"][name]["success_frac"]
        for seed, run in runs.items()
        if name in run["looks"]
    }


def _types(runs: Mapping[str, Any], look: str) -> dict[str, Any]:
    looks = [run["looks"][look]["types"] for run in runs.values() if look in run["looks"]]
    names = dict.fromkeys(name for types in looks for name in types)
    return {n: _plain(estimate([types[n] for types in looks if n in types])) for n in names}


def _at(arm: Mapping[str, Any], kind: str, budget: float) -> dict[int, float]:
    found = {}
    for seed, run in arm["runs"].items():
        curve = run["curve"]
        if not arm["trains"]:
            value = curve["success_frac"][-1] if curve["success_frac"] else None
        else:
            value = at(curve[kind], curve["success_frac"], budget)
        if value is not None:
            found[int(seed)] = value
    return found


def _mean(runs: Mapping[str, Any], key: str) -> float | None:
    found = estimate([run[key] for run in runs.values()])
    return found.mean if found else None


def _plain(value: Estimate | None) -> dict[str, Any] | None:
    return value._asdict() if value else None
