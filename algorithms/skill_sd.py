"""Skill-SD (arXiv 2604.10674; methods.md 5.7): an importance-weighted k3 to the teacher.

L = L_RLVR + lambda < rho k3 >, r = l_theta - sg l_T, k3 = exp(-r) - 1 + r, rho = exp(l_theta -
l_old), with gradient through both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rsipo_lightning.algorithms.base import Stream
from rsipo_lightning.algorithms.losses import importance_weighted_k3
from rsipo_lightning.algorithms.self_distillation import SelfDistillation, SelfDistillationConfig
from rsipo_lightning.checks import within


@dataclass
class SkillSDConfig(SelfDistillationConfig):
    """Keys of Skill-SD."""

    distill: float = 0.001  # lambda, constant

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algo.distill", self.distill, 0, math.inf)


class SkillSD(SelfDistillation[SkillSDConfig]):
    """GRPO and the unclipped k3 to a teacher with the same weights."""

    Config = SkillSDConfig

    @property
    def streams(self) -> Mapping[str, Stream]:
        """L = L_RLVR + lambda < rho k3 >."""
        return {
            **super().streams,
            "teacher": Stream(importance_weighted_k3(), self.config.distill),
        }
