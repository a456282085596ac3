"""The update is a function of the trajectories, not of how they are cut, ordered or padded.

For every registered algorithm.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rsipo_lightning import registry
from rsipo_lightning.algorithms.base import Algorithm
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RunConfig
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.testing import ToyWorld, byte_tokenizer, make_algorithm, random_policy
from rsipo_lightning.tokens import with_skill
from rsipo_lightning.types import Iteration, RolloutGroup, Sample, Trajectory

TOKENIZER = byte_tokenizer(["Your question: where was the director of the film born?"] * 9)
CODEC = Codec(TOKENIZER)
NAMES = registry.names("algorithms")
# So large that a mistake of any term shows.
STRONG = {"kl": 0.1, "entropy": 0.01, "distill": 0.3, "skill": 0.5, "n_min": 1, "trust_slope": 1.0}
STRONG |= {"episode": 0.3, "step": 0.4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in NAMES},
    "rsipo, ungated": ("rsipo", {"gate": "none"}),
    "rsipo, replays": ("rsipo", {"replay_grpo": True}),
    "grpo_opsd, code": ("grpo_opsd", {"reading": "code"}),
    "skill_sd, own skills": ("skill_sd", {"skill_source": "trajectory"}),
    "step_opsd, actions": ("step_opsd", {"span": "action", "placement": "raw_suffix"}),
    "opid, additive": ("opid", {"routing": "additive"}),
    "grpo, seq_mean": ("grpo", {"reduction": "seq_mean"}),
}
TRAINED = [v for v, (name, _) in VARIANTS.items() if make_algorithm(name).streams]
POLICY, REFERENCE = random_policy(len(TOKENIZER), 1), random_policy(len(TOKENIZER), 2)
WORLD = ToyWorld(POLICY, TOKENIZER)


def make(variant: str, **more: Any) -> Algorithm[Any]:
    name, keys = VARIANTS[variant]
    known = {f.name for f in fields(registry.load("algorithms", name).Config)}
    strong = {key: value for key, value in STRONG.items() if key in known}
    return make_algorithm(name, CODEC, **{**strong, **keys, **more})


def module(algorithm: Algorithm[Any], it: Iteration) -> PolicyModule:
    m = PolicyModule(POLICY, algorithm, RunConfig(), None, REFERENCE)  # type: ignore[arg-type]
    m.iteration = it
    return m


def gradient(m: PolicyModule, samples: list[Sample], micro: int) -> Tensor:
    m.policy.zero_grad()
    for part in m.micro_batches(samples, 1, micro):
        m.objective(part).backward()
    return torch.cat([p.grad.flatten() for p in m.policy.parameters() if p.grad is not None])


def update(algorithm: Algorithm[Any], number: int = 0, micro: int = 2) -> Tensor:
    """The gradient of an iteration, from rollouts on."""
    m = module(algorithm, WORLD.iteration(algorithm, number))
    return gradient(m, m.samples(m.iteration), micro)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(one.norm()) + 1e-12)


@pytest.mark.parametrize("variant", TRAINED)
def test_micro_batches_order_and_padding_do_not_matter(variant: str) -> None:
    """Lessons case 4: gradients of 1, 3, 9 micro-batches (some empty), shuffled rows; and of each
    term alone, since a wrong denominator of a small term would hide in the sum.
    """
    algorithm = make(variant)
    m = module(algorithm, WORLD.iteration(algorithm))
    samples, streams = m.samples(m.iteration), m.streams
    whole = gradient(m, samples, 1)
    assert whole.norm() > 1e-4
    for micro in (3, 9):
        assert close(whole, gradient(m, samples, micro))
    random.Random(0).shuffle(samples)
    assert close(whole, gradient(m, samples, 2))
    for stream in streams:
        m.streams = {stream: streams[stream]}
        assert close(gradient(m, samples, 1), gradient(m, samples, 3)), stream


def forked(t: Trajectory) -> Trajectory:
    """The same turns under prompts that do not extend one another, so that each is a row."""
    turns = tuple(replace(x, prompt_ids=(k + 5, *x.prompt_ids)) for k, x in enumerate(t.turns))
    return replace(t, turns=turns)


def shaped(algorithm: Algorithm[Any], it: Iteration) -> list[Sample]:
    """Credits after ``shape``, with scores that depend on a token's turn and id alone."""
    samples = algorithm.credit(it, algorithm.statistics(it))
    scored = []
    for s in samples:
        token = s.ids[s.mask] + 7.0 * s.turn
        scores = {"old": -1 - torch.sin(token)}
        for i, (name, view) in enumerate(sorted(s.views.items())):
            score = torch.full((s.n,), torch.nan)
            score[view.index] = -1 - torch.cos(token[view.index] + (i == 0))
            scores[name] = score
        scored.append(replace(s, scores=scores))
    return algorithm.shape(scored, it)


@pytest.mark.parametrize("variant", TRAINED)
def test_weights_and_values_do_not_depend_on_the_number_of_rows(variant: str) -> None:
    """Lessons case 1: a trajectory cut into rows keeps its tokens, advantages and total weight."""
    algorithm, again = make(variant), make(variant)
    it = WORLD.iteration(algorithm)
    whole = shaped(algorithm, it)
    same = {id(t): forked(t) for g in it.groups for t in g.trajectories}
    it.groups = [
        RolloutGroup(g.task, tuple(same[id(t)] for t in g.trajectories)) for g in it.groups
    ]
    it.skills = [
        replace(s, trajectory=same[id(s.trajectory)]) if s.trajectory else s for s in it.skills
    ]
    it.replays = [
        replace(r, skill=replace(r.skill), treated=tuple(map(forked, r.treated)))
        for r in it.replays
    ]
    it.trust = {}
    cut = shaped(again, it)
    assert len(cut) > len(whole)
    assert {n for s in cut for n in s.credits} == {n for s in whole for n in s.credits}
    for name in {n for s in whole for n in s.credits}:
        for field in ("weight", "value"):
            one, other = (
                torch.cat([getattr(s.credits[name], field) for s in rows if name in s.credits])
                for rows in (whole, cut)
            )
            assert torch.allclose(one, other, atol=1e-6), (name, field)


