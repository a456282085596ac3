"""The update is a function of the trajectories, not of how they are cut, ordered or padded.

For every registered algorithm.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rsipo_lightning import registry
from rsipo_lightning.algorithms.base import Algorithm
from rsipo_lightning.module import PolicyModule
from rsipo_lightning.testing import check_algorithm, gradient, make_algorithm, toy_world
from rsipo_lightning.tokens import with_skill

WORLD = toy_world()
CODEC = WORLD.codec
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


def keys_of(variant: str, **more: Any) -> tuple[str, dict[str, Any]]:
    name, keys = VARIANTS[variant]
    known = {f.name for f in fields(registry.load("algorithms", name).Config)}
    strong = {key: value for key, value in STRONG.items() if key in known}
    return name, {**strong, **keys, **more}


def make(variant: str, **more: Any) -> Algorithm[Any]:
    name, keys = keys_of(variant, **more)
    return make_algorithm(name, CODEC, **keys)


def update(algorithm: Algorithm[Any], number: int = 0, micro: int = 2) -> Tensor:
    """The gradient of an iteration, from rollouts on."""
    m = WORLD.module(algorithm, WORLD.iteration(algorithm, number))
    return gradient(m, m.samples(m.iteration), micro)


@pytest.mark.parametrize("variant", VARIANTS)
def test_contract(variant: str) -> None:
    """Pure hooks; no dependence on rows and micro-batches (lessons cases 1 and 4); and so on."""
    name, keys = keys_of(variant)
    check_algorithm(name, **keys)


@pytest.mark.parametrize("variant", TRAINED)
def test_an_update_changes_something(variant: str) -> None:
    """Else the contract would say little."""
    assert update(make(variant)).norm() > 1e-4


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
    m = WORLD.module(sdar, WORLD.iteration(sdar))
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
    one, grpo = (make_algorithm(n, CODEC, **k) for n, k in ((name, keys), ("grpo", {})))
    assert not torch.equal(update(one), update(grpo))


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
    m = WORLD.module(algorithm, WORLD.iteration(algorithm))
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
    m = WORLD.module(algorithm, it := WORLD.iteration(algorithm))
    sample = next(s for s in m.samples(it) if "teacher" in s.views)
    view, trajectory = sample.views["teacher"], it.groups[0].trajectories[0]
    skill = algorithm.bank.text("type0") if algorithm.bank else it.skills[0].text
    opening = CODEC.start(trajectory.opening, skill)[0]
    assert tuple(view.ids[: len(opening)].tolist()) == opening
    assert torch.equal(view.ids[view.mask], sample.ids[sample.mask])
    score = alone(m, view.ids, view.mask)
    assert torch.allclose(sample.scores["teacher"], score, atol=1e-5)
    assert not torch.allclose(score, sample.engine_logprobs, atol=1e-2)
