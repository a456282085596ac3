"""DAPO: a wider upper clip and groups that carry a signal only (methods.md 5.14)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.checks import within
from rsipo_lightning.types import RolloutGroup


@dataclass
class DAPOConfig(GRPOConfig):
    """Keys of DAPO."""

    clip_high: float | None = 0.28
    kl: float = 0.0
    max_batches: int = 10  # batches of tasks that one update may play to fill itself
    filter: bool = True  # drop groups of equal outcomes

    def __post_init__(self) -> None:
        super().__post_init__()
        within("algo.max_batches", self.max_batches, 1, math.inf)


class DAPO(GRPO[DAPOConfig]):
    """GRPO with dynamic sampling."""

    Config = DAPOConfig

    @property
    def max_batches(self) -> int:
        """More than one where groups are dropped."""
        return self.config.max_batches if self.config.filter else 1

    def accept(self, group: RolloutGroup) -> bool:
        """0 < successes of the group < G."""
        return not self.config.filter or len({t.success for t in group.scored}) == 2
