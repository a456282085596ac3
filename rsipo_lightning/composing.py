"""``compose``: from flags, YAML files and key=value to a RunConfig, with the origin of each value.

YAML says only what differs from the dataclasses. A file configs/<group>/<name>.yaml is a patch of
the whole tree; its key ``use`` names the registered component if that is not the file's stem.
Every command composes the config of one kind of run (FIT, SFT); keys of a file that only the other
kind has are left out.
This module imports no torch by itself: the chosen algorithm may.
"""

from __future__ import annotations

import importlib.resources
import os.path
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rsipo_lightning import registry
from rsipo_lightning.config import SHIPPED, UNTRAINED, RunConfig, SftConfig
from rsipo_lightning.errors import ConfigError, PluginError, did_you_mean


class Group(NamedTuple):
    """A choice by flag."""

    kind: str  # as it is called in messages; with an s, the registry's kind
    default: str | None


# In the order in which their YAML is applied: later ones win.
GROUPS = {
    "model": Group("model", None),
    "env": Group("environment", None),
    "trainer": Group("trainer", "auto"),
    "engine": Group("engine", "hf"),
    "algo": Group("algorithm", None),
    "sft": Group("recipe", "scripted"),
}
COMMAND_LINE = "command line"  # origin of the values that were given as key=value
# Groups whose members are classes with a Config; the others are YAML alone.
COMPONENTS = ("env", "engine", "algo")


C = TypeVar("C", bound=RunConfig | SftConfig)


class Kind(NamedTuple, Generic[C]):
    """A kind of run."""

    config: type[C]
    groups: tuple[str, ...]  # the last one is what is run
    prefix: str = ""  # of what is run, in names of files that hold for a pair


FIT = Kind(RunConfig, ("model", "env", "trainer", "engine", "algo"))
SFT = Kind(SftConfig, ("model", "env", "engine", "sft"), "sft-")


@dataclass
class NoKeys:
    """Config of a component that has none: any key is unknown."""


class Composed(NamedTuple, Generic[C]):
    """A config and, for each of its keys, where the value came from."""

    config: C
    origins: dict[str, str]


