"""SEED (arXiv 2607.14777; methods.md 5.12): a teacher that has read a skill of its own episode.

groups -> a skill from each finished trajectory, written greedily by the policy itself ->
L_RLVR + lambda < m_skill g (sg l_skill - l_theta) >. Stage 1 is ``rsipo-sft``.
"""

from __future__ import annotations

from dataclasses import dataclass

from rsipo_lightning.algorithms.sdar import SDAR, SDARConfig


@dataclass
class SEEDConfig(SDARConfig):
    """Keys of SEED."""

    skill_source: str = "trajectory"  # bank: the ablation without on-policy skills


class SEED(SDAR[SEEDConfig]):
    """SDAR's gated term, on the rows of trajectories with a valid skill: pi_old acts, analyses and
    teaches.
    """

    Config = SEEDConfig
