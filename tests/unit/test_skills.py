"""Analysis prompt, parser and categories of skills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsipo_lightning.errors import ConfigError
from rsipo_lightning.skills import (
    CATEGORIES,
    analysis_messages,
    analysis_template,
    category,
    read_skill,
    read_step_skills,
)
from rsipo_lightning.types import Completion, Stop, Task, Trajectory, Turn

OPENING = "You search.\nYour question: who made it?\nNow it's your turn to search."
GOOD = {"episode_summary": "It won.", "episode_skill": "First search the film, then its maker."}


def episode(success: bool = True, opening: str = OPENING) -> Trajectory:
    def turn(said: str, seen: str, valid: bool) -> Turn:
        completion = Completion((1,), (0.0,), said, False, 0)
        return Turn((1, 2), 1, completion, said, seen, 0.0, valid)

    turns = (
        turn("<search> film", "Write <search>..</search>.", False),
        turn("<search>film</search>", "Ann made it.", True),
    )
    task = Task("t", "search", "single", {})
    return Trajectory(task, 0, turns, success, 0.0, Stop.DONE, 4, opening)


@pytest.mark.parametrize("style", ["full", "compact"])
def test_prompt_holds_task_outcome_and_steps(style: str) -> None:
    (message,) = analysis_messages(episode(success=False), style)
    assert message.role == "user"
    parts = ("Your question: who made it?", "failure", "<search> film", "Ann made it.", "invalid")
    assert [p for p in parts if p not in message.content] == []
    assert "Now it's your turn" not in message.content  # no order to act while analysing
    assert "success" in analysis_messages(episode(), style)[0].content


def test_full_prompt_says_what_a_skill_is() -> None:
    text = analysis_messages(episode(), "full")[0].content
    assert "workflow" in text
    assert "avoidance rule" in text
    assert "Step 1 (invalid)" in text
    assert "Step 2 (valid)" in text
    assert '{"episode_summary": ' in text


def test_compact_prompt_is_short() -> None:
    assert len(analysis_messages(episode(), "compact")[0].content) < 160


def test_dollars_and_braces_in_data_are_data() -> None:
    text = analysis_messages(episode(opening="Your question: is $task {worth} $$5?"), "full")[
        0
    ].content
    assert "is $task {worth} $$5?" in text


def test_unknown_style_names_the_styles() -> None:
    with pytest.raises(ConfigError, match="full, compact"):
        analysis_messages(episode(), "long")


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "ask.txt"
    file.write_text("$outcome for $$5: ${task}\n--\n$steps\n\n", encoding="utf-8")
    (message,) = analysis_messages(episode(), "full", analysis_template(str(file)))
    assert message.content.startswith(
        "success for $5: You search.\nYour question: who made it?\n--"
    )
    assert "Step 2 (valid)" in message.content


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("$task $outcome", r"lacks \$steps"),
        ("$task $outcome $steps $why", r"unknown placeholder \$why \(have: \$task, "),
        ("$task $outcome $steps costs $5", r"written \$\$"),
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_template_that_cannot_be_used(tmp_path: Path, text: Any, says: str) -> None:
    file = tmp_path / "ask.txt"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says) as caught:
        analysis_template(str(file))
    assert str(caught.value).startswith(f"rollout.analysis_template={file}: ")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(GOOD),
        f"Sure!\n```json\n{json.dumps(GOOD, indent=1)}\n```\nDone.",
        "{not this} " + json.dumps(GOOD) + " {nor this}",
        json.dumps({"result": GOOD}),
        json.dumps({**GOOD, "other": [1, {"a": "}"}]}),
        '{"episode_summary": "a\nb", "episode_skill": "First search the film, then its maker."}',
    ],
)
def test_reads(text: str) -> None:
    assert read_skill(text) == (GOOD["episode_skill"], "")


@pytest.mark.parametrize(
    ("text", "skill", "reason"),
    [
        ("", "", "no JSON"),
        ("no braces", "", "no JSON"),
        (json.dumps(GOOD)[:-1], "", "no JSON"),  # truncated
        ('{"episode_skill": "one two three four five"}', "", "no JSON"),
        (json.dumps([GOOD["episode_skill"]]), "", "no JSON"),
        (json.dumps({**GOOD, "episode_summary": " "}), "", "episode_summary is empty"),
        (json.dumps({**GOOD, "episode_skill": ["a b c d e"]}), "", "skill is empty or not text"),
        (json.dumps({**GOOD, "episode_skill": "a b c d"}), "a b c d", "fewer than 5"),
        (json.dumps({**GOOD, "episode_skill": "a " * 601}), ("a " * 601).strip(), "more than 1200"),
        ('{"episode_summary": "a", "episode_skill": "\\ud800 b c d e"}', "", "Unicode"),
    ],
)
def test_refuses(text: str, skill: str, reason: str) -> None:
    found, why = read_skill(text)
    assert reason in why
    assert found == skill


def test_length_limits_are_inclusive() -> None:
    for skill in ("one two three four five", "a " * 599 + "bc"):  # 1200 characters
        assert read_skill(json.dumps({**GOOD, "episode_skill": skill})) == (skill, "")


@given(st.text() | st.text(alphabet='{}[]",: ae\\u0dfn1'))
@settings(max_examples=300, deadline=None)
def test_never_raises(text: str) -> None:
    skill, reason = read_skill(text)
    assert reason or skill


@pytest.mark.parametrize(
    "text",
    ["{" * 5000, '{"a":' * 5000, '{"episode_skill": ' + "9" * 5000 + "}", '{"a":' + "[" * 90000],
)
def test_deep_or_huge_input_is_only_invalid(text: str) -> None:
    assert read_skill(text)[0] == ""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1. search\n2. answer", "procedural"),
        ("Do this:\n 2) answer", "procedural"),
        ("Step 1: search", "procedural"),
        ("FIRST search the film,\nthen retry", "procedural"),
        ("If nothing happens, use another format", "recovery"),
        ("Retry with the full name", "recovery"),
        ("if the action fails, look around", "recovery"),
        ("Use the exact command syntax", "format"),
        ("Write <action>look</action>", "format"),
        ("Close every tag", "format"),
        ("Take only admissible actions", "format"),
        ("Be quick", "other"),
        ("on stage, the vintage authentic one", "other"),  # no 'tag', no 'then'
        ("", "other"),
    ],
)
def test_category(text: str, kind: str) -> None:
    assert category(text) == kind
    assert kind in CATEGORIES


def test_step_skills_are_asked_for_in_full_prompts_only() -> None:
    """The tiny policy has not been taught them."""
    text = analysis_messages(episode(), "full", step_skills=5)[0].content
    assert "at most 5 critical steps" in text
    assert "step_skills" in text
    assert "step_skills" not in analysis_messages(episode(), "full")[0].content
    compact = analysis_messages(episode(), "compact")
    assert analysis_messages(episode(), "compact", step_skills=5) == compact


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"1": "go", "3": " stop "}, {0: "go", 2: "stop"}),
        ({"3": "c", "2": "b", "1": "a"}, {0: "a", 1: "b"}),  # two at most, the first turns
        ({"0": "no", "4": "no", "x": "no", "2": 7, "1": " "}, {}),
        ({"1": "a\nb", "2": "y" * 1201}, {0: "a\nb"}),
        ({"1": "\ud800"}, {}),
        (["go"], {}),
        (None, {}),
    ],
)
def test_step_skills(given: object, found: dict[int, str]) -> None:
    """Steps are counted from 1 by the policy; what is unusable leaves the skill of the episode."""
    answer = json.dumps({**GOOD, "step_skills": given})
    assert read_step_skills(f"so: {answer}", steps=3, most=2) == found
    assert read_skill(answer) == (GOOD["episode_skill"], "")


def test_no_step_skills_without_an_analysis() -> None:
    assert read_step_skills(json.dumps(GOOD), 3, 5) == {}
    assert read_step_skills('{"step_skills": {"1": "go"}}', 3, 5) == {}
    assert read_step_skills("no", 3, 5) == {}