def compose(
    *,
    algo: str | None = None,
    env: str | None = None,
    model: str | None = None,
    trainer: str | None = None,
    engine: str | None = None,
    config: str | PathLike[str] | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """The config of a run.

    From the lowest to the highest: dataclass defaults, configs/model, env, trainer, engine, algo,
    configs/pairs/<algo>-<env>.yaml, configs/tuned/<model>-<env>/common.yaml and <algo>.yaml, the
    same for presets (YAML with ``use``) of env and algo, the file ``config``, ``overrides``
    ("key=value"). A group that is not named is the one that the file names, else auto, hf, and as
    model the shipped policy for the environment, or hf if another ``model.path`` is given.

    >>> compose(algo="rsipo", env="search", overrides=["seed=1", "rollout.group=16"])

    Raises ConfigError for a key, value or file, PluginError for a name, each naming the place.
    """
    flags = {"algo": algo, "env": env, "model": model, "trainer": trainer, "engine": engine}
    return compose_kind(FIT, flags, config, overrides).config


def compose_kind(
    run: Kind[C],
    flags: Mapping[str, str | None],
    config: str | PathLike[str] | None = None,
    overrides: Sequence[str] = (),
) -> Composed[C]:
    """What ``compose`` does, for any kind of run and with the place that each value came from."""
    file = _read(Path(config)) if config else {}
    named = _named(file.pop("groups", None) or {}, str(config))
    groups: dict[str, str] = {}
    origins: dict[str, str] = {}
    for group in sorted(run.groups, key="model".__eq__):  # last: its default follows from the rest
        kind, default = GROUPS[group]
        name = flags.get(group) or named.get(group) or default
        if group == "model" and name is None:
            name = _fallback(groups, file, overrides)
        if name is None:
            raise ConfigError(f"choose an {kind}: --{group} NAME{_have(group)}")
        if name not in members(group):
            raise PluginError(f"no {kind} '{name}'{did_you_mean(name, members(group))}")
        groups[group] = name
        origin = f"--{group}" if flags.get(group) else str(config) if group in named else "default"
        origins[f"groups.{group}"] = origin
        # A section that the file holds for another member says nothing of this one.
        if named.get(group, name) != name:
            file.pop(group, None)
    groups = {group: groups[group] for group in run.groups}

    tree: DictConfig = OmegaConf.structured(run.config(groups=groups))
    for group in [group for group in run.groups if group in COMPONENTS]:
        loaded = registry.load(f"{GROUPS[group].kind}s", component(group, groups[group]))
        try:
            tree[group] = OmegaConf.structured(getattr(loaded, "Config", NoKeys))
        except OmegaConfBaseException as error:
            name = f"{GROUPS[group].kind} '{groups[group]}'"
            raise PluginError(f"Config of {name}: {_one_line(error)}") from error
    for path in _patches(run, groups):
        patch = _read(path)
        patch.pop("use", None)
        _apply(tree, _own(run, patch), f"configs/{path.relative_to(_configs())}", origins)
    if config:
        _apply(tree, _own(run, file), str(config), origins)
    for item in overrides:
        _apply(tree, _parse(item), COMMAND_LINE, origins, item.partition("=")[0])
    return Composed(_finish(run, tree, origins), origins)


def saved_groups(file: Path) -> dict[str, str]:
    """What was chosen for the run that has written this config file: {group: name}."""
    return _named(_read(file).get("groups") or {}, str(file))


def members(group: str) -> list[str]:
    """All names that ``--<group>`` takes: registered components and YAML files."""
    stems = {path.stem for path in (_configs() / group).glob("*.yaml")}
    if group in COMPONENTS:
        stems |= set(registry.names(f"{GROUPS[group].kind}s"))
    return sorted(stems)


def component(group: str, name: str) -> str:
    """Registered name behind a member of a group: ``use`` of its YAML, else the name itself.

    PluginError if a package has registered the name of a preset.
    """
    path = yaml_file(group, name)
    used = str(_read(path).get("use", name)) if path.exists() else name
    kind = f"{GROUPS[group].kind}s"
    if used != name and group in COMPONENTS and name in registry.names(kind):
        package = registry.entry(kind, name).package
        raise PluginError(f"two {kind} are called '{name}': a preset and that of {package}")
    return used


def yaml_file(group: str, name: str) -> Path:
    """Where the YAML of a member is, if it has one."""
    return _configs() / group / f"{name}.yaml"


def to_yaml(config: RunConfig | SftConfig, origins: Mapping[str, str] | None = None) -> str:
    """A text that ``--config`` takes; with ``origins``, each value says where it came from."""
    lines = list(_lines(config, "", origins))
    width = max(len(line) for line, _ in lines)
    return "".join(
        f"{line:{width}}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines
    )


def plain(value: Any) -> Any:
    """The same in dicts, lists and scalars, as JSON and YAML know them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _configs() -> Path:
    return Path(str(importlib.resources.files("rsipo_lightning.configs")))


def _named(groups: Any, place: str) -> dict[str, str]:
    """What the key ``groups`` of a file holds, checked."""
    if not isinstance(groups, Mapping) or not all(
        isinstance(name, str) for name in [*groups, *groups.values()]
    ):
        raise ConfigError(f"groups must hold group: name ({place})")
    if unknown := [group for group in groups if group not in GROUPS]:
        raise ConfigError(f"no group '{unknown[0]}'{did_you_mean(unknown[0], GROUPS)} ({place})")
    return dict(groups)


def _own(run: Kind[C], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that only the other kind of run has."""

    def without(
        patch: Mapping[str, Any], own: Mapping[str, Any], other: Mapping[str, Any]
    ) -> dict[str, Any]:
        kept = {name: v for name, v in patch.items() if name in own or name not in other}
        for name, value in kept.items():
            sections = own.get(name), other.get(name)
            if isinstance(value, Mapping) and all(isinstance(s, Mapping) for s in sections):
                kept[name] = without(value, own[name], other[name])
        return kept

    other = SFT.config() if run is FIT else FIT.config()
    return without(patch, asdict(run.config()), asdict(other))


def _fallback(groups: Mapping[str, str], file: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The model without --model: the shipped policy that was taught for the environment, else
    "tiny"; unless another path is named, which must not get its settings.
    """
    presets = [yaml_file(group, name) for group, name in groups.items()]
    said = [*(_read(path) for path in presets if path.exists()), file, *map(_parse, overrides)]
    sections = [patch["model"] for patch in said if isinstance(patch.get("model"), Mapping)]
    paths = [str(section["path"]) for section in sections if section.get("path") is not None]
    if not paths:
        own = f"tiny_{component('env', groups['env'])}"
        return own if own in SHIPPED else "tiny"
    if paths[-1] in UNTRAINED:
        return "tiny"
    if paths[-1] in SHIPPED:  # under the name of its preset
        return paths[-1]
    run = Path(paths[-1]).parent / "config.yaml"
    if Path(paths[-1]).name == "policy" and os.path.isfile(run):  # of an earlier run: its preset
        return saved_groups(run).get("model", "hf")
    return "hf"


def _have(group: str) -> str:
    return f" (have: {', '.join(members(group))})"


def _patches(run: Kind[C], groups: Mapping[str, str]) -> list[Path]:
    """YAML files of the chosen members, each a patch of the whole tree, lowest first.

    A preset (``use``) starts from what is said of its component: first the files of the plain
    choice, then those of the preset of the environment, then of the algorithm's. Only what was
    tuned on another environment is left out: a preset stands for a protocol, and values that were
    found under another one would change it without a word.
    """
    plain = {group: component(group, name) for group, name in groups.items()}
    paths: list[Path] = []
    for chosen in (plain, {**plain, "env": groups["env"]}, groups):
        paths += [yaml_file(group, name) for group, name in chosen.items()]
        what = run.prefix + chosen[run.groups[-1]]
        paths.append(yaml_file("pairs", f"{what}-{chosen['env']}"))
        if chosen["env"] == groups["env"]:
            pair = f"tuned/{chosen['model']}-{chosen['env']}"
            paths += [yaml_file(pair, f"{run.prefix}common"), yaml_file(pair, what)]
    return [path for path in dict.fromkeys(paths) if path.exists()]


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold keys and values, not a list")
    return {str(key): value for key, value in loaded.items()}


def _parse(item: str) -> dict[str, Any]:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"'{item}' is not key=value")
    try:
        loaded = OmegaConf.to_container(OmegaConf.from_dotlist([item]))
    except (ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        value = value if len(value) < 100 else f"{value[:100]}..."
        raise ConfigError(f"{key}: '{value}' is not a value: {_one_line(error)}") from error
    assert isinstance(loaded, dict)
    return {str(name): part for name, part in loaded.items()}


def _apply(
    tree: DictConfig,
    patch: Mapping[str, Any],
    source: str,
    origins: dict[str, str],
    named: str = "",
) -> None:
    """Write each leaf of ``patch`` into ``tree`` and its source into ``origins``.

    A leaf that is a dict is replaced, unless ``named``, the dotted key of all the patch, goes on
    inside it.
    """
    if "groups" in patch:
        raise ConfigError(f"groups are chosen by flags: {' '.join(f'--{name}' for name in GROUPS)}")
    for key, section, name, value in list(_leaves(tree, patch, "", source)):
        try:
            OmegaConf.update(section, name, value, merge=named.startswith((f"{key}.", f"{key}[")))
        except (RecursionError, OmegaConfBaseException) as error:
            raise ConfigError(f"{key}={value}: {_one_line(error)} ({source})") from error
        origins[key] = source


def _leaves(
    node: DictConfig, patch: Mapping[str, Any], prefix: str, source: str
) -> Iterator[tuple[str, DictConfig, str, Any]]:
    """(full key, its section, its name in it, value) of each leaf of a patch."""
    for name, value in patch.items():
        key = f"{prefix}{name}"
        if name not in node:
            raise ConfigError(f"no key '{key}'{_suggest(key, node._get_root())} ({source})")
        if not is_dataclass(OmegaConf.get_type(node, name)):
            yield key, node, name, value
        elif isinstance(value, Mapping):
            yield from _leaves(node[name], value, f"{key}.", source)
        elif value is not None:  # a section whose lines are all comments is None
            raise ConfigError(f"{key} is a section, set one of its keys: {key}.KEY ({source})")


def _suggest(key: str, tree: Any) -> str:
    known = list(_keys(tree, ""))
    short = {full.rpartition(".")[2]: full for full in reversed(known)}
    if full := short.get(key.rpartition(".")[2]):  # the right key in the wrong section, or in none
        return f"; did you mean '{full}'?"
    names = short | {full: full for full in known}
    close = get_close_matches(key, names, n=1)
    return f"; did you mean '{names[close[0]]}'?" if close else "; --print-config shows all keys"


def _keys(node: DictConfig, prefix: str) -> Iterator[str]:
    for name in map(str, node):
        if is_dataclass(OmegaConf.get_type(node, name)):
            yield from _keys(node[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _finish(run: Kind[C], tree: DictConfig, origins: Mapping[str, str]) -> C:
    """Plain dataclasses; their ``__post_init__`` checks the ranges."""
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise ConfigError(f"{key}: {_one_line(error)}{_place(key, origins)}") from error
    except (ValueError, TypeError) as error:  # of a plugin's own check too
        text = _one_line(error)
        raise ConfigError(f"{text}{_place(text.partition('=')[0], origins)}") from error
    assert isinstance(config, run.config)
    return config


def _place(key: str, origins: Mapping[str, str]) -> str:
    return f" ({origins[key]})" if key in origins else ""


def _one_line(error: Exception) -> str:
    """First line of a message; YAML's with the place, which stands in its second."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lines(
    section: Any, prefix: str, origins: Mapping[str, str] | None
) -> Iterator[tuple[str, str]]:
    """(line, where the value came from) of each key, in the order of the dataclasses."""
    indent = "  " * prefix.count(".")
    names = section if isinstance(section, Mapping) else [f.name for f in fields(section)]
    for name in names:
        value = section[name] if isinstance(section, Mapping) else getattr(section, name)
        if f"{prefix}{name}" == "groups" or (is_dataclass(value) and fields(value)):
            yield f"{indent}{name}:", ""
            yield from _lines(value, f"{prefix}{name}.", origins)
        else:
            text = yaml.safe_dump(
                plain(value),
                default_flow_style=True,
                allow_unicode=True,
                width=float("inf"),
                sort_keys=False,
            )
            place = "" if origins is None else origins.get(f"{prefix}{name}", "default")
            yield f"{indent}{name}: {text.strip().removesuffix('...').strip()}", place
