"""What each method computes, worked out by hand (methods.md section 5)."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch

from rsipo_lightning.algorithms.base import active
from rsipo_lightning.algorithms.credit import fading
from rsipo_lightning.algorithms.step_opsd import budgeted, hindsight
from rsipo_lightning.codec import Codec
from rsipo_lightning.errors import ConfigError
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.registry import load
from rsipo_lightning.testing import BANK, byte_tokenizer, make_algorithm, toy_group
from rsipo_lightning.tokens import TokenBatch, constant, rows, with_credit
from rsipo_lightning.types import (
    Completion,
    Iteration,
    RolloutGroup,
    Sample,
    Skill,
    SkillRequest,
    Trajectory,
    Turn,
)

CODEC = Codec(byte_tokenizer())


def iteration(*groups: RolloutGroup, update: int = 0) -> Iteration:
    it = Iteration(update, [g.task for g in groups], Metrics())
    it.groups = list(groups)
    return it


def conversation(group: RolloutGroup, index: int, said: tuple[str, ...]) -> Trajectory:
    """The trajectory with these responses, as the rollout loop would build it."""
    old = group.trajectories[index]
    ids, anchor = CODEC.start(f"{old.opening}\nAnswer.")
    turns = []
    for k, text in enumerate(said):
        tokens = CODEC.encode(text)
        completion = Completion(tokens, (-1.0,) * len(tokens), text, False, 0)
        turns.append(Turn(ids, anchor, completion, text, f"seen {k}", 0.0, True))
        ids = CODEC.extend(ids + tokens, f"seen {k}")
    return replace(old, turns=tuple(turns))


def values(samples: list[Sample], stream: str = "actor") -> list[float]:
    return [float(s.credits[stream].value[0]) for s in samples]


def credit(name: str, it: Iteration, **keys: Any) -> list[Sample]:
    return make_algorithm(name, CODEC, **keys).credit(it, {})


def scored(sample: Sample, old: list[float], **views: list[float]) -> Sample:
    scores = {name: torch.tensor(x) for name, x in {"old": old, **views}.items()}
    return replace(sample, scores=scores)


DEFAULTS: dict[str, dict[str, Any]] = {  # methods.md 7.1, 7.2 and 5.14
    "grpo": {"clip": 0.2, "dual_clip": 3.0, "kl": 0.01, "entropy": 0.001, "adv_norm": "mean_std"},
    "sdar": {"distill": 0.01, "gate_beta": 5.0},
    "opsd": {"distill": 0.01, "gate_beta": 5.0},
    "grpo_opsd": {"distill": 0.01, "reading": "paper"},
    "skill_sd": {"distill": 0.001, "skill_source": "bank"},
    "rlsd": {"lam": 0.5, "lam_updates": 100, "bound": 0.2},
    "step_opsd": {"bound": 0.2, "lam": 0.2, "lam_updates": 50, "refresh": 10, "budget": True},
    "opid": {"episode": 0.001, "step": 0.001, "routing": "step_priority", "step_skills": 5}
    | {"attempts": 2, "skill_temperature": 0.4},
    "seed": {"distill": 0.01, "gate_beta": 5.0, "skill_temperature": 0.0},
    "dapo": {"clip": 0.2, "clip_high": 0.28, "max_batches": 10},
    "gspo": {"clip": 3e-4, "clip_high": 4e-4, "reduction": "seq_mean"},
    "gigpo": {"step": 1.0, "gamma": 0.95},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name: str) -> None:
    config = make_algorithm(name).config
    assert {key: getattr(config, key) for key in DEFAULTS[name]} == DEFAULTS[name]


# ---- advantages


def test_rloo_measures_each_against_the_others() -> None:
    """Scores 1, 0, 0, 1: 1 - 1/3 and 0 - 2/3. That is G/(G-1) times the centred score."""
    it = iteration(toy_group("x", "1001"))
    assert values(credit("rloo", it)) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    centred = values(credit("grpo", it, adv_norm="mean"))
    assert values(credit("rloo", it)) == pytest.approx([4 / 3 * a for a in centred])
    assert values(credit("rloo", iteration(toy_group("x", "1eee")))) == [0.0]


def test_dr_grpo_sums_tokens_over_a_constant_length() -> None:
    """Two turns of two tokens, L_max 8: sum(w v l) / sum(w) = mean_i sum_t A_i l / 8."""
    samples = credit("dr_grpo", iteration(toy_group("x", "10", turns=2)), length=8)
    for s, advantage in zip(samples, (0.5, -0.5), strict=True):
        weight, value = s.credits["actor"]
        assert weight.tolist() == [0.25] * 4
        assert value.tolist() == pytest.approx([advantage * 4 / 8] * 4)
    with pytest.raises(ConfigError, match=r"algo\.reduction"):
        make_algorithm("dr_grpo", reduction="token_mean")


def test_gigpo_compares_steps_that_saw_the_same() -> None:
    """All see the opening; then "seen" twice. Returns of a success in two turns: .95, 1."""
    it = iteration(toy_group("x", "10", turns=2))
    algorithm = make_algorithm("gigpo", adv_norm="mean")
    first, second = algorithm.step_advantages(it.groups[0].scored)  # type: ignore[attr-defined]
    assert first == pytest.approx([0.475, 0.5])
    assert second == pytest.approx([-0.475, -0.5])
    value = algorithm.credit(it, {})[0].credits["actor"].value
    assert value.tolist() == pytest.approx([0.975, 0.975, 1.0, 1.0])


def test_gigpo_gives_nothing_to_a_step_that_nobody_else_saw() -> None:
    group = toy_group("x", "10", turns=2)
    t = group.trajectories[0]
    odd = replace(t, turns=(replace(t.turns[0], observation="elsewhere"), t.turns[1]))
    algorithm = make_algorithm("gigpo", adv_norm="mean")
    steps = algorithm.step_advantages([odd, group.trajectories[1]])  # type: ignore[attr-defined]
    assert [s[1] for s in steps] == [0.0, 0.0]


def test_dapo_takes_groups_with_both_outcomes() -> None:
    dapo = make_algorithm("dapo")
    kept = [dapo.accept(toy_group("x", o)) for o in ("1111", "0000", "1000", "1eee", "10ee")]
    assert kept == [False, False, True, False, True]
    assert dapo.max_batches == 10
    off = make_algorithm("dapo", filter=False)
    assert off.accept(toy_group("x", "1111"))
    assert off.max_batches == 1


@pytest.mark.parametrize(
    ("name", "keys", "losses"),
    # ratios 1.25 of a token with A = 1, .75 and 4 of one with A = -1 (methods.md 13 b: DAPO)
    [
        ("grpo", {}, [-1.2, 0.8, 3.0]),
        ("grpo", {"dual_clip": 0.0}, [-1.2, 0.8, 4.0]),
        ("dapo", {}, [-1.25, 0.8, 3.0]),
        ("dapo", {"clip_high": 0.2}, [-1.2, 0.8, 3.0]),
        ("gspo", {}, [-1.0004, 0.9997, 3.0]),
    ],
)
def test_clips_of_the_methods(name: str, keys: dict[str, Any], losses: list[float]) -> None:
    """Away from the policy that sampled: the reductions of whole updates see a ratio of 1 only."""
    ratio, places = torch.tensor([1.25, 0.75, 4.0]), torch.arange(3)
    batch = TokenBatch(
        ids=places[None],
        mask=places[None] > 0,
        row=places * 0,
        turn=places,
        engine_logprobs=ratio,
        temperature=ratio,
        credits={},
        scores={},
        old_logprobs=torch.zeros(3),
    )
    loss = make_algorithm(name, **keys).streams["actor"].loss
    found = loss(batch, ratio.log(), torch.tensor([1.0, -1.0, -1.0]))
    assert found.tolist() == pytest.approx(losses)


# ---- a teacher with advice


@pytest.mark.parametrize("name", ["sdar", "opsd", "grpo_opsd", "skill_sd", "rlsd"])
def test_the_bank_speaks_to_the_teacher_by_task_type(name: str) -> None:
    """Pitfall 16: each type gets its own skills, in the teacher's view only."""
    it = iteration(toy_group("x", "10"), toy_group("y", "10", "type1"))
    assert make_algorithm(name).propose(it) == []
    for sample, kind in zip(credit(name, it), ("type0", "type0", "type1", "type1"), strict=True):
        view = sample.views["teacher"].ids.tolist()
        section = CODEC.section_ids(BANK.text(kind))
        assert view == [1, *section, 2, 3, 4, 5]
        assert sample.ids.tolist() == [1, 2, 3, 4, 5]


