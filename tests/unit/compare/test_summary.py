"""What is claimed of runs, from made-up ones."""

from __future__ import annotations

from typing import Any

import pytest

from rsipo_lightning.compare.summary import at_budget, notes


def row(arm: str, mean: float, n: int) -> dict[str, Any]:
    return {"arm": arm, "success": {"mean": mean, "low": None, "high": None, "n": n}}


def test_few_seeds_are_counted_by_pair() -> None:
    """Eight were asked for; what is said depends on how many a pair has."""
    rows = [row("a", 0.50, 8), row("b", 0.51, 8), row("c", 0.52, 3), row("d", 0.9, 2)]
    (note,) = notes([*rows, {"arm": "failed", "success": None}])
    assert note.startswith("2 of 6 pairs of rows are closer than 3 points (closest: b and c, 1.0)")
    assert "with 3 seeds, fewer than 8" in note
    assert notes(rows[:2]) == []
    assert notes([rows[0], rows[3]]) == []


def test_a_run_that_looked_too_late_is_not_linked_at_the_budget() -> None:
    def run(seed: str, x: list[float]) -> dict[str, Any]:
        return {"folder": f"s{seed}", "curve": {"cpu_s": x, "success_frac": [0.2, 0.4]}}

    def arm(name: str, **runs: list[float]) -> dict[str, Any]:
        made = {seed[1:]: run(seed[1:], x) for seed, x in runs.items()}
        return {"name": name, "trains": True, "runs": made}

    arms = [arm("fast", s0=[5.0, 10.0], s1=[5.0, 20.0]), arm("slow", s0=[5.0, 15.0], s1=[12.0, 24])]
    budget, (fast, slow) = at_budget(arms, "fast", "cpu_s")
    assert budget == 10
    assert fast["runs"] == {"0": "s0", "1": "s1"}
    assert slow["runs"] == {"0": "s0"}
    assert slow["success"]["mean"] == pytest.approx(0.3)
    assert (slow["success"]["n"], slow["difference"]["n"]) == (1, 1)
