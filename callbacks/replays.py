"""ReplayGains: fulfils an algorithm's skill and replay requests and measures the gains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import lightning as L

from rsipo_lightning import keys
from rsipo_lightning.callbacks.progress import progress_of
from rsipo_lightning.callbacks.rollout_stats import add_replays, check_broken
from rsipo_lightning.callbacks.rollouts import shown
from rsipo_lightning.config import RunConfig
from rsipo_lightning.endpoint import Endpoint, asked_again
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.replay import gain, utilities
from rsipo_lightning.rng import keyed_seed
from rsipo_lightning.rollout import Job, Player, Sampling
from rsipo_lightning.skills import (
    analysis_messages,
    analysis_template,
    category,
    read_skill,
    read_step_skills,
)
from rsipo_lightning.types import (
    Completion,
    Iteration,
    Message,
    Prompt,
    ReplayRequest,
    ReplayResult,
    Role,
    Skill,
    SkillRequest,
    WrittenSkill,
)


class ReplayGains(L.Callback):
    """Stands behind RolloutCollector; fills ``iteration.skills`` and ``iteration.replays``.

    ``analyzer`` writes the skills in place of the policy.
    """

    def __init__(self, player: Player, config: RunConfig, analyzer: Endpoint | None = None) -> None:
        self.player, self.config, self.analyzer = player, config, analyzer
        file = config.rollout.analysis_template
        self.template = analysis_template(file) if file else None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: PolicyModule) -> None:  # type: ignore[override]
        """propose -> skills -> plan -> replays."""
        started = time.perf_counter()
        it, algorithm = pl_module.iteration, pl_module.algorithm
        proposed = algorithm.propose(it)
        requests = [p for p in proposed if isinstance(p, SkillRequest)]
        display = progress_of(trainer)
        if display and self.analyzer and requests:
            display.phase("analysis", len(requests))
        written = self.write(requests, it.update, display.advance if display else lambda n: None)
        it.skills = [*(p for p in proposed if isinstance(p, Skill)), *written]
        plans = algorithm.plan(it)
        it.replays = self.replay(plans, it, trainer)
        self.player.engine.rest()
        if requests:
            analysed = len(written) / len(requests)  # others: the episode fills the context
            it.metrics.mean(keys.SKILL_ANALYSED, analysed, len(requests))
        if proposed:
            add_replays(it.metrics, it.replays)
            it.metrics.mean("time/replay_s", time.perf_counter() - started)

    def write(
        self,
        requests: Sequence[SkillRequest],
        update: int,
        progress: Callable[[int], None] = lambda n: None,
    ) -> Sequence[Skill]:
        """Let the policy write one skill per request, all in one batch, and validate each.

        An episode too long to be analysed has no skill: nothing was sampled, nothing is punished.
        With an analyzer: a skill for each, in the same order; ``progress(1)`` as one comes.
        EngineError: it fails for good.
        """
        if self.analyzer:
            return self._ask(self.analyzer, requests, progress)
        style = self.player.suite.config.prompt
        chats = [
            analysis_messages(r.trajectory, style, self.template, r.step_skills) for r in requests
        ]
        skills = self._sample(requests, chats, update)
        twice = [i for i, s in enumerate(skills) if s and s.invalid and requests[i].attempts > 1]
        second = self._sample(
            [requests[i] for i in twice],
            [
                [*chats[i], *asked_again(s.completion.text, s.invalid)]
                for i in twice
                if (s := skills[i])
            ],
            update,
            "again",
        )
        for i, skill in zip(twice, second, strict=True):
            skills[i] = skill or skills[i]
        return [skill for skill in skills if skill]

    def _ask(
        self, analyzer: Endpoint, requests: Sequence[SkillRequest], progress: Callable[[int], None]
    ) -> list[Skill]:
        """The full prompt, whatever the policy is shown: the short one is for small policies."""
        chats = [
            analysis_messages(r.trajectory, "full", self.template, r.step_skills) for r in requests
        ]

        def check(i: int, text: str) -> str:
            return self._skill(requests[i], text).invalid if requests[i].attempts > 1 else ""

        answers = analyzer.complete(chats, check, lambda i, answer: progress(1))
        return [
            self._skill(request, answer.text, answer.problem)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _sample(
        self,
        requests: Sequence[SkillRequest],
        chats: Sequence[Sequence[Message]],
        update: int,
        *attempt: str,
    ) -> list[WrittenSkill | None]:
        """A skill for each chat; None where it does not fit the context."""
        r, codec = self.config.rollout, self.player.codec
        prompts = [
            Prompt(
                ids=codec.chat(chat),
                max_new_tokens=r.max_skill_tokens,
                temperature=request.temperature,
                seed=keyed_seed(
                    self.config.seed,
                    update,
                    request.trajectory.task.id,
                    Role.WRITER,
                    request.trajectory.index,
                    *attempt,
                ),
                stop_ids=codec.stop_ids,
            )
            for request, chat in zip(requests, chats, strict=True)
        ]
        fits = [len(p.ids) + p.max_new_tokens <= r.context for p in prompts]
        completions = iter(
            self.player.engine.generate([p for p, ok in zip(prompts, fits, strict=True) if ok])
        )
        return [
            self._read(request, prompt, next(completions)) if ok else None
            for request, prompt, ok in zip(requests, prompts, fits, strict=True)
        ]

    def _read(self, request: SkillRequest, prompt: Prompt, completion: Completion) -> WrittenSkill:
        skill = self._skill(request, completion.text)
        return WrittenSkill(
            skill.task,
            skill.text,
            skill.category,
            skill.invalid,
            trajectory=request.trajectory,
            steps=skill.steps,
            prompt_ids=prompt.ids,
            completion=completion,
        )

    def _skill(self, request: SkillRequest, text: str, problem: str = "") -> Skill:
        """What an answer says, validated; ``problem`` says why it is none."""
        trajectory, check = request.trajectory, self.player.suite.check_skill
        advice, invalid = read_skill(text)
        steps = read_step_skills(text, trajectory.steps, request.step_skills)
        return Skill(
            trajectory.task,
            advice,
            category(advice),
            problem or invalid or check(trajectory, advice),
            trajectory=trajectory,
            steps={k: tip for k, tip in steps.items() if not check(trajectory, tip)},
        )

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