def written(
    t: Trajectory, text: str, invalid: str = "", steps: dict[int, str] | None = None
) -> Skill:
    return Skill(t.task, text, "other", invalid, trajectory=t, steps=steps or {})


@pytest.mark.parametrize("name", ["seed", "skill_sd"])
def test_own_skills_teach_their_own_trajectory(name: str) -> None:
    """One per scored trajectory; an invalid one masks its rows and nothing else."""
    it = iteration(toy_group("x", "10e0"))
    algorithm = make_algorithm(name, CODEC, skill_source="trajectory")
    requests = algorithm.propose(it)
    assert [r.trajectory.index for r in requests if isinstance(r, SkillRequest)] == [0, 1, 3]
    one, two, *_ = it.groups[0].trajectories
    it.skills = [written(one, "own advice"), written(two, "", "no JSON")]
    samples = algorithm.credit(it, {})
    assert [sorted(s.views) for s in samples] == [["teacher"], [], []]
    assert ["teacher" in s.credits for s in samples] == [True, False, False]
    assert samples[0].views["teacher"].ids.tolist()[1:-4] == list(CODEC.section_ids("own advice"))


def test_seed_writes_greedily_and_nothing_where_it_does_not_distill() -> None:
    it = iteration(toy_group("x", "10"))
    (request, _) = make_algorithm("seed").propose(it)
    assert isinstance(request, SkillRequest)
    assert (request.temperature, request.attempts, request.step_skills) == (0.0, 1, 0)
    assert make_algorithm("seed", distill=0.0).propose(it) == []


