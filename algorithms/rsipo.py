"""RSIPO (arXiv 2610.15772; methods.md section 6).

groups -> split into evidence and control -> skill from one evidence trajectory -> replays with the
skill, gain over the control half -> (a) reward of the skill's tokens, (b) shrinkage and trust ->
L_RLVR + lambda
L_OPSD(omega) + L_skill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rsipo_lightning import keys
from rsipo_lightning.algorithms.base import Stream, Sums
from rsipo_lightning.algorithms.credit import taught
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.algorithms.losses import gated_stream, reverse_kl, reward_weighted_nll
from rsipo_lightning.algorithms.shrinkage import Shrinkage, type_sums
from rsipo_lightning.bank import BankConfig, SkillBank
from rsipo_lightning.checks import one_of, within
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.skills import category
from rsipo_lightning.tokens import constant, skill_row, with_credit
from rsipo_lightning.types import (
    Iteration,
    ReplayRequest,
    ReplayResult,
    RolloutGroup,
    Sample,
    Skill,
    SkillRequest,
    Task,
    Trajectory,
    WrittenSkill,
)

if TYPE_CHECKING:
    from rsipo_lightning.codec import Codec
    from rsipo_lightning.config import RolloutSection

ALL = "*"  # pseudo type: all tasks together


@dataclass
class RSIPOConfig(BankConfig, GRPOConfig):
    """Keys of RSIPO; status and source of each default: methods.md 6.5, ablations: section 8."""

    skill_source: str = "policy"  # policy (it writes them) | bank (a file: nothing is written)
    replays: int = 4  # K, replays with the skill from the same initial state
    length_penalty: float = 0.5  # alpha in u = 1[success] (1 - alpha T / T_max)
    trust_slope: float = 2.0  # kappa in omega = clip(1 + kappa g, 0, omega_max)
    trust_max: float = 2.0  # omega_max
    invalid_penalty: float = 0.5  # rho, reward -rho of a skill that is not valid
    distill: float = 0.01  # lambda_OPSD of the trust-weighted distillation
    gate: str = "sigmoid"  # sigmoid | none (reverse-KL form)
    gate_beta: float = 5.0  # slope of the sigmoid gate
    skill: float = 1.0  # lambda_skill; 0 switches skill evolution off
    skill_temperature: float = 1.0  # greedy skills would reinforce themselves
    trust: bool = True  # off: omega = 1
    shrink: bool = True  # off: g is the raw gain
    decay: float = 0.9  # q, forgetting of the type moments per update
    n_min: int = 8  # valid tasks of a type before its trust departs from 1
    noise: str = "own"  # own | pooled | blend | max: whose variance shrinks the gain
    split: str = (
        "random"  # random | success_first (ablation: a success, if any, goes to the evidence half)
    )
    reward_center: str = "type"  # type | global | none
    replay_grpo: bool = False  # also train on the replays, as groups of their own

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("algo.skill_source", self.skill_source, ("policy", "bank"))
        one_of("algo.gate", self.gate, ("sigmoid", "none"))
        one_of("algo.noise", self.noise, ("own", "pooled", "blend", "max"))
        one_of("algo.split", self.split, ("random", "success_first"))
        one_of("algo.reward_center", self.reward_center, ("type", "global", "none"))
        within(
            "algo.replays", self.replays, 2, math.inf
        )  # one replay says nothing about its own noise
        within("algo.length_penalty", self.length_penalty, 0, 1)
        within("algo.decay", self.decay, 0, 0.9999)
        within("algo.skill_temperature", self.skill_temperature, 0.01, math.inf)
        others = (
            "trust_slope",
            "trust_max",
            "invalid_penalty",
            "distill",
            "gate_beta",
            "skill",
            "n_min",
        )
        for key in others:
            within(f"algo.{key}", getattr(self, key), 0, math.inf)


class RSIPO(GRPO[RSIPOConfig]):
    """Replay-validated self-distillation: skills are rewarded and trusted by what acting with them
    gains.
    """

    Config = RSIPOConfig

    def __init__(
        self,
        config: RSIPOConfig,
        seed: int,
        codec: Codec | None = None,
        bank: SkillBank | None = None,
    ) -> None:
        super().__init__(config, seed, codec, bank)
        self.shrinkage = Shrinkage(config.decay)

    @classmethod
    def check(cls, config: RSIPOConfig, rollout: RolloutSection) -> None:
        """The group is split into halves, and a half of one has no variance."""
        if rollout.group % 2 or rollout.group < 4:
            raise ConfigError(
                f"rollout.group={rollout.group}: RSIPO splits a group into evidence and control "
                "halves and needs an even number of at least 4"
            )

    @classmethod
    def uses_bank(cls, config: RSIPOConfig) -> bool:
        """With ``skill_source=bank``."""
        return config.skill_source == "bank"

    @property
    def streams(self) -> Mapping[str, Stream]:
        """L = L_RLVR + lambda_OPSD L_OPSD(omega) + L_skill."""
        c = self.config
        teacher = Stream(reverse_kl(), c.distill)
        if c.gate == "sigmoid":
            teacher = gated_stream(c.gate_beta, c.distill)
        return {
            **super().streams,
            "teacher": teacher,
            "writer": Stream(reward_weighted_nll, self.writing),
        }

    @property
    def writing(self) -> float:
        """lambda_skill; 0 where the policy writes none."""
        return self.config.skill if self.config.skill_source == "policy" else 0.0

    @property
    def checked(self) -> bool:
        """Whether anything uses the execution check."""
        c = self.config
        return self.writing > 0 or (c.distill > 0 and c.trust) or c.replay_grpo

    @property
    def extra_episodes(self) -> int:
        """K replays, where anything uses them."""
        return self.config.replays if self.checked else 0

    def halves(self, group: RolloutGroup, update: int) -> tuple[list[Trajectory], list[Trajectory]]:
        """Evidence and control, G/2 each, drawn without looking at outcomes; broken episodes are
        dropped after that.
        """
        trajectories = list(group.trajectories)
        keyed_random(self.seed, "split", update, group.task.id).shuffle(trajectories)
        if self.config.split == "success_first":
            trajectories.sort(key=lambda t: not t.success)
            rest = trajectories[1:]
            keyed_random(self.seed, "rest", update, group.task.id).shuffle(rest)
            trajectories = [*trajectories[:1], *rest]
        half = len(trajectories) // 2
        evidence, control = trajectories[:half], trajectories[half:]
        return [t for t in evidence if t.scored], [t for t in control if t.scored]

    def propose(self, it: Iteration) -> Sequence[SkillRequest | Skill]:
        """One skill per task: to be written from a random success of the evidence half if there is
        one, else from any of it; or the bank's.
        """
        if not (self.checked or self.config.distill > 0):
            return []
        if self.bank:
            return [self.given(g.task) for g in it.groups if g.scored]
        requests = []
        for group in it.groups:
            evidence, _ = self.halves(group, it.update)
            pool = [t for t in evidence if t.success] or evidence
            if pool:
                chosen = keyed_random(self.seed, "evidence", it.update, group.task.id).choice(pool)
                requests.append(SkillRequest(chosen, self.config.skill_temperature))
        return requests

    def given(self, task: Task) -> Skill:
        """What the bank says for the task's type."""
        assert self.bank is not None
        text = self.bank.text(task.type)
        return Skill(task, text, category(text))

    def plan(self, it: Iteration) -> list[ReplayRequest]:
        """K replays for each valid skill; the controls are the other half of the group: no extra
        rollouts.
        """
        if not self.checked:
            return []
        control = {g.task.id: tuple(self.halves(g, it.update)[1]) for g in it.groups}
        c = self.config
        return [
            ReplayRequest(s, c.replays, control[s.task.id], c.length_penalty)
            for s in it.skills
            if s.valid
        ]

    def statistics(self, it: Iteration) -> Sums:
        """{type: (n, sum Delta, sum Delta^2, sum s^2)} of tasks with a measured gain, and of all
        types together.
        """
        gains = [
            (r.skill.task.type, r.gain, r.noise or 0.0) for r in it.replays if r.gain is not None
        ]
        return type_sums([*gains, *((ALL, gain, noise) for _, gain, noise in gains)])

    def credit(self, it: Iteration, sums: Sums) -> list[Sample]:
        """L_RLVR on all students, L_OPSD(omega) where the task has a valid skill, L_skill on the
        written skills.
        """
        rewards = self.rewards(
            it, sums
        )  # before the update: the baseline must not contain the sample itself
        self.shrinkage.update(sums)
        it.trust.update(self.trust(it))
        samples = [s for group in it.groups for s in self.student(group, it)]
        if self.config.replay_grpo:
            replays = [RolloutGroup(r.skill.task, r.treated) for r in it.replays]
            samples += [s for group in replays for part in self.actor(group) for s in part]
        if self.writing > 0:
            written = [s for s in it.skills if isinstance(s, WrittenSkill)]
            samples += [self.writer(s, rewards[s.task.id]) for s in written if s.task.id in rewards]
        return samples

    # ---- (a) reward of the skill's tokens

    def rewards(self, it: Iteration, sums: Sums) -> dict[str, float]:
        """r_x = Delta_x - lagged type mean for valid skills, -rho for invalid ones (6.3); lost
        gains have none.
        """
        done = {s.task.id: -self.config.invalid_penalty for s in it.skills if not s.valid}
        for r in it.replays:
            if r.gain is not None:
                done[r.skill.task.id] = r.gain - self.baseline(r.skill.task.type, r.gain, sums)
        return done

    def baseline(self, kind: str, gain: float, sums: Sums) -> float:
        """Mean before this update; at a type's first occurrence the mean of the batch's other tasks
        of it, else 0.
        """
        if self.config.reward_center == "none":
            return 0.0
        key = kind if self.config.reward_center == "type" else ALL
        if key in self.shrinkage.types:
            return self.shrinkage.types[key].mean
        n, total, *_ = sums[key]
        return (total - gain) / (n - 1) if n > 1 else 0.0

    def writer(self, skill: WrittenSkill, reward: float) -> Sample:
        """-r_x (1/|s_x|) sum_j log pi(s_xj | analysis prompt); the mean over tasks is the stream's
        denominator.
        """
        row = skill_row(skill)
        return with_credit(row, writer=constant(row, 1 / row.n, reward))

    # ---- (b) trust in the teacher

    def trust(self, it: Iteration) -> dict[str, float]:
        """{task id: omega_x} of tasks with a valid skill."""
        measured: dict[str, ReplayResult] = {r.skill.task.id: r for r in it.replays}
        done = {s.task.id: self.omega(s, measured.get(s.task.id)) for s in it.skills if s.valid}
        kinds = {s.task.id: s.task.type for s in it.skills}
        for task, omega in done.items():
            it.metrics.mean(keys.TRUST, omega)
            it.metrics.mean(keys.trust_of(kinds[task]), omega)
            it.metrics.mean("trust/zero_frac", float(omega <= 0))
            it.metrics.mean("trust/max_frac", float(omega >= self.config.trust_max))
            it.metrics.mean("trust/omega_abs_dev_mean", abs(omega - 1))
        for r in it.replays:
            if r.gain is not None:
                kind, noise = r.skill.task.type, r.noise or 0.0
                it.metrics.mean("trust/type_gain_mean", self.shrinkage.types[kind].mean)
                it.metrics.mean("trust/tau2_mean", self.shrinkage.types[kind].tau2)
                it.metrics.mean("trust/noise_mean", noise)
                kept = self.shrinkage.kept(kind, noise, self.config.noise)
                it.metrics.mean("trust/kept_mean", kept)
        return done

    def omega(self, skill: Skill, result: ReplayResult | None) -> float:
        """omega_x = clip(1 + kappa g_x, 0, omega_max); 1 while the type is young, g_x its mean
        where the gain is lost.
        """
        c, kind = self.config, skill.task.type
        moments = self.shrinkage.types.get(kind)
        if not c.trust or moments is None or moments.n < c.n_min:
            return 1.0
        if result is None or result.gain is None:
            g = moments.mean
        elif c.shrink:
            g = self.shrinkage.posterior(kind, result.gain, result.noise or 0.0, c.noise)
        else:
            g = result.gain
        return min(max(1 + c.trust_slope * g, 0.0), c.trust_max)

    def student(self, group: RolloutGroup, it: Iteration) -> list[Sample]:
        """Actor rows; with a valid skill also the teacher's view of them, weight 1 (not omega) and
        value omega_x.
        """
        parts = [s for part in self.actor(group) for s in part]
        skill = next((s for s in it.skills if s.valid and s.task.id == group.task.id), None)
        if skill is None or self.config.distill == 0:
            return parts
        assert self.codec is not None
        section, omega = self.codec.section_ids(skill.text), it.trust[group.task.id]
        return [taught(s, section, omega) for s in parts]

    def state_dict(self) -> dict[str, Any]:
        """Type moments."""
        return {"shrinkage": self.shrinkage.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over type moments."""
        self.shrinkage.load_state_dict(state["shrinkage"])
