"""What the search environment says, in parts: shipped in configs/prompts, or from a user's file.

A template is a YAML file of named parts. ``env.prompt`` chooses a shipped one that has them all;
``env.template`` replaces those that it names. Placeholders are filled in once, so that braces in
data stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from string import Formatter

import yaml

from rsipo_lightning.errors import ConfigError, did_you_mean
from rsipo_lightning.files import half_character
from rsipo_lightning.protocols import TASK_LINE

STYLES = ("full", "compact")


@dataclass(frozen=True, slots=True)
class Wording:
    """A format string for each part; _MUST and _MAY list the placeholders."""

    opening: str  # the first message
    next: str  # append context: the next message; its {observation} is passages or `invalid`
    window: str  # window context: the next message; its {history} is lines of `step`
    step: str
    invalid: str  # the response was no action
    empty: str  # a search found nothing
    last: str  # the last turn was no answer; seen in transcripts and by who writes a skill

    @property
    def think(self) -> bool:
        """Whether a thought is asked for; if so, an action without one is invalid."""
        return "<think>" in self.opening


_MUST = {
    "opening": ("question",),
    "next": ("observation",),
    "window": ("question", "history"),
    "step": ("action", "observation"),
}
_MAY = {
    "opening": ("max_steps",),
    "next": ("taken", "max_steps"),
    "window": ("taken", "max_steps"),
    "step": ("step",),
    "invalid": ("why",),
}


def wording(style: str, template: str | None = None) -> Wording:
    """The parts of a style, some of them replaced by those of ``template``.

    ``template`` is a file or the name of a shipped one ("search_r1"). ConfigError names file and
    part: an unknown part or placeholder, a missing one, no line that states the task.
    """
    parts = _read(template_file(f"search_{style}"))
    return Wording(**(parts | _read(template_file(template)) if template else parts))


def template_file(template: str) -> Path:
    """Where a template is: a shipped one by its name, another by its path."""
    shipped = Path(str(resources.files("rsipo_lightning.configs"))) / "prompts" / f"{template}.yaml"
    return shipped if template.startswith("search_") and shipped.is_file() else Path(template)


def _read(file: Path) -> dict[str, str]:
    try:
        parts = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"env.template={file}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"env.template={file}: not YAML ({text})") from error
    if not isinstance(parts, dict) or not parts:
        raise ConfigError(f"env.template={file}: must hold parts, such as opening: TEXT")
    for name, text in parts.items():
        _check(str(name), text, f"env.template={file}: ")
    return parts


def _check(part: str, text: object, where: str) -> None:
    known = [field.name for field in fields(Wording)]
    if part not in known:
        raise ConfigError(f"{where}no part '{part}'{did_you_mean(part, known)}")
    where = f"{where}part '{part}' "
    if not isinstance(text, str):
        raise ConfigError(f"{where}must be text")
    if half_character(text):
        raise ConfigError(f"{where}holds half a character (a lone surrogate)")
    must = _MUST.get(part, ())
    may = (*must, *_MAY.get(part, ()))
    have = f"(have: {', '.join(f'{{{name}}}' for name in may) or 'none'})"
    try:
        found = {
            f"{name}{'!' if conversion else ''}{conversion or ''}{':' if form else ''}{form}"
            for _, name, form, conversion in Formatter().parse(text)
            if name is not None
        }
    except ValueError as error:
        raise ConfigError(f"{where}is no template: {error}; a brace is {{{{ or }}}}") from error
    if unknown := sorted(found.difference(may)):
        raise ConfigError(f"{where}has an unknown placeholder {{{unknown[0]}}} {have}")
    if missing := [name for name in must if name not in found]:
        raise ConfigError(f"{where}lacks {{{missing[0]}}}")
    if "question" in must:
        _check_task_line(text, may, where)


def _check_task_line(text: str, may: tuple[str, ...], where: str) -> None:
    """The line that the codec finds, behind which a skill is put, must be the question's."""
    values = dict.fromkeys(may, "1") | {"history": "Your question: other\n", "question": "QzzQ"}
    shown = text.format(**values)
    line = TASK_LINE.search(shown)
    if line is None or "QzzQ" not in line.group():
        raise ConfigError(
            f"{where}needs the line 'Your question: {{question}}', "
            "before all that looks like it (a skill is put behind it)"
        )
