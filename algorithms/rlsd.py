"""RLSD (arXiv 2604.03128; methods.md 5.8): the teacher weighs the advantage token by token.

d = l_T - l_old -> w = clip(exp(sign(A) d), 1 - e, 1 + e) -> A' = A [(1 - lam) + lam w] -> GRPO with
A'. Nothing of it carries a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rsipo_lightning.algorithms.credit import fading, reweighted
from rsipo_lightning.algorithms.self_distillation import SelfDistillation, SelfDistillationConfig
from rsipo_lightning.checks import within
from rsipo_lightning.types import Iteration, Sample


@dataclass
class RLSDConfig(SelfDistillationConfig):
    """Keys of RLSD."""

    lam: float = 0.5  # at the first update
    lam_updates: int = 100  # until it is 0, in a line; 0: it stays
    bound: float = 0.2  # e, of the weight

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algo.lam", self.lam, 0, 1)
        within("algo.lam_updates", self.lam_updates, 0, math.inf)
        within("algo.bound", self.bound, 0, 1)


class RLSD(SelfDistillation[RLSDConfig]):
    """GRPO with re-weighted advantages."""

    Config = RLSDConfig

    def lam(self, update: int) -> float:
        """lam(update) = lam (1 - update/N)_+."""
        return fading(self.config.lam, self.config.lam_updates, update)

    def teaches(self, update: int) -> bool:
        """While lam is not 0."""
        return self.lam(update) > 0

    @property
    def shapes(self) -> bool:
        """It reads l_old."""
        return self.config.lam > 0

    def shape(self, samples: list[Sample], it: Iteration) -> list[Sample]:
        """A' = A [(1 - lam) + lam w]."""
        lam, bound = self.lam(it.update), self.config.bound
        return [
            reweighted(s, torch.exp, bound, lam, it.metrics) if "teacher" in s.views else s
            for s in samples
        ]
