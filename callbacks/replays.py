"""ReplayGains: fulfils an algorithm's skill and replay requests and measures the gains."""

from __future__ import annotations

import time
from collections.abc import Sequence

import lightning as L

from rsipo_lightning import keys
from rsipo_lightning.callbacks.rollout_stats import add_replays, check_broken
from rsipo_lightning.callbacks.rollouts import shown
from rsipo_lightning.config import RunConfig
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.replay import gain, utilities
from rsipo_lightning.rng import keyed_seed
from rsipo_lightning.rollout import Job, Player, Sampling
from rsipo_lightning.skills import analysis_messages, analysis_template, category, read_skill
from rsipo_lightning.types import (
    Iteration,
    Prompt,
    ReplayRequest,
    ReplayResult,
    Role,
    Skill,
    SkillRequest,
    WrittenSkill,
)


class ReplayGains(L.Callback):
    """Stands behind RolloutCollector; fills ``iteration.skills`` and ``iteration.replays``."""

    def __init__(self, player: Player, config: RunConfig) -> None:
        self.player, self.config = player, config
        file = config.rollout.analysis_template
        self.template = analysis_template(file) if file else None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """propose -> skills -> plan -> replays."""
        started = time.perf_counter()
        it, algorithm = pl_module.iteration, pl_module.algorithm
        proposed = algorithm.propose(it)
        requests = [p for p in proposed if isinstance(p, SkillRequest)]
        written = self.write(requests, it.update)
        it.skills = [*(p for p in proposed if isinstance(p, Skill)), *written]
        plans = algorithm.plan(it)
        it.replays = self.replay(plans, it, trainer)
        if requests:
            analysed = len(written) / len(requests)  # others: the episode fills the context
            it.metrics.mean(keys.SKILL_ANALYSED, analysed, len(requests))
        if proposed:
            add_replays(it.metrics, it.replays)
            it.metrics.mean("time/replay_s", time.perf_counter() - started)

    def write(self, requests: Sequence[SkillRequest], update: int) -> list[WrittenSkill]:
        """Let the policy write one skill per request, all in one batch, and validate each."""
        r, codec = self.config.rollout, self.player.codec
        style = self.player.suite.config.prompt
        prompts = [
            Prompt(
                ids=codec.chat(analysis_messages(request.trajectory, style, self.template)),
                max_new_tokens=r.max_skill_tokens,
                temperature=request.temperature,
                seed=keyed_seed(
                    self.config.seed,
                    update,
                    request.trajectory.task.id,
                    Role.WRITER,
                    request.trajectory.index,
                ),
                stop_ids=codec.stop_ids,
            )
            for request in requests
        ]
        fits = [len(p.ids) + p.max_new_tokens <= r.context for p in prompts]
        completions = iter(
            self.player.engine.generate([p for p, ok in zip(prompts, fits, strict=True) if ok])
        )
        skills = []
        for request, prompt, ok in zip(requests, prompts, fits, strict=True):
            # an episode too long to be analysed has no skill: nothing was sampled, nothing is
            # punished
            if ok:
                completion = next(completions)
                text, invalid = read_skill(completion.text)
                if not invalid:
                    invalid = self.player.suite.check_skill(request.trajectory, text)
                skills.append(
                    WrittenSkill(
                        request.trajectory.task,
                        text,
                        category(text),
                        invalid,
                        trajectory=request.trajectory,
                        prompt_ids=prompt.ids,
                        completion=completion,
                    )
                )
        return skills

    def replay(
        self, plans: Sequence[ReplayRequest], it: Iteration, trainer: L.Trainer
    ) -> list[ReplayResult]:
        """Play all replays of all tasks in one batch; gain over the controls that exist already."""
        jobs = [
            Job(plan.skill.task, Role.REPLAY, i, it.update, plan.skill)
            for plan in plans
            for i in range(plan.n)
        ]
        how = Sampling.of(self.config, self.config.rollout.temperature)
        replays = shown(trainer, "replay", self.player, jobs, how)
        check_broken("replays", replays, self.config.rollout.max_error_frac)
        played, results = iter(replays), []
        for plan in plans:
            treated = tuple(next(played) for _ in range(plan.n))
            alpha = plan.length_penalty
            measured = gain(utilities(treated, alpha), utilities(plan.control, alpha))
            delta, noise = measured if measured else (None, None)
            results.append(ReplayResult(plan.skill, treated, plan.control, delta, noise))
        return results
