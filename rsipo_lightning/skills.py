"""Skills as text: the prompt that asks for one, the parser, the categories of the paper's figure.

Source: methods.md sections 4, 6.3 and 6.6.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rsipo_lightning.errors import ConfigError
from rsipo_lightning.files import half_character
from rsipo_lightning.protocols import TASK_LINE
from rsipo_lightning.types import Message, Trajectory, Turn

CATEGORIES = ("procedural", "recovery", "format", "other")
MIN_WORDS = 5
MAX_CHARS = 1200
_PLACEHOLDERS = ("task", "outcome", "steps")
_FIELDS = ("episode_summary", "episode_skill")

_CATEGORY = {  # order of the tests; the first hit wins (methods.md 6.6)
    name: re.compile(pattern, re.IGNORECASE | re.MULTILINE | re.DOTALL)
    for name, pattern in (
        ("procedural", r"^\s*\d+[.)]|\bstep 1\b|\bfirst\b.*\bthen\b"),
        ("recovery", r"\bnothing happen(?:s|ed)\b|\bretry|\bif the action fails\b"),
        ("format", r"\bsyntax|\bformat|\btags?\b|<action>|\bexact command|\badmissible\b"),
    )
}


def analysis_messages(
    trajectory: Trajectory, style: str, template: Template | None = None, step_skills: int = 0
) -> list[Message]:
    """What the policy is asked when it writes a skill from one finished episode.

    The task description is what the episode's first message says up to its task line. ``style``
    is "full" (for real models) or "compact" (the same information in few tokens, for the tiny
    policy); ``template`` takes the place of the style's own. Raises ConfigError on another style.
    ``step_skills``: skills of single steps that may come with it; the compact style asks for none,
    the tiny policy has not been taught them.
    """
    if style not in _STEP:
        raise ConfigError(f"no prompt style '{style}' (have: {', '.join(_STEP)})")
    opening = trajectory.opening
    line = TASK_LINE.search(opening)
    name = "steps_full" if step_skills and style == "full" else style
    text = (template or _template(name)).substitute(
        most=step_skills,
        task=opening[: line.end() if line else None].strip(),
        outcome="success" if trajectory.success else "failure",
        steps="\n".join(_STEP[style](i, turn) for i, turn in enumerate(trajectory.turns, start=1)),
    )
    return [Message("user", text)]


def analysis_template(file: str) -> Template:
    """A user's prompt with $task, $outcome and $steps in it; ConfigError names what is wrong."""
    where = f"rollout.analysis_template={file}: "
    try:
        template = Template(Path(file).read_text(encoding="utf-8").rstrip("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}cannot be read ({error})") from error
    if not template.is_valid():
        raise ConfigError(f"{where}a dollar that is no placeholder is written $$")
    names = template.get_identifiers()
    if missing := [name for name in _PLACEHOLDERS if name not in names]:
        raise ConfigError(f"{where}lacks ${missing[0]}")
    if unknown := [name for name in names if name not in _PLACEHOLDERS]:
        have = ", ".join(f"${name}" for name in _PLACEHOLDERS)
        raise ConfigError(f"{where}has an unknown placeholder ${unknown[0]} (have: {have})")
    return template


def read_skill(text: str) -> tuple[str, str]:
    """``(skill, why it is invalid)``: skill is "" if none could be read, reason is "" if valid.

    >>> read_skill('{"episode_summary": "won", "episode_skill": "first look around, then act"}')
    ('first look around, then act', '')

    Takes the first balanced JSON object that has both fields, fenced or bare, nested or surrounded
    by text. Never raises.
    """
    return read_analysis(text)[1:]


def read_analysis(text: str) -> tuple[str, str, str]:
    """``(summary, skill, why it is invalid)``, see :func:`read_skill`; "" for what is not read."""
    found = _analysis(text)
    if found is None:
        return "", "", "no JSON object with " + " and ".join(_FIELDS)
    for field in _FIELDS:
        value = found[field]
        if not isinstance(value, str) or not value.strip():
            return "", "", f"{field} is empty or not text"
        if half_character(value):
            return "", "", f"{field} is not valid Unicode"
    summary, skill = (found[field].strip() for field in _FIELDS)
    if len(skill.split()) < MIN_WORDS:
        return summary, skill, f"fewer than {MIN_WORDS} words"
    if len(skill) > MAX_CHARS:
        return summary, skill, f"more than {MAX_CHARS} characters"
    return summary, skill, ""


def write_analysis(summary: str, skill: str) -> str:
    """The JSON that :func:`read_analysis` reads, as the policy is taught to write it."""
    return json.dumps(dict(zip(_FIELDS, (summary, skill), strict=True)), ensure_ascii=False)


def read_step_skills(text: str, steps: int, most: int) -> dict[int, str]:
    """``{turn: skill}`` of the same answer's field ``step_skills``, in the order of the turns.

    >>> answer = '{"episode_summary": "", "episode_skill": "", "step_skills": {"2": "go"}}'
    >>> read_step_skills(answer, steps=3, most=5)
    {1: 'go'}

    The answer counts steps from 1, like the prompt, turns count from 0. What is no step of the
    episode, or no text, is left out, and so is all beyond the first ``most``. Never raises.
    """
    given = (_analysis(text) or {}).get("step_skills")
    given = given if isinstance(given, dict) else {}
    pairs = ((given.get(str(k + 1)), k) for k in range(steps))
    found = {k: text.strip() for text, k in pairs if isinstance(text, str) and text.strip()}
    usable = [(k, t) for k, t in found.items() if len(t) <= MAX_CHARS and not half_character(t)]
    return dict(usable[:most])


def category(text: str) -> str:
    """Kind of advice, one of CATEGORIES, by key words."""
    return next((name for name, pattern in _CATEGORY.items() if pattern.search(text)), "other")


def _analysis(text: str) -> dict[str, Any] | None:
    """The first object that has the fields of an analysis."""
    return next((o for o in _objects(text) if all(field in o for field in _FIELDS)), None)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(strict=False)  # policies write line breaks inside strings
    for brace in re.finditer(r"\{", text):
        try:
            value, _ = decoder.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


@lru_cache
def _template(style: str) -> Template:
    file = resources.files("rsipo_lightning.configs") / "prompts" / f"analyse_{style}.txt"
    return Template(file.read_text(encoding="utf-8").rstrip("\n"))


def _full_step(index: int, turn: Turn) -> str:
    valid = "valid" if turn.valid else "invalid"
    lines = [f"Step {index} ({valid})", f"Response: {turn.completion.text.strip()}"]
    return "\n".join([*lines, f"Observation: {turn.observation.strip()}", ""])


def _compact_step(index: int, turn: Turn) -> str:
    """The order of the lines says the index; validity is said where it is missing."""
    lines = [
        turn.completion.text.strip(),
        "" if turn.valid else "(invalid)",
        turn.observation.strip(),
    ]
    return "\n".join(line for line in lines if line)


_STEP = {"full": _full_step, "compact": _compact_step}
