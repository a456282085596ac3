"""The execution check: what a skill is worth, measured by acting with it (methods.md 6.1, 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, variance

from rsipo_lightning.types import Trajectory


def utility(success: bool, steps: int, max_steps: int, alpha: float) -> float:
    """u = 1[success] (1 - alpha T / T_max); any success beats any failure for alpha < 1.

    >>> utility(True, 3, 4, alpha=0.5)
    0.625
    """
    return float(success) * (1 - alpha * steps / max_steps)


def gain(treated: Sequence[float], control: Sequence[float]) -> tuple[float, float] | None:
    """Delta_x = mean(treated) - mean(control) and its noise variance s_x^2 = S_r^2/K + S_c^2/|C|.

    Utilities of replays and controls; sample variances are unbiased. None if either side has fewer
    than two episodes left: one outcome says nothing about its own noise.

    >>> gain([0.625] * 4, [0.625, 0, 0, 0])
    (0.46875, 0.0244140625)
    """
    if min(len(treated), len(control)) < 2:
        return None
    noise = variance(treated) / len(treated) + variance(control) / len(control)
    return fmean(treated) - fmean(control), noise


def utilities(trajectories: Sequence[Trajectory], alpha: float) -> list[float]:
    """Utilities of the episodes that were scored; broken ones are left out."""
    return [utility(t.success, t.steps, t.max_steps, alpha) for t in trajectories if t.scored]