def test_opsd_has_no_policy_gradient() -> None:
    assert set(active(make_algorithm("opsd").streams)) == {"kl", "entropy", "teacher"}
    assert set(active(make_algorithm("sdar").streams)) == {"actor", "kl", "entropy", "teacher"}


# ---- reweighted advantages


def test_fading() -> None:
    assert [fading(0.2, 50, u) for u in (0, 25, 50, 99)] == pytest.approx([0.2, 0.1, 0.0, 0.0])
    assert fading(0.2, 0, 10**6) == 0.2


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # d = .1, -.1, 2: A > 0 rewards what the teacher finds likelier, up to 1 + e
        (2.0, [exp(0.1), exp(-0.1), 1.2]),
        (-2.0, [exp(-0.1), exp(0.1), 0.8]),
        (0.0, [1.0, 1.0, 1.0]),
    ],
)
def test_rlsd(advantage: float, expected: list[float]) -> None:
    """At update 50 of 100 lam is .25: A' = A (.75 + .25 w)."""
    algorithm = make_algorithm("rlsd", CODEC)
    (sample, *_) = algorithm.credit(it := iteration(toy_group("x", "10"), update=50), {})
    sample = replace(sample, turn=torch.zeros(3, dtype=torch.long))
    sample = with_credit(sample, actor=constant(sample, 1.0, advantage))
    sample = scored(sample, [-1.0, -1.0, -3.0], teacher=[-0.9, -1.1, -1.0])
    (shaped,) = algorithm.shape([sample], it)
    weight, value = shaped.credits["actor"]
    assert weight.tolist() == [1.0] * 3
    assert value.tolist() == pytest.approx([advantage * (0.75 + 0.25 * w) for w in expected])
    clipped = 1 / 3 if advantage else 0.0  # at either bound
    assert it.metrics.reduce()["reward/reweighting_clipped_frac"] == pytest.approx(clipped)


def test_step_opsd_weighs_and_keeps_the_sign() -> None:
    """lam .2 at update 0: A' = .8 A + .2 w A, w = clip(2 sigma(sign(A) d), .8, 1.2)."""
    algorithm = make_algorithm("step_opsd", CODEC, budget=False)
    it = iteration(toy_group("x", "10"))
    sample = algorithm.credit(it, {})[1]
    sample = with_credit(sample, actor=constant(sample, 1.0, -1.0))
    sample = scored(sample, [-1.0, -1.0], teacher=[-0.8, -9.0])
    (shaped,) = algorithm.shape([sample], it)
    w = 2 / (1 + exp(0.2))
    expected = [-(0.8 + 0.2 * w), -(0.8 + 0.2 * 1.2)]
    assert shaped.credits["actor"].value.tolist() == pytest.approx(expected)
    row = it.metrics.reduce()
    assert row["reward/reweighting_clipped_frac"] == 0.5
    assert row["reward/reweighting_mean"] == pytest.approx((0.2 * (1 - w) + 0.04) / 2)


def steps(sizes: list[list[float]], span: list[list[float]] | None = None) -> list[Sample]:
    """A trajectory in rows of one turn each, with these advantages; a NaN score is no span."""
    done = []
    for k, size in enumerate(sizes):
        value = torch.tensor(size)
        turn = torch.full((len(size),), k)
        s = Sample(torch.zeros(9), torch.zeros(9), turn, value, episode="e")
        score = torch.tensor(span[k]) if span else torch.zeros(len(size))
        s = replace(s, scores={"teacher": score})
        credit = constant(s, 1.0, 0.0)
        done.append(with_credit(s, actor=credit._replace(value=value)))
    return done


