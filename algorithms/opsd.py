"""OPSD as the papers' tables compare it (methods.md 5.5): self-distillation without reward.

L = 0 L_pg + beta_KL <k3> - c_ent <H> + lambda < g (sg l_T - l_theta) >.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rsipo_lightning.algorithms.base import Stream
from rsipo_lightning.algorithms.sdar import SDAR, SDARConfig


class OPSD(SDAR[SDARConfig]):
    """SDAR without the policy gradient."""

    @property
    def streams(self) -> Mapping[str, Stream]:
        """SDAR's terms but for the actor's, whose coefficient is 0."""
        terms = super().streams
        return {**terms, "actor": replace(terms["actor"], coef=0.0)}
