"""Names -> classes. Built-ins are import strings: nothing is imported but what was chosen."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rsipo_lightning.errors import PluginError, did_you_mean

BUILTIN: dict[str, dict[str, str]] = {
    "algorithms": {
        "dapo": "rsipo_lightning.algorithms.dapo:DAPO",
        "dr_grpo": "rsipo_lightning.algorithms.dr_grpo:DrGRPO",
        "gigpo": "rsipo_lightning.algorithms.gigpo:GiGPO",
        "grpo": "rsipo_lightning.algorithms.grpo:GRPO",
        "grpo_opsd": "rsipo_lightning.algorithms.grpo_opsd:GRPOOPSD",
        "gspo": "rsipo_lightning.algorithms.gspo:GSPO",
        "opid": "rsipo_lightning.algorithms.opid:OPID",
        "opsd": "rsipo_lightning.algorithms.opsd:OPSD",
        "rloo": "rsipo_lightning.algorithms.rloo:RLOO",
        "rlsd": "rsipo_lightning.algorithms.rlsd:RLSD",
        "rsipo": "rsipo_lightning.algorithms.rsipo:RSIPO",
        "sdar": "rsipo_lightning.algorithms.sdar:SDAR",
        "seed": "rsipo_lightning.algorithms.seed:SEED",
        "skill_grpo": "rsipo_lightning.algorithms.skill_grpo:SkillGRPO",
        "skill_prompt": "rsipo_lightning.algorithms.skill_prompt:SkillPrompt",
        "skill_sd": "rsipo_lightning.algorithms.skill_sd:SkillSD",
        "step_opsd": "rsipo_lightning.algorithms.step_opsd:StepOPSD",
        "vanilla": "rsipo_lightning.algorithms.vanilla:Vanilla",
    },
    "environments": {
        "search": "rsipo_lightning.environments.search:SearchSuite",
    },
    "engines": {
        "hf": "rsipo_lightning.engines.hf:HFEngine",
    },
}


def _table(kind: str) -> dict[str, str]:
    table = dict(BUILTIN[kind])
    for point in entry_points(group=f"rsipo_lightning.{kind}"):
        if point.name in table and table[point.name] != point.value:
            raise PluginError(
                f"two {kind} are called '{point.name}': {table[point.name]} and {point.value}; "
                "uninstall or rename one"
            )
        table[point.name] = point.value
    return table


def names(kind: str) -> list[str]:
    """Registered "algorithms", "environments" or "engines", third-party ones too; imports none."""
    return sorted(_table(kind))


def target(kind: str, name: str) -> str:
    """The import string ``module:Class`` registered under ``name``. Unknown: PluginError."""
    table = _table(kind)
    if name not in table:
        raise PluginError(f"no {kind[:-1]} '{name}'{did_you_mean(name, table)}")
    return table[name]


def load(kind: str, name: str) -> Any:
    """The class registered under ``name``. Unknown or unimportable: PluginError."""
    found = target(kind, name)
    module, _, attribute = found.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{kind[:-1]} '{name}' ({found}) cannot be imported: {error}") from error
