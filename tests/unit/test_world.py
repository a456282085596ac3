"""The built-in world: determinism, disjoint splits, answers that follow from the facts."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from rsipo_lightning.environments import world as module
from rsipo_lightning.environments.world import (
    ALL_TYPES,
    FEW_YEARS,
    SPLITS,
    TYPES,
    YEARS,
    World,
    entities,
    pieces,
    vocabulary,
)
from rsipo_lightning.errors import DataError


@pytest.fixture(scope="module")
def world():
    return World(0)


def _names(world, split):
    return {name for names in world.names[split].values() for name in names}


def test_splits_share_words_but_no_name_and_no_fact(world):
    names = {split: _names(world, split) for split in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not names[a] & names[b]
    words = {split: {word for name in names[split] for word in name.split()} for split in SPLITS}
    assert words["val"] | words["test"] <= words["train"]
    for split in SPLITS:
        for name in names[split]:
            for value in world.facts[name].values():
                assert value in names[split] or value in YEARS


def test_passages_hold_the_name_and_every_fact(world):
    assert len(world.passages) == len(world.facts) > 1500
    for passage in world.passages:
        shown = set(entities(passage.text)) | set(module.years(passage.text))
        assert shown == {passage.title, *world.facts[passage.title].values()}
        assert len(passage.text.split()) <= 17


@pytest.mark.parametrize("split", SPLITS)
def test_questions_are_many_distinct_and_answered_by_the_facts(world, split):
    questions = world.questions(split)
    assert len(questions) >= 1000
    assert len({q.id for q in questions}) == len({q.text for q in questions}) == len(questions)
    assert [q.type for q in questions[:4]] == list(TYPES)
    hops = {"single": 1, "bridge2": 2, "bridge3": 3, "compare": 2}
    for q in questions:
        assert len(q.hops) == hops[q.type]
        assert len(q.text.split()) <= 17
        asked = entities(q.text)
        if q.type == "compare":
            assert asked == list(q.hops)
            values = [int(world.facts[name][q.path[0]]) for name in q.hops]
            assert values[0] != values[1]
            assert q.answers == (q.hops[values.index(min(values))],)
        else:
            assert asked == [q.hops[0]]
            for hop, relation, value in zip(q.hops, q.path, (*q.hops[1:], *q.answers), strict=True):
                assert world.facts[hop][relation] == value
            assert q.answers[0] not in q.text


def test_compare_answers_do_not_lean_on_position(world):
    questions = [q for q in world.questions("train") if q.type == "compare"]
    first = sum(q.answers[0] == q.hops[0] for q in questions) / len(questions)
    assert 0.45 < first < 0.55


@pytest.mark.parametrize("split", SPLITS)
def test_chains_of_four_pages_pass_no_page_twice(world, split):
    questions = world.questions(split, ["bridge4"])
    assert len({q.text for q in questions}) == len(questions) >= 400
    for q in questions:
        assert len({*q.hops, *q.answers}) == 5
        assert entities(q.text) == [q.hops[0]]
        for hop, relation, value in zip(q.hops, q.path, (*q.hops[1:], *q.answers), strict=True):
            assert world.facts[hop][relation] == value


@pytest.mark.parametrize("split", SPLITS)
def test_a_comparison_that_leads_on_cannot_be_guessed(world, split):
    """Neither the place of a name nor the name itself nor the commonest answer helps."""
    questions = world.questions(split, ["compare_bridge"])
    assert len({q.text for q in questions}) == len(questions) >= 400
    first, places = [], defaultdict(set)
    for q in questions:
        assert entities(q.text) == list(q.hops[:2])
        assert q.answers[0] not in q.text
        values = [world.facts[name][q.path[0]] for name in q.hops[:2]]
        assert values[0] != values[1]
        assert set(values) <= set(FEW_YEARS)
        ends = []
        for name in q.hops[:2]:
            step = world.facts[name][q.path[1]]
            ends.append((step, world.facts[step][q.path[2]]))
            places[name].add(values.index(min(values)) == q.hops.index(name))
        earlier = values.index(min(values))
        assert (q.hops[2], q.answers[0]) == ends[earlier]
        assert ends[0][1] != ends[1][1]
        first.append(earlier == 0)
    assert 0.45 < sum(first) / len(first) < 0.55
    assert Counter(q.answers for q in questions).most_common(1)[0][1] < 0.15 * len(questions)
    assert sum(len(seen) == 2 for seen in places.values()) > 0.2 * len(places)  # the middle year


def test_types_are_asked_in_turn_and_do_not_change_each_other(world):
    chosen = ["compare_bridge", "single"]
    questions = world.questions("val", chosen)
    assert [q.type for q in questions[:4]] == chosen * 2
    everything = world.questions("val", ALL_TYPES)
    assert questions[1::2] == [q for q in everything if q.type == "single"]


def test_facts_and_questions_are_those_that_the_shipped_policies_were_measured_on(world):
    made = hashlib.sha256()
    for text in [p.text for p in world.passages] + [
        repr(q) for split in SPLITS for q in world.questions(split)
    ]:
        made.update(text.encode())
    assert made.hexdigest() == "4e151c792a7a7c53ed8323fe8d793f8649b5d76b509feb77c2a5e9f58de710ce"


def test_same_seed_same_world_in_another_process(world):
    code = (
        "import json; from rsipo_lightning.environments.world import World; w = World(0);"
        "print(json.dumps([[p.text for p in w.passages], [q.text for q in w.questions('val')]]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout
    here = [[p.text for p in world.passages], [q.text for q in world.questions("val")]]
    assert json.loads(out) == here


def test_another_seed_has_other_facts_in_the_same_words(world):
    other = World(1)
    assert other.facts != world.facts
    known = set(vocabulary())
    for made in (world, other):
        texts = [p.text for p in made.passages] + [q.text for q in made.questions("test")]
        assert {piece for text in texts for piece in pieces(text)} <= known
    assert len(known) < 300


def test_unknown_split(world):
    with pytest.raises(DataError, match="no split 'tset'"):
        world.questions("tset")
