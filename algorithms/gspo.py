"""GSPO: one importance ratio per response (methods.md 5.14)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rsipo_lightning.algorithms.base import Stream
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.algorithms.losses import sequence_surrogate


@dataclass
class GSPOConfig(GRPOConfig):
    """Keys of GSPO."""

    clip: float = 3e-4
    clip_high: float | None = 4e-4
    reduction: str = "seq_mean"


class GSPO(GRPO[GSPOConfig]):
    """GRPO with s = exp(mean_t(l_theta - l_old)) of a response, which is one turn of an episode."""

    Config = GSPOConfig

    @property
    def streams(self) -> Mapping[str, Stream]:
        """L_RLVR with the ratio of the response."""
        c = self.config
        loss = sequence_surrogate(c.clip, c.upper, c.dual_clip)
        return {**super().streams, "actor": Stream(loss)}
