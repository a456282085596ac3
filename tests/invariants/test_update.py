"""The update is a function of the trajectories, not of how they are cut, ordered or padded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rsipo_lightning.algorithms.base import Algorithm
from rsipo_lightning.algorithms.grpo import GRPO, GRPOConfig
from rsipo_lightning.algorithms.rsipo import RSIPO, RSIPOConfig
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RunConfig
from rsipo_lightning.engines.hf import HFEngine
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.policy import Policy
from rsipo_lightning.testing import byte_tokenizer, random_policy
from rsipo_lightning.types import (
    Completion,
    Iteration,
    Prompt,
    ReplayResult,
    RolloutGroup,
    Sample,
    Skill,
    Stop,
    Task,
    Trajectory,
    Turn,
    WrittenSkill,
)

TOKENIZER = byte_tokenizer(["Your question: where was the director of the film born?"] * 9)
CODEC = Codec(TOKENIZER)
RSIPO_ALL = RSIPOConfig(distill=0.3, skill=0.5, n_min=1, trust_slope=1.0, kl=0.1, entropy=0.01)


def policies() -> tuple[Policy, Policy]:
    return random_policy(len(TOKENIZER), 1), random_policy(len(TOKENIZER), 2)


def sampled(engine: HFEngine, prompt: tuple[int, ...], seed: int, tokens: int) -> Completion:
    return engine.generate([Prompt(prompt, tokens, 1.0, seed, CODEC.stop_ids)])[0]


def episode(
    engine: HFEngine, task: Task, index: int, success: bool, skill: Skill | None = None
) -> Trajectory:
    """A real sampled conversation of one to four turns."""
    rng = random.Random(f"{task.id}{index}{skill is not None}")
    opening = f"Your question: {task.id}?\nAnswer."
    ids, anchor = CODEC.start(opening, skill.text if skill else "")
    turns = []
    for k in range(rng.randint(1, 4)):
        completion = sampled(engine, ids, rng.randrange(10**6), rng.randint(1, 9))
        turns.append(Turn(ids, anchor, completion, "a", "seen", 0.0, True))
        ids = CODEC.extend(ids + completion.ids, f"seen {k}")
    return Trajectory(
        task, index, tuple(turns), success, float(success), Stop.DONE, 4, opening, skill
    )


def iteration(policy: Policy, broken: int = 0) -> Iteration:
    """Three tasks of two types with skills (one of them invalid), replays and gains."""
    engine = HFEngine(policy, TOKENIZER)
    tasks = [Task(f"t{i}", "toy", f"type{i % 2}", {}) for i in range(3)]
    it = Iteration(0, tasks, Metrics())
    for i, task in enumerate(tasks):
        played = [episode(engine, task, k, success=(k + i) % 3 == 0) for k in range(4)]
        for k in range(broken):
            played[k] = replace(played[k], stop=Stop.ERROR, success=False, score=0.0)
        it.groups.append(RolloutGroup(task, tuple(played)))
        prompt = CODEC.start(f"Your question: write {task.id}")[0]
        skill = WrittenSkill(
            task,
            "look first, then answer it now",
            "procedural",
            "too short" if i == 2 else "",
            trajectory=played[-1],
            prompt_ids=prompt,
            completion=sampled(engine, prompt, i, 12),
        )
        it.skills.append(skill)
        if skill.valid:
            treated = tuple(episode(engine, task, k, success=True, skill=skill) for k in range(2))
            it.replays.append(ReplayResult(skill, treated, tuple(played[2:]), 0.25 * (i + 1), 0.01))
    return it


def module(algorithm: Algorithm, it: Iteration, policy: Policy, reference: Policy) -> PolicyModule:
    m = PolicyModule(policy, algorithm, RunConfig(), None, reference)  # type: ignore[arg-type]
    m.iteration = it
    return m


def rows_of(m: PolicyModule) -> list[Sample]:
    return m.score(m.algorithm.credit(m.iteration, m.algorithm.statistics(m.iteration)))


def gradient(m: PolicyModule, samples: list[Sample], micro: int) -> Tensor:
    m.policy.zero_grad()
    for part in m.micro_batches(samples, 1, micro):
        m.objective(part).backward()
    return torch.cat([p.grad.flatten() for p in m.policy.parameters() if p.grad is not None])


MAKE: dict[str, Callable[[], Algorithm]] = {
    "grpo": lambda: GRPO(GRPOConfig(kl=0.1, entropy=0.01), 0),
    "rsipo": lambda: RSIPO(RSIPO_ALL, 0, CODEC),
    "rsipo-ungated": lambda: RSIPO(replace(RSIPO_ALL, gate="none"), 0, CODEC),
    "only-distill": lambda: RSIPO(replace(RSIPO_ALL, skill=0, kl=0, entropy=0), 0, CODEC),
    "replay-grpo": lambda: RSIPO(replace(RSIPO_ALL, replay_grpo=True), 0, CODEC),
}


@pytest.mark.parametrize("name", MAKE)
def test_micro_batches_order_and_padding_do_not_matter(name: str) -> None:
    """Lessons case 4: gradient of 1, 2, 3, 50 micro-batches (some empty), shuffled rows, one row at
    a time.
    """
    policy, reference = policies()
    m = module(MAKE[name](), iteration(policy), policy, reference)
    samples = rows_of(m)
    whole = gradient(m, samples, 1)
    assert whole.norm() > 1e-4
    for micro in (2, 3, 50):
        assert torch.allclose(
            gradient(m, samples, micro), whole, rtol=1e-4, atol=1e-6 * float(whole.norm())
        )
    random.Random(0).shuffle(samples)
    assert torch.allclose(
        gradient(m, samples, 2), whole, rtol=1e-4, atol=1e-6 * float(whole.norm())
    )


@pytest.mark.parametrize("name", MAKE)
def test_each_stream_alone_is_invariant(name: str) -> None:
    """A wrong denominator of a small term would hide in the sum."""
    policy, reference = policies()
    m = module(MAKE[name](), iteration(policy), policy, reference)
    samples, streams = rows_of(m), m.streams
    for stream in streams:
        m.streams = {stream: streams[stream]}
        one, many = gradient(m, samples, 1), gradient(m, samples, 7)
        assert torch.allclose(one, many, rtol=1e-4, atol=1e-5 * float(one.norm()) + 1e-12), stream


def forked(t: Trajectory) -> Trajectory:
    """The same turns under prompts that do not extend one another, so that each is a row."""
    turns = tuple(replace(x, prompt_ids=(k + 5, *x.prompt_ids)) for k, x in enumerate(t.turns))
    return replace(t, turns=turns)


def test_weights_do_not_depend_on_the_number_of_rows() -> None:
    """Lessons case 1: a trajectory cut into rows keeps its tokens, advantages and total weight."""
    policy, _ = policies()
    it = iteration(policy)
    algorithm = GRPO(GRPOConfig(reduction="seq_mean"), 0)
    whole = algorithm.credit(it, {})
    it.groups = [RolloutGroup(g.task, tuple(map(forked, g.trajectories))) for g in it.groups]
    cut = algorithm.credit(it, {})
    assert len(cut) > len(whole)
    for get in (
        lambda s: s.credits["actor"].weight,
        lambda s: s.credits["actor"].value,
        lambda s: s.engine_logprobs,
    ):
        assert torch.equal(torch.cat([get(s) for s in whole]), torch.cat([get(s) for s in cut]))


def test_broken_episodes_leave_statistics_and_loss() -> None:
    policy, _ = policies()
    it = iteration(policy, broken=1)
    samples = GRPO(GRPOConfig(), 0).credit(it, {})
    assert len(samples) == 9
    values = [float(s.credits["actor"].value[0]) for s in samples[:3]]
    assert values == pytest.approx(
        [-0.57735, -0.57735, 1.1547], abs=1e-3
    )  # scores 0, 0, 1 of the three left


def test_engine_and_trainer_agree_and_the_empty_teacher_is_the_student() -> None:
    """fp32: engine log-probs == trainer's within 1e-5; a view without a skill scores as the student
    does.
    """
    policy, reference = policies()
    m = module(MAKE["grpo"](), iteration(policy), policy, reference)
    samples = m.algorithm.credit(m.iteration, {})
    from rsipo_lightning.tokens import with_skill

    samples = [replace(s, views={"teacher": with_skill(s, ())}) for s in samples]
    for s in m.score(samples):
        assert torch.allclose(s.scores["teacher"], s.engine_logprobs, atol=1e-5)


def test_rsipo_with_its_terms_off_is_grpo() -> None:
    policy, reference = policies()
    base = {"kl": 0.1, "entropy": 0.01}
    off = RSIPO(RSIPOConfig(**base, distill=0, skill=0, trust=False), 0, CODEC)
    it = iteration(policy)
    it.skills, it.replays = [], []
    assert off.propose(it) == []
    assert off.plan(it) == []
    a, b = (module(x, it, policy, reference) for x in (off, GRPO(GRPOConfig(**base), 0)))
    assert torch.equal(gradient(a, rows_of(a), 2), gradient(b, rows_of(b), 2))


def test_teacher_scores_belong_to_the_skill_prompt() -> None:
    """The teacher view is exactly the prompt that a replay acts on: ids with the section at the
    anchor.
    """
    policy, reference = policies()
    m = module(MAKE["rsipo"](), iteration(policy), policy, reference)
    group, skill = m.iteration.groups[0], m.iteration.skills[0]
    sample = next(s for s in rows_of(m) if "teacher" in s.views)
    view = sample.views["teacher"]
    opening = CODEC.start(group.trajectories[0].opening, skill.text)[0]
    assert tuple(view.ids[: len(opening)].tolist()) == opening
    assert torch.equal(view.ids[view.mask], sample.ids[sample.mask])
    with torch.no_grad():
        alone = m.policy(view.ids[None], view.mask[None], torch.ones(sample.n))[0]
    assert torch.allclose(sample.scores["teacher"], alone, atol=1e-5)
    assert not torch.allclose(sample.scores["teacher"], sample.engine_logprobs, atol=1e-2)
