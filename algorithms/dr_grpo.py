"""Dr. GRPO: GRPO without the biases of its two divisions (methods.md 5.14)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.checks import one_of, within
from rsipo_lightning.types import Credit, RolloutGroup, Sample


@dataclass
class DrGRPOConfig(GRPOConfig):
    """Keys of Dr. GRPO."""

    adv_norm: str = "mean"  # not divided by the standard deviation
    reduction: str = "seq_mean"
    length: int = 512  # L_max, divides the token sum of a trajectory in place of its length

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("algo.reduction", self.reduction, ("seq_mean",))
        within("algo.length", self.length, 1, math.inf)


class DrGRPO(GRPO[DrGRPOConfig]):
    """GRPO of undivided advantages and token sums."""

    Config = DrGRPOConfig

    def actor(self, group: RolloutGroup) -> list[list[Sample]]:
        """mean_i sum_t l_it / L_max: weights 1/n_i, which add up to the number of trajectories,
        and values n_i / L_max times as large (the terms are linear in them).
        """
        return [
            [_scaled(s, sum(p.n for p in part) / self.config.length) for s in part]
            for part in super().actor(group)
        ]


def _scaled(sample: Sample, factor: float) -> Sample:
    credits = {name: Credit(c.weight, factor * c.value) for name, c in sample.credits.items()}
    return replace(sample, credits=credits)
