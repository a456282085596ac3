"""Skill banks: advice by task type, in the format of SkillRL (methods.md section 2).

    {"general_skills": [{"title": "...", "principle": "...", "when_to_apply": "..."}, ...],
     "task_specific_skills": {"comparison": [the same fields, ...], ...},
     "common_mistakes": [{"description", "why_it_happens", "how_to_avoid"}, ...],
     "task_types": {"compare": "comparison", ...}}

SkillRL's search bank calls the second list ``query_type_skills``. ``task_types`` is ours, and
optional: it says which list serves a task type that is not called like one. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from rsipo_lightning.checks import at_least
from rsipo_lightning.errors import ConfigError, DataError, did_you_mean
from rsipo_lightning.files import half_character, hash_file

_SKILL = ("title", "principle", "when_to_apply")
_MISTAKE = ("description", "why_it_happens", "how_to_avoid")
_SPECIFIC = ("task_specific_skills", "query_type_skills")


@dataclass
class BankConfig:
    """Keys of an algorithm that uses a skill bank."""

    bank: str | None = None  # a file, or a name of configs/banks; by default the environment's
    bank_types: dict[str, str] = field(default_factory=dict)  # task type -> its list in the bank
    bank_top: int = 0  # skills that are shown of each list, the first ones; 0 is all

    def __post_init__(self) -> None:
        at_least("algo.bank_top", self.bank_top, 0)
        if self.bank and getattr(self, "skill_source", "bank") != "bank":
            raise ConfigError(f"algo.bank={self.bank}: set algo.skill_source=bank to use it")
        # beside it stands the Config of an algorithm, which may have checks of its own
        getattr(super(), "__post_init__", lambda: None)()


@dataclass(frozen=True, slots=True)
class SkillBank:
    """General skills and those of each task type, ready to be shown."""

    source: str  # where it was read from
    general: tuple[str, ...]
    specific: Mapping[str, tuple[str, ...]]  # {list: its skills}
    task_types: Mapping[str, str]  # {task type: list}, of types that are not called like a list
    top: int = 0  # skills that are shown of each list; 0 is all
    compact: bool = False  # whether headings are left out too

    @classmethod
    def load(
        cls,
        source: str | Path,
        task_types: Mapping[str, str] | None = None,
        top: int = 0,
        style: str = "full",
    ) -> SkillBank:
        """Read a JSON file, or the bank of that name in configs/banks.

        ``style`` is that of the prompts: "full", or "compact" for principles alone, without titles
        and headings. ``task_types`` is added to the file's own and wins. DataError: no such file,
        or "file: what is wrong with it".
        """
        path = _path(str(source))
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DataError(f"skill bank {path} cannot be read: {reason}") from error
        if not isinstance(data, dict):
            raise DataError(f"{path}: a skill bank must be a JSON object")
        lists = next((name for name in _SPECIFIC if name in data), _SPECIFIC[0])
        specific = _object(path, lists, data.get(lists))
        own = _object(path, "task_types", data.get("task_types", {}))
        _rows(path, "common_mistakes", data.get("common_mistakes"), _MISTAKE)
        bank = cls(
            source=str(path),
            general=_skills(path, "general_skills", data.get("general_skills"), style),
            specific={
                k: _skills(path, f"{lists}.{k}", rows, style) for k, rows in specific.items()
            },
            task_types={**own, **(task_types or {})},
            top=top,
            compact=style == "compact",
        )
        if empty := [name for name, skills in bank.specific.items() if not skills]:
            raise DataError(f"{path}: {lists}.{empty[0]} is empty")
        for kind, name in bank.task_types.items():
            if not isinstance(name, str) or name not in bank.specific:
                known = did_you_mean(str(name), bank.specific)
                raise DataError(f"{path}: no skills '{name}' for task type '{kind}'{known}")
        return bank

    @classmethod
    def of(cls, config: BankConfig, env: str, types: Sequence[str], style: str) -> SkillBank:
        """The bank that an algorithm's keys name; it must know all ``types`` of the environment.

        By default the environment's own, in the ``style`` of its prompts if it has one of these.
        """
        own = [name for name in (f"{env}_{style}", env) if name in _builtin()]
        if config.bank is None and not own:
            have = ", ".join(_builtin())
            raise ConfigError(
                f"environment '{env}' has no skill bank: algo.bank=FILE (have: {have})"
            )
        bank = cls.load(config.bank or own[0], config.bank_types, config.bank_top, style)
        for kind in types:
            bank.text(kind)
        return bank

    def describe(self) -> dict[str, str]:
        """What a run records of it: path and hash of the file."""
        return {"path": self.source, "sha256": hash_file(self.source)}

    def text(self, task_type: str) -> str:
        """General skills, then those of a task type, a line for each. Unknown type: DataError.

        The common mistakes of the file are not shown, as in the methods that use a bank.
        """
        name = self.task_types.get(task_type, task_type)
        if name not in self.specific:
            raise DataError(
                f"{self.source}: no skills for task type '{task_type}' (have: "
                f"{', '.join(self.specific)}); choose: algo.bank_types.{task_type}=NAME"
            )
        top = self.top or None
        parts = {
            "General skills": self.general[:top],
            f"Skills for {name.replace('_', ' ')}": self.specific[name][:top],
        }
        if self.compact:
            return "\n".join(skill for skills in parts.values() for skill in skills)
        return "\n\n".join(
            "\n".join([f"{title}:", *skills]) for title, skills in parts.items() if skills
        )


def _builtin() -> dict[str, Path]:
    folder = Path(str(resources.files("rsipo_lightning.configs"))) / "banks"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def _path(source: str) -> Path:
    path = _builtin().get(source, Path(source))
    if not path.is_file():
        raise DataError(f"no skill bank '{source}': no such file{did_you_mean(source, _builtin())}")
    return path


def _object(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{path}: {where} must be an object")
    return value


def _rows(path: Path, where: str, value: Any, fields: Sequence[str]) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise DataError(f"{path}: {where} must be a list")
    for i, row in enumerate(value):
        for name in fields:
            text = row.get(name) if isinstance(row, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise DataError(f"{path}: {where}[{i}] needs a text '{name}'")
            if half_character(text):
                raise DataError(f"{path}: '{name}' of {where}[{i}] is not valid Unicode")
    return value


def _skills(path: Path, where: str, value: Any, style: str) -> tuple[str, ...]:
    rows = [{k: row[k].strip() for k in _SKILL} for row in _rows(path, where, value, _SKILL)]
    if style == "compact":
        return tuple(r["principle"] for r in rows)
    return tuple(f"- {r['title']}: {r['principle']} (When: {r['when_to_apply']})" for r in rows)
