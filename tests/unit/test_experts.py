"""Scripted experts through the real environment, and the skills that name their plans."""

import random
import re
from collections import defaultdict

import pytest

from rsipo_lightning.composing import compose
from rsipo_lightning.environments import experts
from rsipo_lightning.environments.experts import KINDS, PLANS, demonstrate, skills
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.environments.world import ALL_TYPES, TYPES, entities, pieces, years
from rsipo_lightning.types import Stop


@pytest.fixture(scope="module")
def suite():
    return SearchSuite(SearchConfig(prompt="compact", topk=2), 0)


@pytest.fixture(scope="module")
def hard():
    return SearchSuite(compose(algo="grpo", env="search_hard").env, 0)


def _play(suite, task, plan, think=False):
    """(results, responses, whether only visible names and years were written)."""
    episode = suite.make()
    expert = demonstrate(task, random.Random(task.id), plan, think)
    observation = context = episode.reset(task)
    results, responses, visible = [], [], True
    while not results or results[-1].stop is None:
        responses.append(expert.act(observation))
        written = entities(responses[-1]) + years(responses[-1])
        visible = visible and all(name in context for name in written)
        results.append(episode.step(responses[-1]))
        observation = results[-1].observation
        context += "\n" + observation
    return results, responses, visible


def test_workflow_wins_every_type_within_the_limit(suite):
    wins = defaultdict(list)
    for task in suite.tasks("test"):
        results, _, visible = _play(suite, task, "workflow")
        assert visible
        wins[task.type].append(results[-1].success)
    assert set(wins) == set(TYPES)
    assert all(sum(won) / len(won) >= 0.99 for won in wins.values())


def test_workflow_wins_all_hard_tasks_within_the_limit(hard):
    turns = defaultdict(set)
    for task in hard.tasks("test"):
        results, _, visible = _play(hard, task, "workflow")
        assert visible
        assert results[-1].success
        turns[task.type].add(len(results))
    assert turns == {"bridge2": {3}, "bridge3": {4}, "bridge4": {5}, "compare_bridge": {4}}


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan not in ("workflow", "detour")])
def test_no_other_plan_wins_a_hard_task(hard, plan):
    played = [_play(hard, task, plan) for task in hard.tasks("val")[:400]]
    assert all(visible for _, _, visible in played)
    assert sum(results[-1].success for results, _, _ in played) <= 8  # by luck


@pytest.mark.parametrize("plan", PLANS)
def test_plans_write_only_what_is_visible_and_fail_as_named(suite, plan):
    wins = defaultdict(list)
    for task in suite.tasks("val")[:200]:
        results, responses, visible = _play(suite, task, plan)
        assert visible
        wins[task.type].append(results[-1].success)
        if plan == "repeat":
            assert len(set(responses)) == 1
            assert results[-1].stop is Stop.MAX_TURNS
        invalid = [not result.valid for result in results]
        assert any(invalid) is (plan == "malformed")
    if plan not in ("workflow", "detour"):
        assert sum(wins["bridge2"]) + sum(wins["bridge3"]) <= 2
    if plan == "detour":  # the repeated search costs the turn that three hops need
        assert all(wins["bridge2"])
        assert not any(wins["bridge3"])


def test_thoughts_satisfy_the_full_template():
    suite = SearchSuite(SearchConfig(prompt="full"), 0)
    for task in suite.tasks("val")[:8]:
        results, _, _ = _play(suite, task, "workflow", think=True)
        assert results[-1].success
        assert all(result.valid for result in results)


@pytest.mark.parametrize("type_", ALL_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_skills_are_valid_varied_and_entity_free(type_, kind):
    made = skills(type_, kind)
    assert len({skill.text for skill in made}) == len(made) >= 2
    for skill in made:
        assert len(skill.text.split()) >= 5
        assert len(skill.text) <= 1200
        assert not entities(skill.text)
        assert skill.plan in PLANS
        assert (skill.plan == "workflow") is (kind == "procedural")


def test_one_text_never_asks_for_two_plans():
    plans = defaultdict(set)
    for type_ in ALL_TYPES:
        for kind in KINDS:
            for skill in skills(type_, kind):
                plans[skill.text].add(skill.plan)
    assert all(len(named) == 1 for named in plans.values())


def test_unknown_plan_and_kind():
    with pytest.raises(KeyError, match="no plan 'cheat'"):
        demonstrate(None, random.Random(0), "cheat")
    with pytest.raises(KeyError, match="no skills"):
        skills("single", "good")


@pytest.mark.parametrize("name", ["suite", "hard"])
def test_vocabulary_covers_whole_episodes(name, request):
    suite, known = request.getfixturevalue(name), set(experts.vocabulary())
    for task in suite.tasks("train")[:100]:
        for plan in PLANS:
            results, responses, _ = _play(suite, task, plan)
            texts = responses + [result.observation for result in results]
            text = re.sub(r"</?\w+>", " ", " ".join(texts))  # a tag is a token of its own
            assert set(pieces(text)) <= known