def test_step_budgets_are_equal_within_the_clip() -> None:
    """M = 1, 2, 3 with mean 2: factors 2, 1, 2/3. Then M = 1, 1, 10 with mean 4: 2, 2, 1/2."""
    done = budgeted(steps([[1.0, -1.0], [2.0], [-3.0, 3.0]]))
    got = [s.credits["actor"].value.tolist() for s in done]
    assert got == [pytest.approx(x, rel=1e-5) for x in ([2.0, -2.0], [2.0], [-2.0, 2.0])]
    done = budgeted(steps([[1.0], [1.0], [10.0]]))
    got = [s.credits["actor"].value.tolist() for s in done]
    assert got == [pytest.approx(x, rel=1e-5) for x in ([2.0], [2.0], [5.0])]


def test_the_budget_leaves_what_is_outside_spans_and_single_steps() -> None:
    nan = float("nan")
    done = budgeted(steps([[1.0, 7.0], [3.0]], [[0.0, nan], [0.0]]))
    got = [s.credits["actor"].value.tolist() for s in done]
    assert got == [pytest.approx([2.0, 7.0], rel=1e-5), pytest.approx([2.0], rel=1e-5)]
    (alone,) = budgeted(steps([[3.0, -1.0]]))
    assert alone.credits["actor"].value.tolist() == [3.0, -1.0]
    two = budgeted([steps([[1.0]])[0], replace(steps([[3.0]])[0], episode="other")])
    assert [float(s.credits["actor"].value[0]) for s in two] == [1.0, 3.0]


def test_hindsight_is_the_first_success_and_for_failures_only() -> None:
    group = toy_group("x", "0110")
    told = tuple(conversation(group, i, (f"say {i}", "<answer>me</answer>")) for i in range(4))
    it = iteration(replace(group, trajectories=told))
    samples = credit("step_opsd", it)
    block = hindsight(told[1])
    assert "say 1" in block
    assert "say 2" not in block
    texts = [CODEC.decode(s.views["teacher"].ids.tolist()) for s in samples]
    assert [block in text for text in texts] == [True, False, False, True]
    for s in samples[1:3]:
        assert torch.equal(s.views["teacher"].ids, s.ids)
    (solo, *_) = credit("step_opsd", iteration(toy_group("x", "0000")))
    assert torch.equal(solo.views["teacher"].ids, solo.ids)


@pytest.mark.parametrize(("placement", "behind"), [("user_tail", 0), ("raw_suffix", 1)])
def test_where_hindsight_stands(placement: str, behind: int) -> None:
    """At the end of the first user message, or between the start of the turn and the response."""
    group = toy_group("x", "10")
    told = tuple(conversation(group, i, ("abc", "def")) for i in range(2))
    sample = credit("step_opsd", iteration(replace(group, trajectories=told)), placement=placement)[
        1
    ]
    view = sample.views["teacher"]
    opening = CODEC.start(told[1].opening + "\nAnswer.")[0]
    tail = () if behind else opening[-CODEC.tail :]
    begin = opening if behind else opening[: -CODEC.tail]
    block = CODEC.encode(hindsight(told[0]))
    expected = (*begin, *block, *tail, *told[1].turns[0].completion.ids)
    assert tuple(view.ids[: len(expected)].tolist()) == expected
    assert torch.equal(view.ids[view.mask], sample.ids[sample.mask])


def test_action_spans() -> None:
    """The last block of a response; the whole response where there is none."""
    said = ("<think>a <b>x</b> é</think> <action>go to é 1</action>.", "none")
    group = toy_group("x", "0")
    t = conversation(group, 0, said)
    (sample,) = credit("step_opsd", iteration(replace(group, trajectories=(t,))), span="action")
    view = sample.views["teacher"]
    assert CODEC.decode(view.ids[view.mask].tolist()) == "<action>go to é 1</action>none"
    assert torch.equal(sample.ids[sample.mask][view.index], view.ids[view.mask])


# ---- OPID


def opid(it: Iteration, **keys: Any) -> tuple[Any, list[Sample]]:
    algorithm = make_algorithm("opid", CODEC, **{"episode": 0.1, "step": 0.5, **keys})
    return algorithm, algorithm.credit(it, {})


