"""RLOO: a leave-one-out baseline (methods.md 5.14)."""

from __future__ import annotations

from collections.abc import Sequence

from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.types import Trajectory


class RLOO(GRPO[GRPOConfig]):
    """GRPO with each trajectory measured against the others, not divided by a deviation."""

    def advantages(self, scored: Sequence[Trajectory]) -> list[float]:
        """A_i = R_i - mean_{j != i} R_j; 0 for a trajectory that is alone."""
        total, n = sum(t.score for t in scored), len(scored)
        return [t.score - (total - t.score) / (n - 1) if n > 1 else 0.0 for t in scored]
