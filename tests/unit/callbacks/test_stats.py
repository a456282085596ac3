"""Rollouts, replays and skills in numbers, against values worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rsipo_lightning.callbacks.rollout_stats import add_replays, add_rollouts
from rsipo_lightning.callbacks.skills import add_skills
from rsipo_lightning.metrics import Metrics
from rsipo_lightning.types import RolloutGroup, Stop


def test_an_episode_without_a_measure_counts_as_0_of_it(make: SimpleNamespace) -> None:
    task = make.task()
    hit = make.trajectory(task, True, measures={"lenient_match": 1.0})
    cut_off = make.trajectory(task, False, stop=Stop.CONTEXT)
    broken = make.trajectory(task, False, stop=Stop.ERROR)
    metrics = Metrics()
    add_rollouts(metrics, [RolloutGroup(task, (hit, cut_off, broken))])
    assert metrics.reduce()["rollout/lenient_match_mean"] == 0.5


def test_rollouts(make: SimpleNamespace) -> None:
    one, two = make.task("a", "one_hop"), make.task("b", "two_hop")
    mixed = RolloutGroup(
        one,
        (
            make.trajectory(one, True, [make.turn(n=3)]),
            make.trajectory(
                one,
                False,
                [make.turn(n=1, valid=False), make.turn(n=2, truncated=True), make.turn(n=2)],
                score=-0.1,
                stop=Stop.MAX_TURNS,
            ),
            make.trajectory(one, False, [make.turn(n=99, valid=False)], stop=Stop.ERROR),
        ),
    )
    equal = RolloutGroup(two, tuple(make.trajectory(two, False, [make.turn()]) for _ in range(2)))
    metrics = Metrics()
    add_rollouts(metrics, [mixed, equal])
    assert metrics.reduce() == pytest.approx(
        {
            "rollout/success_frac": 1 / 4,  # of the four episodes that did not break
            "rollout/search/one_hop/success_frac": 1 / 2,
            "rollout/search/two_hop/success_frac": 0,
            "rollout/valid_action_frac": 5 / 6,
            "rollout/truncated_frac": 1 / 6,
            "rollout/turns_mean": 6 / 4,
            "rollout/action_tokens_mean": (3 + 1 + 2 + 2 + 2 + 2) / 6,
            "rollout/error_frac": 1 / 5,
            "rollout/episodes_count": 5,
            "rollout/env_steps_count": 1 + 3 + 1 + 1 + 1,  # those of the broken one too
            "rollout/stop_done_frac": 3 / 5,
            "rollout/stop_max_turns_frac": 1 / 5,
            "rollout/stop_context_frac": 0,
            "rollout/stop_error_frac": 1 / 5,
            "reward/score_mean": 0.9 / 4,
            "reward/group_zero_std_frac": 1 / 2,
        }
    )


def test_a_group_of_broken_episodes_has_no_reward(make: SimpleNamespace) -> None:
    broken = RolloutGroup(make.task(), (make.trajectory(stop=Stop.ERROR),))
    metrics = Metrics()
    add_rollouts(metrics, [broken])
    row = metrics.reduce()
    assert row["rollout/error_frac"] == 1
    assert not {"rollout/success_frac", "reward/score_mean", "reward/group_zero_std_frac"} & set(
        row
    )


def test_replays_compare_success_rates(make: SimpleNamespace) -> None:
    a, b, c, lost = (make.skill(make.task(name)) for name in "abcd")
    metrics = Metrics()
    add_replays(
        metrics,
        [
            make.replay(a, [True, True], [False, True], gain=0.4),
            make.replay(b, [False, False], [False, True], gain=-0.4),
            # faster but as successful: a gain, and neither better nor worse
            make.replay(c, [True, True], [True, True], gain=0.3),
            make.replay(lost, [], [True], gain=None),
        ],
    )
    assert metrics.reduce() == pytest.approx(
        {
            "replay/error_frac": 0.0,
            "replay/episodes_count": 6,
            "replay/env_steps_count": 6,
            "replay/gain_mean": 0.1,
            "replay/treated_success_frac": 2 / 3,
            "replay/control_success_frac": 2 / 3,
            "replay/teacher_better_frac": 1 / 3,
            "replay/teacher_worse_frac": 1 / 3,
        }
    )


def test_skills(make: SimpleNamespace) -> None:
    plan = make.skill(make.task("a"), "1. look up the author")
    form = make.skill(make.task("b"), "close the tag", "format")
    broken = make.skill(make.task("c"), invalid="no JSON")
    metrics = Metrics()
    replays = [make.replay(plan, [True], [False], 0.5), make.replay(form, [False], [True], None)]
    add_skills(metrics, [plan, form, broken], replays)
    assert metrics.reduce() == pytest.approx(
        {
            "skill/valid_frac": 2 / 3,
            "skill/procedural_frac": 1 / 2,
            "skill/format_frac": 1 / 2,
            "skill/recovery_frac": 0,
            "skill/other_frac": 0,
            "skill/chars_mean": (21 + 13) / 2,
            "skill/procedural/gain_mean": 0.5,
        }
    )


def test_all_categories_are_there_where_no_skill_is_valid(make: SimpleNamespace) -> None:
    metrics = Metrics()
    add_skills(metrics, [make.skill(invalid="no JSON")], [])
    categories = ("procedural", "recovery", "format", "other")
    expected = {"skill/valid_frac": 0.0} | {f"skill/{name}_frac": 0.0 for name in categories}
    assert metrics.reduce() == expected


def test_a_method_without_skills_has_no_skill_keys() -> None:
    metrics = Metrics()
    add_skills(metrics, [], [])
    add_replays(metrics, [])
    assert metrics.reduce() == {}
