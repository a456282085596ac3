"""Names -> classes. Built-ins are import strings: nothing is imported but what was chosen."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

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
        "alfworld": "rsipo_lightning.environments.alfworld.suite:AlfworldSuite",
        "search": "rsipo_lightning.environments.search:SearchSuite",
    },
    "engines": {
        "hf": "rsipo_lightning.engines.hf:HFEngine",
        "vllm": "rsipo_lightning.engines.vllm:VLLMEngine",
        "vllm_server": "rsipo_lightning.engines.vllm_server:VLLMServerEngine",
    },
}


class Entry(NamedTuple):
    """What is registered under a name."""

    target: str  # "module:Class"
    package: str = ""  # "name version" of the package that it comes from, if it is not this one


def _table(kind: str) -> dict[str, Entry]:
    table = {name: Entry(target) for name, target in BUILTIN[kind].items()}
    for point in entry_points(group=f"rsipo_lightning.{kind}"):
        new, old = Entry(point.value, _package(point)), table.get(point.name)
        if old and old.target != new.target:
            raise PluginError(
                f"two {kind} are called '{point.name}': {_said(old)} and {_said(new)}; "
                "uninstall or rename one"
            )
        table[point.name] = new
    return table


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def _said(entry: Entry) -> str:
    return f"{entry.target} of {entry.package}" if entry.package else entry.target


def names(kind: str) -> list[str]:
    """Registered "algorithms", "environments" or "engines", third-party ones too; imports none."""
    return sorted(_table(kind))


def entry(kind: str, name: str) -> Entry:
    """What is registered under ``name``; imports nothing. Unknown: PluginError."""
    table = _table(kind)
    if name not in table:
        raise PluginError(f"no {kind[:-1]} '{name}'{did_you_mean(name, table)}")
    return table[name]


def load(kind: str, name: str) -> Any:
    """The class registered under ``name``. Unknown or unimportable: PluginError."""
    found = entry(kind, name)
    module, _, attribute = found.target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # a plugin's module may raise what it likes
        what = error if isinstance(error, ImportError | AttributeError) else repr(error)
        text = (str(what).splitlines() or [""])[0]
        where = f"{kind[:-1]} '{name}' ({_said(found)})"
        raise PluginError(f"{where} cannot be imported: {text}") from error


def load_class(kind: str, name: str, base: type) -> Any:
    """As :func:`load`. PluginError also if it is no subclass of ``base`` that can be made."""
    found, where = load(kind, name), f"{kind[:-1]} '{name}' ({_said(entry(kind, name))})"
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(f"{where} is no subclass of {base.__module__}.{base.__qualname__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise PluginError(f"{where} lacks {', '.join(missing)}")
    return found
