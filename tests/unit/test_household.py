"""What tiny_alfworld is taught."""

from __future__ import annotations

import re
from hashlib import sha256

import pytest
from transformers import AutoTokenizer

from rsipo_lightning.codec import Codec
from rsipo_lightning.composing import compose
from rsipo_lightning.demonstrations import CHOICE, Lessons
from rsipo_lightning.environments.alfworld.builtin import BuiltinGame
from rsipo_lightning.environments.alfworld.episode import parse
from rsipo_lightning.environments.alfworld.suite import AlfworldSuite
from rsipo_lightning.household import HOUSE_MIXTURES, HouseDemonstrations
from rsipo_lightning.imitation import Row
from rsipo_lightning.policy import MODELS
from rsipo_lightning.skills import read_skill

HASH = "aeed4b997ad44f7aa6a4247fb651063d1b582addc27577d8ca1c6c52dc3800c3"  # of the first rows
WRITING, SKILL, COMMAND = "Write a skill.", "Episode-Level Skill", "Your task is to: "


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(AutoTokenizer.from_pretrained(MODELS / "tiny_alfworld"))


@pytest.fixture(scope="module")
def teacher(codec: Codec) -> HouseDemonstrations:
    suite = AlfworldSuite(compose(algo="grpo", env="alfworld").env, 1)
    return HouseDemonstrations(codec, 1, HOUSE_MIXTURES["tiny_alfworld"], suite)


@pytest.fixture(scope="module")
def rows(teacher: HouseDemonstrations) -> list[Row]:
    return teacher.rows(0, 400)


def _said(codec: Codec, row: Row) -> str:
    return codec.decode([i for i, w in zip(row.ids, row.weights, strict=True) if w >= 1])


def test_rows_are_those_that_the_shipped_policy_was_given(rows: list[Row]) -> None:
    assert sha256("".join(map(repr, rows)).encode()).hexdigest() == HASH


def test_rows_are_a_function_of_the_pool(teacher: HouseDemonstrations, rows: list[Row]) -> None:
    assert teacher.rows(0, 30) == rows[:30]
    assert teacher.rows(1, 30) != rows[:30]


def test_a_row_says_a_command_a_skill_or_what_it_was_shown(codec: Codec, rows: list[Row]) -> None:
    kinds = dict.fromkeys(("command", "advised", "conversation", "look", "skill", "copy"), 0)
    for row in rows:
        text, said = codec.decode(row.ids), _said(codec, row)
        assert len(row.ids) == len(row.weights)
        assert set(row.weights) <= {0.0, 0.05, 0.1, 1.0, CHOICE}
        if row.weights.count(CHOICE) > 1:
            kinds["look"] += 1
        elif 0.1 in row.weights:  # an episode as one conversation
            kinds["conversation"] += 1
            responses = re.findall("<think>.*?</action>", said)
            assert responses
            assert all(parse(response, think=True).why == "" for response in responses)
        elif text.startswith(WRITING):
            kinds["skill"] += 1
            assert read_skill(said)[1] == ""
        elif text.startswith(COMMAND):
            kinds["advised" if SKILL in text else "command"] += 1
            assert parse(said, think=True).why == ""
        else:
            kinds["copy"] += 1
            assert text == 2 * said
    assert min(kinds.values()) > 3
    assert min(kinds["command"], kinds["advised"]) > 60


def test_a_look_names_what_can_be_taken(codec: Codec, rows: list[Row]) -> None:
    answers, wrong = [], 0
    for row in rows:
        if row.weights.count(CHOICE) < 2:
            continue
        text = codec.decode(row.ids)
        options = text[: text.index("<think>")].split("\n")[-2]  # and then the task once more
        asked = re.findall(r"<think> (\w+)( \d+)?</think><action>(.*?)</action>", text)[1:]
        assert len({thing for thing, _, _ in asked}) == len(asked)
        for thing, number, command in asked:
            assert command.startswith(f"take {thing}{number} from " if number else "go to ")
            there = re.search(f" {thing}( \\d+)", options)
            wrong += (there[1] if there else "") != number
            answers.append(bool(number))
    assert 0.2 < sum(answers) / len(answers) < 0.6
    assert wrong / len(answers) < 0.02  # what lies beside the place that is named, within reach


def test_most_rows_have_names_that_can_only_be_copied(codec: Codec, rows: list[Row]) -> None:
    """What is taken is in the prompt, whatever it is called: apples may lie in a bathtub."""
    taken = []
    for row in rows:
        text, said = codec.decode(row.ids), _said(codec, row)
        match = re.search(r"<action>take (\w+ \d+) from", said)
        if text.startswith(COMMAND) and match and row.weights.count(CHOICE) == 1:
            taken.append(match[1] in text[: -len(said)])
    assert len(taken) > 20
    assert sum(taken) / len(taken) > 0.9  # noise takes what is in the list but not in its words


def test_an_obeyed_skill_is_followed_more_often_than_not(
    codec: Codec, teacher: HouseDemonstrations
) -> None:
    """ "Repeat the same command": said again, where the history shows the one before."""
    again = []
    for row in teacher.rows(2, 1500):
        text = codec.decode(row.ids)
        if re.search("again and again|Repeat the same", text) and text.startswith(COMMAND):
            command = parse(_said(codec, row), think=True).command
            again.append(f"\n{command}\n" in text)
    assert len(again) > 30
    assert sum(again) / len(again) > 0.5  # an episode's first command repeats none


def test_an_episode_that_breaks_leaves_its_drill(
    codec: Codec, teacher: HouseDemonstrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: BuiltinGame, command: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(BuiltinGame, "step", step)
    (row,) = teacher.lesson(0, 0)
    assert codec.decode(row.ids) == 2 * _said(codec, row)


def test_lessons_have_batches_of_similar_length(teacher: HouseDemonstrations) -> None:
    lessons = Lessons(teacher)
    batches = [lessons.batch(update) for update in range(lessons.POOL)]
    assert {len(batch) for batch in batches} == {lessons.ROWS}
    spread = [max(len(s.ids) for s in b) / min(len(s.ids) for s in b) for b in batches]
    assert sorted(spread)[len(spread) // 2] < 1.2
