"""OPID (arXiv 2606.26790; methods.md 5.11): hindsight skills of the episode and of its steps.

each finished trajectory -> an analyzer's episode skill and skills of critical steps -> two teachers
-> A_total = A + w_e m_e (l_e - l_old) + w_s m_s (l_s - l_old) -> GRPO with A_total.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from rsipo_lightning.algorithms.base import Sums
from rsipo_lightning.algorithms.credit import gap
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.checks import one_of, within
from rsipo_lightning.endpoint import AnalyzerConfig, EndpointConfig
from rsipo_lightning.tokens import narrowed, places, with_credit, with_skill
from rsipo_lightning.types import Credit, Iteration, Sample, Skill, SkillRequest, TeacherView


@dataclass
class OPIDConfig(AnalyzerConfig, GRPOConfig):
    """Keys of OPID."""

    episode: float = 0.001  # w_e, of the teacher with the episode skill
    step: float = 0.001  # w_s, of the teacher with a step skill
    routing: str = "step_priority"  # step_priority (a step skill replaces the other) | additive
    step_skills: int = 5  # at most, of one trajectory
    attempts: int = 2  # of an analysis that cannot be read
    skill_temperature: float = 0.4  # of the policy's analysis
    endpoint: EndpointConfig = field(default_factory=lambda: EndpointConfig(temperature=0.4))

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("algo.routing", self.routing, ("step_priority", "additive"))
        within("algo.attempts", self.attempts, 1, 2)
        for key in ("episode", "step", "step_skills", "skill_temperature"):
            within(f"algo.{key}", getattr(self, key), 0, math.inf)


class OPID(GRPO[OPIDConfig]):
    """GRPO with advantages to which two teachers add."""

    Config = OPIDConfig

    @property
    def analyzer(self) -> EndpointConfig | None:
        """Of the config."""
        return self.config.server

    @property
    def shapes(self) -> bool:
        """It reads l_old, unless both weights are 0."""
        return self.config.episode > 0 or self.config.step > 0

    def propose(self, it: Iteration) -> list[SkillRequest]:
        """An analysis of every finished trajectory."""
        c = self.config
        most = c.step_skills if c.step > 0 else 0
        scored = [t for group in it.groups for t in group.scored]
        requests = [SkillRequest(t, c.skill_temperature, most, c.attempts) for t in scored]
        return requests if self.shapes else []

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """GRPO's rows; those of a trajectory with a valid skill get their teachers' views."""
        skills = {id(skill.trajectory): skill for skill in it.skills if skill.valid}
        samples = []
        for group in it.groups:
            for trajectory, part in zip(group.scored, self.actor(group), strict=True):
                skill = skills.get(id(trajectory))
                samples += [self.seen(s, skill) for s in part] if skill else part
        return samples

    def seen(self, sample: Sample, skill: Skill) -> Sample:
        """A view "episode" of the row, and for each of its critical steps a view of that turn."""
        assert self.codec is not None
        views: dict[str, TeacherView] = {}
        if self.config.episode > 0:
            views["episode"] = with_skill(sample, self.codec.section_ids(skill.text))
        turns = set(sample.turn.tolist())
        critical = [k for k in skill.steps if k in turns] if self.config.step > 0 else []
        for i, k in enumerate(critical):
            views[f"step{i}"] = self.before(sample, k, skill.steps[k])
        return replace(sample, views={**sample.views, **views})

    def before(self, sample: Sample, turn: int, advice: str) -> TeacherView:
        """The tokens of one turn, with advice at the end of the message that it answers."""
        assert self.codec is not None
        mine = sample.turn == turn
        at = int(places(sample)[mine][0]) - self.codec.tail
        return narrowed(with_skill(sample, self.codec.step_section_ids(advice), at), mine)

    def shape(self, samples: list[Sample], it: Iteration) -> list[Sample]:
        """A_total = A + w_e m_e (l_e - l_old) + w_s m_s (l_s - l_old)."""
        return [self.added(s) if s.views else s for s in samples]

    def added(self, sample: Sample) -> Sample:
        """m_s covers the turns that have a step skill, m_e (with step_priority) the others."""
        c, (weight, value), scores = self.config, sample.credits["actor"], dict(sample.scores)
        step = torch.full((sample.n,), torch.nan)
        for name in sample.views.keys() - {"episode"}:
            step = torch.where(step.isnan(), scores.pop(name), step)
        sample = replace(sample, scores={**scores, "step": step})
        value = value + c.step * gap(sample, "step")  # w_s m_s (l_s - l_old)
        if "episode" in sample.views:
            m = step.isnan() if c.routing == "step_priority" else torch.ones_like(weight)
            value = value + c.episode * m * gap(sample, "episode")  # w_e m_e (l_e - l_old)
        return with_credit(sample, actor=Credit(weight, value))
