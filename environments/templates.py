"""What an environment says, in parts: shipped in configs/prompts, or from a user's file.

A template is a YAML file of named parts. ``env.prompt`` chooses a shipped one that has them all;
``env.template`` replaces those that it names. Placeholders are filled in once, so that braces in
data stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from string import Formatter
from typing import ClassVar, Self

import yaml

from rsipo_lightning.errors import ConfigError, did_you_mean
from rsipo_lightning.files import half_character
from rsipo_lightning.protocols import TASK_LINE

STYLES = ("full", "compact")

# "<" before anything that could make it a tag or a chat marker, and Mistral's [INST]
_CONTROL = re.compile(r"<(?=[^\s\d=])|\[(?=/?INST\])")


def inert(text: str) -> str:
    """Data on one line that cannot act: "<search>" becomes "< search>", chat markers likewise."""
    return _CONTROL.sub(lambda match: match.group() + " ", " ".join(text.split()))


@dataclass(frozen=True, slots=True)
class Template:
    """A format string for each part; each environment adds its own in a subclass."""

    env: ClassVar[str]  # shipped files are called <env>_<name>.yaml
    line: ClassVar[str]  # states the task: "Your question: {question}"
    must: ClassVar[Mapping[str, tuple[str, ...]]]  # placeholders of each part
    may: ClassVar[Mapping[str, tuple[str, ...]]]

    opening: str  # the first message

    @property
    def think(self) -> bool:
        """Whether a thought is asked for; if so, an action without one is invalid."""
        return "<think>" in self.opening

    @classmethod
    def read(cls, style: str, template: str | None = None) -> Self:
        """The parts of a style, some of them replaced by those of ``template``.

        ``template`` is a file or the name of a shipped one ("search_r1"). ConfigError names file
        and part: an unknown part or placeholder, a missing one, no line that states the task.
        """
        parts = cls._read(cls.file(f"{cls.env}_{style}"))
        return cls(**(parts | cls._read(cls.file(template)) if template else parts))

    @classmethod
    def file(cls, template: str) -> Path:
        """Where a template is: a shipped one by its name, another by its path."""
        configs = Path(str(resources.files("rsipo_lightning.configs")))
        shipped = configs / "prompts" / f"{template}.yaml"
        own = template.startswith(f"{cls.env}_") and shipped.is_file()
        return shipped if own else Path(template)

    @classmethod
    def _read(cls, file: Path) -> dict[str, str]:
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
            cls._check(str(name), text, f"env.template={file}: ")
        return parts

    @classmethod
    def _check(cls, part: str, text: object, where: str) -> None:
        known = [field.name for field in fields(cls)]
        if part not in known:
            raise ConfigError(f"{where}no part '{part}'{did_you_mean(part, known)}")
        where = f"{where}part '{part}' "
        if not isinstance(text, str):
            raise ConfigError(f"{where}must be text")
        if half_character(text):
            raise ConfigError(f"{where}holds half a character (a lone surrogate)")
        must = cls.must.get(part, ())
        may = (*must, *cls.may.get(part, ()))
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
        task = cls.line.partition("{")[2].rstrip("}")
        if task in must:
            cls._check_task_line(text, may, where, task)

    @classmethod
    def _check_task_line(cls, text: str, may: tuple[str, ...], where: str, task: str) -> None:
        """The line that the codec finds, behind which a skill is put, must be the task's."""
        other = cls.line.replace(f"{{{task}}}", "other\n")
        values = dict.fromkeys(may, "1") | {task: "QzzQ"}
        shown = [text.format(**{**values, "history": history}) for history in ("", other)]
        lines = map(TASK_LINE.search, shown)
        if not all(line is not None and "QzzQ" in line.group() for line in lines):
            raise ConfigError(
                f"{where}needs the line '{cls.line}', "
                "before all that looks like it (a skill is put behind it)"
            )
