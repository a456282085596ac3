"""RSIPO's decisions, worked out by hand (methods.md section 6)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rsipo_lightning.algorithms.base import active
from rsipo_lightning.algorithms.rsipo import RSIPO, RSIPOConfig
from rsipo_lightning.bank import SkillBank
from rsipo_lightning.codec import Codec
from rsipo_lightning.config import RolloutSection
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.testing import byte_tokenizer, toy_group
from rsipo_lightning.types import (
    Completion,
    Iteration,
    ReplayResult,
    RolloutGroup,
    Skill,
    SkillRequest,
    WrittenSkill,
)

CODEC = Codec(byte_tokenizer())


def group(name: str, outcomes: str, kind: str = "a") -> RolloutGroup:
    return toy_group(name, outcomes, kind)


def skill(g: RolloutGroup, invalid: str = "") -> WrittenSkill:
    return WrittenSkill(
        g.task,
        "look first, then answer",
        "procedural",
        invalid,
        trajectory=g.trajectories[0],
        prompt_ids=(1, 2),
        completion=Completion((6, 7, 8, 9), (-1.0,) * 4, "x", False, 0),
    )


def result(g: RolloutGroup, gain: float | None, noise: float | None = 0.01) -> ReplayResult:
    return ReplayResult(
        skill(g), g.trajectories[:2], g.trajectories[2:], gain, noise if gain is not None else None
    )


def iteration(
    groups: list[RolloutGroup], gains: list[float | str | None], update: int = 0
) -> Iteration:
    """A gain per task; a string is the reason of an invalid skill."""
    it = Iteration(update, [g.task for g in groups], Metrics())
    it.groups = groups
    for g, gain in zip(groups, gains, strict=True):
        it.skills.append(skill(g, gain if isinstance(gain, str) else ""))
        if not isinstance(gain, str):
            it.replays.append(result(g, gain))
    return it


def rsipo(**keys: object) -> RSIPO:
    return RSIPO(RSIPOConfig(**{"n_min": 1, "kl": 0.0, "entropy": 0.0, **keys}), 0, CODEC)  # type: ignore[arg-type]


def test_split_does_not_look_at_outcomes_and_is_fair() -> None:
    """The same halves whatever the outcomes; over many tasks each rollout is evidence half of the
    time.
    """
    algorithm, counts = rsipo(), Counter[int]()
    for i in range(400):
        a = algorithm.halves(group(f"t{i}", "11110000"), 3)
        b = algorithm.halves(group(f"t{i}", "00001111"), 3)
        assert [[t.index for t in half] for half in a] == [[t.index for t in half] for half in b]
        assert sorted(t.index for half in a for t in half) == list(range(8))
        assert len(a[0]) == len(a[1]) == 4
        counts.update(t.index for t in a[0])
    assert all(150 < counts[i] < 250 for i in range(8))
    one, other = (algorithm.halves(group("t0", "11110000"), update)[0] for update in (3, 4))
    assert [t.index for t in one] != [t.index for t in other]


def test_a_success_of_the_evidence_half_is_preferred() -> None:
    algorithm = rsipo()
    for i in range(60):
        g = group(f"t{i}", "11000000")
        it = iteration([g], [0.0])
        (request,) = algorithm.propose(it)
        assert isinstance(request, SkillRequest)
        evidence, _ = algorithm.halves(g, 0)
        assert request.trajectory in evidence
        assert request.trajectory.success == any(t.success for t in evidence)


def test_controls_are_the_other_half_without_broken_episodes() -> None:
    algorithm = rsipo()
    g = group("t", "1e0e1100")
    (plan,) = algorithm.plan(iteration([g], [None]))
    evidence, control = algorithm.halves(g, 0)
    assert list(plan.control) == control
    assert not {t.index for t in control} & {t.index for t in evidence}
    assert all(t.scored for t in control)
    assert (plan.n, plan.length_penalty) == (4, 0.5)
    (plan,) = rsipo(replays=6, length_penalty=0.0).plan(iteration([g], [None]))
    assert (plan.n, plan.length_penalty) == (6, 0.0)


def test_success_first_is_an_ablation() -> None:
    algorithm = rsipo(split="success_first")
    assert all(
        any(t.success for t in algorithm.halves(group(f"t{i}", "00000001"), 0)[0])
        for i in range(30)
    )


def test_rewards_are_centred_by_the_lagged_type_mean() -> None:
    """First occurrence: leave-one-out mean of the type in the batch, 0 if alone; then the mean
    before the update.
    """
    algorithm = rsipo(invalid_penalty=0.5)
    groups = [group("x", "10"), group("y", "10"), group("z", "10", "b"), group("w", "10", "b")]
    it = iteration(groups, [0.5, 0.1, 0.3, "too short"])
    sums = algorithm.statistics(it)
    assert algorithm.rewards(it, sums) == pytest.approx({"x": 0.4, "y": -0.4, "z": 0.3, "w": -0.5})
    algorithm.credit(it, sums)
    it2 = iteration([group("v", "10")], [0.9], update=1)
    assert algorithm.rewards(it2, algorithm.statistics(it2)) == pytest.approx({"v": 0.9 - 0.3})


@pytest.mark.parametrize(("center", "expected"), [("global", 0.9 - 0.3), ("none", 0.9)])
def test_other_centres(center: str, expected: float) -> None:
    algorithm = rsipo(reward_center=center)
    it = iteration([group("x", "10"), group("z", "10", "b")], [0.5, 0.1])
    algorithm.credit(it, algorithm.statistics(it))
    it2 = iteration([group("v", "10")], [0.9], update=1)
    assert algorithm.rewards(it2, algorithm.statistics(it2)) == pytest.approx({"v": expected})


def test_invalid_skills_are_in_no_statistic_and_teach_nothing() -> None:
    """Pitfall 22: no replay is not a gain of 0."""
    algorithm = rsipo()
    it = iteration([group("x", "1010"), group("y", "1010")], [0.5, "no JSON"])
    sums = algorithm.statistics(it)
    assert sums["a"] == pytest.approx((1.0, 0.5, 0.25, 0.01))
    samples = algorithm.credit(it, sums)
    assert "y" not in it.trust
    assert sum("teacher" in s.credits for s in samples) == 4
    assert sum("teacher" in s.views for s in samples) == 4


def test_omega_is_a_value_not_a_weight() -> None:
    """Settled 1: trust does not cancel out, it is not in the denominator."""
    algorithm = rsipo(shrink=False)
    it = iteration([group("x", "1010"), group("y", "1010")], [0.25, -0.4])
    samples = algorithm.credit(it, algorithm.statistics(it))
    teacher = [s.credits["teacher"] for s in samples if "teacher" in s.credits]
    assert {float(w) for c in teacher for w in c.weight} == {1.0}
    assert [float(c.value[0]) for c in teacher] == pytest.approx([1.5] * 4 + [0.2] * 4)
    assert it.trust == pytest.approx({"x": 1.5, "y": 0.2})


@pytest.mark.parametrize(
    ("gain", "omega"), [(-0.9, 0.0), (-0.5, 0.0), (0.0, 1.0), (0.2, 1.4), (0.5, 2.0), (0.9, 2.0)]
)
def test_trust_is_clipped(gain: float, omega: float) -> None:
    algorithm = rsipo(shrink=False)
    it = iteration([group("x", "10")], [gain])
    algorithm.credit(it, algorithm.statistics(it))
    assert it.trust["x"] == pytest.approx(omega)


def test_trust_waits_for_n_min_and_can_be_off() -> None:
    for keys, expected in (
        ({"n_min": 3}, 1.0),
        ({"n_min": 2}, 1.6),
        ({"trust": False}, 1.0),
        ({"trust_slope": 0.0}, 1.0),
    ):
        algorithm = rsipo(shrink=False, **{"n_min": 1, **keys})
        it = iteration([group("x", "10"), group("y", "10")], [0.3, 0.1])
        algorithm.credit(it, algorithm.statistics(it))
        assert it.trust["x"] == pytest.approx(expected), keys


def test_shrunk_trust() -> None:
    """Gains .5, .1 with s^2 = .01: m .3, M2 .13, tau^2 = .13 - .09 - .01 = .03, B = .75, g = .45,
    .15.
    """
    algorithm = rsipo()
    it = iteration([group("x", "10"), group("y", "10")], [0.5, 0.1])
    algorithm.credit(it, algorithm.statistics(it))
    assert it.trust == pytest.approx({"x": 1.9, "y": 1.3})
    row = it.metrics.reduce()
    assert row["trust/omega_abs_dev_mean"] == pytest.approx(0.6)
    shrinkage = {"type_gain": 0.3, "tau2": 0.03, "noise": 0.01, "kept": 0.75}
    assert {name: row[f"trust/{name}_mean"] for name in shrinkage} == pytest.approx(shrinkage)


def test_a_lost_gain_trusts_the_type_and_rewards_nothing() -> None:
    algorithm = rsipo()
    it = iteration([group("x", "10"), group("y", "10")], [0.2, None])
    sums = algorithm.statistics(it)
    assert "y" not in algorithm.rewards(it, sums)
    samples = algorithm.credit(it, sums)
    assert it.trust["y"] == pytest.approx(1.4)
    assert sum("writer" in s.credits for s in samples) == 1


def test_skill_loss_is_a_mean_over_skills_of_token_means() -> None:
    algorithm = rsipo()
    it = iteration([group("x", "10"), group("y", "10")], [0.5, "bad"])
    writers = [
        s.credits["writer"]
        for s in algorithm.credit(it, algorithm.statistics(it))
        if "writer" in s.credits
    ]
    assert [w.weight.tolist() for w in writers] == [[0.25] * 4] * 2
    assert [float(w.value[0]) for w in writers] == pytest.approx([0.5, -0.5])


def test_ablation_switches_change_what_is_asked_for() -> None:
    it = iteration([group("x", "1010")], [0.3])
    on = rsipo()
    assert len(on.propose(it)) == len(on.plan(it)) == 1
    sft_arm = rsipo(trust=False, skill=0.0)  # own skills, omega 1: no replay is needed
    assert (len(sft_arm.propose(it)), len(sft_arm.plan(it))) == (1, 0)
    evolution_only = rsipo(trust=False)
    assert len(evolution_only.plan(it)) == 1
    grpo = rsipo(trust=False, skill=0.0, distill=0.0)
    assert grpo.propose(it) == grpo.plan(it) == []
    replays = rsipo(replay_grpo=True)
    assert (
        len(replays.credit(it, replays.statistics(it))) == len(on.credit(it, on.statistics(it))) + 2
    )


def test_a_bank_gives_each_task_the_skill_of_its_type_and_nothing_is_written() -> None:
    bank = SkillBank("here", ("- general",), {"a": ("- for a",), "b": ("- for b",)}, {})
    keys = RSIPOConfig(skill_source="bank", n_min=1, kl=0.0, entropy=0.0)
    algorithm = RSIPO(keys, 0, CODEC, bank)
    assert RSIPO.uses_bank(keys)
    assert not RSIPO.uses_bank(RSIPOConfig())
    assert "writer" not in active(algorithm.streams)
    groups = [group("x", "1010"), group("y", "eeee"), group("z", "1010", "b")]
    it = Iteration(0, [g.task for g in groups], Metrics())
    it.groups = groups
    skills = [p for p in algorithm.propose(it) if isinstance(p, Skill)]
    assert [(s.task.id, s.text) for s in skills] == [
        ("x", "General skills:\n- general\n\nSkills for a:\n- for a"),
        ("z", "General skills:\n- general\n\nSkills for b:\n- for b"),
    ]
    it.skills = skills
    plans = algorithm.plan(it)
    assert [(p.skill, p.n, len(p.control)) for p in plans] == [(s, 4, 2) for s in skills]
    it.replays = [replace(result(groups[0], 0.25), skill=s) for s in skills]
    samples = algorithm.credit(it, algorithm.statistics(it))
    assert not any("writer" in s.credits for s in samples)
    assert it.trust == pytest.approx({"x": 1.5, "z": 1.5})
    section = CODEC.section_ids(skills[0].text)
    assert [len(s.views["teacher"].ids) - len(s.ids) for s in samples[:4]] == [len(section)] * 4


def test_without_trust_a_bank_needs_no_replays() -> None:
    """OPSD with a static bank, as in the ablation arms of section 8."""
    bank = SkillBank("here", ("- general",), {"a": ("- for a",)}, {})
    keys = RSIPOConfig(skill_source="bank", trust=False)
    it = iteration([group("x", "1010")], [None])
    algorithm = RSIPO(keys, 0, CODEC, bank)
    assert (len(algorithm.propose(it)), algorithm.plan(it)) == (1, [])


def test_state_round_trip() -> None:
    one, other = rsipo(), rsipo()
    it = iteration([group("x", "10"), group("y", "10")], [0.5, 0.1])
    one.credit(it, one.statistics(it))
    other.load_state_dict(one.state_dict())
    nxt = iteration([group("v", "10")], [0.9], update=1)
    nxt_copy = iteration([group("v", "10")], [0.9], update=1)
    one.credit(nxt, one.statistics(nxt))
    other.credit(nxt_copy, other.statistics(nxt_copy))
    assert nxt.trust == nxt_copy.trust
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("size", [2, 5, 7])
def test_odd_or_small_groups_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"rollout.group={size}.*even number"):
        RSIPO.check(RSIPOConfig(), RolloutSection(group=size))
    RSIPO.check(RSIPOConfig(), RolloutSection(group=4))


@pytest.mark.parametrize(
    "bad",
    [
        {"gate": "soft"},
        {"skill_source": "file"},
        {"replays": 1},
        {"length_penalty": 1.5},
        {"distill": -1.0},
        {"decay": 1.0},
        {"noise": "x"},
    ],
)
def test_bad_keys(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"algo.{next(iter(bad))}="):
        RSIPOConfig(**bad)  # type: ignore[arg-type]


def test_broken_evidence_asks_for_no_skill() -> None:
    it = iteration([replace(group("x", "eeee"))], [None])
    assert rsipo().propose(it) == []