def analysed(steps: dict[int, str]) -> Iteration:
    group = toy_group("x", "10")
    told = tuple(conversation(group, i, ("ab", "cde", "f")) for i in range(2))
    it = iteration(replace(group, trajectories=told))
    it.skills = [written(told[0], "the whole", steps=steps), written(told[1], "", "no JSON")]
    return it


def test_opid_asks_for_an_analysis_of_every_trajectory() -> None:
    it = iteration(toy_group("x", "10e"))
    asked = make_algorithm("opid").propose(it)
    assert [
        (r.step_skills, r.attempts, r.temperature) for r in asked if isinstance(r, SkillRequest)
    ] == [(5, 2, 0.4)] * 2
    assert make_algorithm("opid", step=0.0, episode=0.0).propose(it) == []
    (request, _) = make_algorithm("opid", step=0.0).propose(it)
    assert isinstance(request, SkillRequest)
    assert request.step_skills == 0


def test_a_step_skill_stands_before_its_decision_in_a_row_of_its_own() -> None:
    """methods.md 0.4: the view ends with that turn and scores that turn alone."""
    it = analysed({1: "only now"})
    _, (sample, other) = opid(it)
    assert sorted(sample.views) == ["episode", "step0"]
    assert other.views == {}
    view, turn = sample.views["step0"], it.groups[0].trajectories[0].turns[1]
    section = CODEC.step_section_ids("only now")
    prompt = turn.prompt_ids
    expected = (*prompt[: -CODEC.tail], *section, *prompt[-CODEC.tail :], *turn.completion.ids)
    assert tuple(view.ids.tolist()) == expected
    assert view.ids[view.mask].tolist() == list(turn.completion.ids)
    assert torch.equal(view.index, (sample.turn == 1).nonzero().flatten())


@pytest.mark.parametrize("routing", ["step_priority", "additive"])
def test_opid_adds_to_the_advantage(routing: str) -> None:
    """d_e = 1 and d_s = 2 on every token they cover: A + .1, and A + .5 * 2 on turn 1 (+ .1)."""
    it = analysed({1: "only now"})
    algorithm, samples = opid(it, routing=routing)
    sample = samples[0]
    base = sample.credits["actor"].value[0]
    step = torch.full((sample.n,), torch.nan)
    step[sample.views["step0"].index] = 1.0
    old = torch.full((sample.n,), -1.0)
    sample = replace(sample, scores={"old": old, "episode": old + 1, "step0": step})
    shaped, other = algorithm.shape([sample, samples[1]], it)
    assert other is samples[1]
    on = sample.turn == 1
    expected = base + torch.where(on, 1.0 + 0.1 * (routing == "additive"), torch.tensor(0.1))
    assert torch.allclose(shaped.credits["actor"].value, expected)
    assert set(shaped.scores) == {"old", "episode", "step"}


# ---- Skill-GRPO, Skill-Prompt


def test_when_the_student_sees_the_bank() -> None:
    task = toy_group("x", "1").task
    grpo, prompt = make_algorithm("skill_grpo"), make_algorithm("skill_prompt")
    shown = BANK.text("type0")
    assert [grpo.context(task, p) for p in ("train", *grpo.phases)] == [shown, "", shown]
    assert [prompt.context(task, p) for p in ("train", *prompt.phases)] == [shown, shown]
    assert grpo.phases == ("plain", "skill")
    assert prompt.phases == ("skill",)
    assert make_algorithm("grpo").context(task, "train") == ""


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("sdar", {"distill": -1.0}),
        ("seed", {"skill_source": "file"}),
        ("seed", {"bank": "search"}),
        ("grpo_opsd", {"reading": "book"}),
        ("skill_sd", {"distill": float("nan")}),
        ("rlsd", {"lam": 1.5}),
        ("step_opsd", {"refresh": 0}),
        ("step_opsd", {"placement": "middle"}),
        ("opid", {"attempts": 3}),
        ("opid", {"routing": "both"}),
        ("dapo", {"max_batches": 0}),
        ("gigpo", {"gamma": 2.0}),
        ("gspo", {"clip": -0.1}),
    ],
)
def test_bad_keys(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"algo.{next(iter(bad))}="):
        load("algorithms", name).Config(**bad)


def test_rows_of_a_trajectory_share_their_episode() -> None:
    """The step budget needs it, and replays must not share it with the student."""
    t = toy_group("x", "1", turns=2).trajectories[0]
    (one,) = rows(t)
    (replayed,) = rows(replace(t, skill=written(t, "advice")))
    assert one.episode != replayed.episode