SAME: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    # an algorithm and its keys, and what it must be bit for bit (methods.md 13 b)
    ("rsipo", {"distill": 0.0, "skill": 0.0, "trust": False}, "grpo", {}),
    ("rsipo", {"trust_slope": 0.0}, "rsipo", {"trust": False}),  # kappa 0: omega is 1
    ("rsipo", {"skill_source": "bank", "trust": False}, "sdar", {}),
    ("rsipo", {"skill_source": "bank", "trust": False, "gate": "none"}, "grpo_opsd", {}),
    ("sdar", {"distill": 0.0}, "grpo", {}),
    ("sdar", {"gate_beta": 0.0}, "grpo_opsd, code", {}),
    ("grpo_opsd", {"distill": 0.0}, "grpo", {}),
    ("skill_sd", {"distill": 0.0}, "grpo", {}),
    ("seed", {"distill": 0.0}, "grpo", {}),
    ("seed", {"skill_source": "bank"}, "sdar", {}),
    ("rlsd", {"lam": 0.0}, "grpo", {}),
    ("rlsd", {"bound": 0.0}, "grpo", {}),  # w is 1
    ("step_opsd", {"lam": 0.0}, "grpo", {}),
    ("opid", {"episode": 0.0, "step": 0.0}, "grpo", {}),
    ("dapo", {"clip_high": 0.2, "filter": False}, "grpo", {}),
    ("gigpo", {"step": 0.0}, "grpo", {}),
]


@pytest.mark.parametrize(("one", "keys", "other", "others"), SAME)
def test_reductions_hold_bit_for_bit(
    one: str, keys: dict[str, Any], other: str, others: dict[str, Any]
) -> None:
    a, b = update(make(one, **keys)), update(make(other, **others))
    assert torch.equal(a, b)


def test_opsd_is_sdar_without_its_policy_gradient() -> None:
    sdar = make("sdar")
    m = module(sdar, WORLD.iteration(sdar))
    m.streams.pop("actor")
    assert torch.equal(update(make("opsd")), gradient(m, m.samples(m.iteration), 2))


@pytest.mark.parametrize(("name", "updates"), [("rlsd", 100), ("step_opsd", 50)])
def test_what_fades_is_grpo_in_the_end(name: str, updates: int) -> None:
    """Bit for bit, and no view is scored any more."""
    it = WORLD.iteration(make(name), updates)
    assert not any(s.views for s in make(name).credit(it, {}))
    assert torch.equal(update(make(name), updates), update(make("grpo"), updates))
    assert not torch.equal(update(make(name), updates - 1), update(make("grpo"), updates - 1))


@pytest.mark.parametrize("variant", sorted(set(TRAINED) - {"grpo"}))
def test_defaults_are_not_grpo(variant: str) -> None:
    """Else the reductions above would say nothing."""
    name, keys = VARIANTS[variant]
    assert not torch.equal(update(make_algorithm(name, CODEC, **keys)), update(make("grpo")))


def test_broken_episodes_leave_statistics_and_loss() -> None:
    algorithm = make("grpo")
    samples = algorithm.credit(WORLD.iteration(algorithm, broken=1), {})
    assert len(samples) == 9
    values = [float(s.credits["actor"].value[0]) for s in samples[:3]]
    assert values == pytest.approx(
        [-0.57735, -0.57735, 1.1547], abs=1e-3
    )  # scores 0, 0, 1 of the three left


def test_engine_and_trainer_agree_and_the_empty_teacher_is_the_student() -> None:
    """fp32: engine log-probs == trainer's within 1e-5; a view without a skill scores as the student
    does.
    """
    algorithm = make("grpo")
    m = module(algorithm, WORLD.iteration(algorithm))
    samples = m.algorithm.credit(m.iteration, {})
    samples = [replace(s, views={"teacher": with_skill(s, ())}) for s in samples]
    for s in m.score(samples):
        assert torch.allclose(s.scores["teacher"], s.engine_logprobs, atol=1e-5)


def alone(m: PolicyModule, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of one row in a forward of its own."""
    with torch.no_grad():
        return m.policy(ids[None], mask[None], torch.ones(int(mask.sum())))[0]


@pytest.mark.parametrize("name", ["rsipo", "seed", "sdar"])
def test_teacher_scores_belong_to_the_skill_prompt(name: str) -> None:
    """The teacher view is exactly the prompt that a replay acts on: ids with the section at the
    anchor; the sampled ids are the student's.
    """
    algorithm = make(name)
    m = module(algorithm, it := WORLD.iteration(algorithm))
    sample = next(s for s in m.samples(it) if "teacher" in s.views)
    view, trajectory = sample.views["teacher"], it.groups[0].trajectories[0]
    skill = algorithm.bank.text("type0") if algorithm.bank else it.skills[0].text
    opening = CODEC.start(trajectory.opening, skill)[0]
    assert tuple(view.ids[: len(opening)].tolist()) == opening
    assert torch.equal(view.ids[view.mask], sample.ids[sample.mask])
    score = alone(m, view.ids, view.mask)
    assert torch.allclose(sample.scores["teacher"], score, atol=1e-5)
    assert not torch.allclose(score, sample.engine_logprobs, atol=1e-2)
