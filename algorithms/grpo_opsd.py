"""GRPO+OPSD (methods.md 5.6): GRPO and self-distillation without a gate, in two readings.

paper: the reverse KL as a policy gradient, L = L_RLVR + lambda < -sg(l_T - l_theta) l_theta >.
code: released code sets beta = 0, so that g = 1/2 on every token and the gradient, -lambda/2 grad
l_theta, does not depend on the teacher at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rsipo_lightning.algorithms.base import Stream
from rsipo_lightning.algorithms.losses import gated_distillation, reverse_kl
from rsipo_lightning.algorithms.self_distillation import SelfDistillation, SelfDistillationConfig
from rsipo_lightning.checks import one_of, within


@dataclass
class GRPOOPSDConfig(SelfDistillationConfig):
    """Keys of GRPO+OPSD."""

    distill: float = 0.01  # lambda
    reading: str = "paper"  # paper | code

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algo.distill", self.distill, 0, math.inf)
        one_of("algo.reading", self.reading, ("paper", "code"))


class GRPOOPSD(SelfDistillation[GRPOOPSDConfig]):
    """GRPO with an ungated teacher."""

    Config = GRPOOPSDConfig

    @property
    def streams(self) -> Mapping[str, Stream]:
        """L = L_RLVR + lambda times either reading."""
        c = self.config
        loss = reverse_kl() if c.reading == "paper" else gated_distillation(beta=0.0)
        return {**super().streams, "teacher": Stream(loss, c.distill)}
