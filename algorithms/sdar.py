"""SDAR (arXiv 2605.15155; methods.md 5.9): GRPO and gated self-distillation from a skill bank.

The gate trusts the teacher more on tokens that it finds likelier than the student does:
L = L_RLVR + lambda < g (sg l_T - l_theta) >, g = sg sigma(beta (l_T - l_theta)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from rsipo_lightning.algorithms.base import Stream
from rsipo_lightning.algorithms.losses import gated_stream
from rsipo_lightning.algorithms.self_distillation import SelfDistillation, SelfDistillationConfig
from rsipo_lightning.checks import within


@dataclass
class SDARConfig(SelfDistillationConfig):
    """Keys of SDAR."""

    distill: float = 0.01  # lambda
    gate_beta: float = 5.0  # slope of the sigmoid gate

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algo.distill", self.distill, 0, math.inf)
        within("algo.gate_beta", self.gate_beta, 0, math.inf)


S = TypeVar("S", bound=SDARConfig)


class SDAR(SelfDistillation[S]):
    """Gated self-distillation beside GRPO."""

    Config = SDARConfig

    @property
    def streams(self) -> Mapping[str, Stream]:
        """L = L_RLVR + lambda < g (sg l_T - l_theta) >."""
        c = self.config
        return {**super().streams, "teacher": gated_stream(c.gate_beta, c.distill)}
