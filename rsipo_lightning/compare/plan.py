"""What is to be run: arms x seeds, each with its config, and what makes them comparable."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rsipo_lightning import registry
from rsipo_lightning.bank import SkillBank
from rsipo_lightning.composing import component, compose, plain
from rsipo_lightning.config import RunConfig
from rsipo_lightning.errors import ConfigError, DataError
from rsipo_lightning.run_folder import CONFIG, RECORD, RunFolder

# Keys (or sections) that all arms share: the same tasks, the same evaluation, the same budget.
SHARED = (
    "groups.env",
    "groups.model",
    "model",
    "env",
    "eval",
    "trainer.updates",
    "rollout.tasks",
)
OWN = {"seed": "--seeds", "run.dir": "--out", "run.root": "--out"}  # not to be set by key=value
FILES = (".json", ".md", ".png")  # what a comparison writes beside the folders of its arms
MOST_SEEDS = 1000
NO_RESULT = ("run", "log", "checkpoint")  # sections that do not change what a run finds


class State(StrEnum):
    """How far a run has come."""

    NEW = "waiting"
    STARTED = "to be continued"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of a comparison: an algorithm, and keys that are set for it alone."""

    name: str
    algo: str
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        good = re.fullmatch(r"[A-Za-z0-9][\w.+-]*", self.name) and len(self.name) <= 60
        if not good or Path(self.name).suffix in FILES:
            raise ConfigError(
                f"arm '{self.name}': its name becomes a folder beside compare.json, use at most 60 "
                "letters, digits and _-.+"
            )


@dataclass(frozen=True, slots=True)
class Setup:
    """What all arms have in common."""

    flags: Mapping[str, str]  # {"env": "search", ...}; also model, trainer, engine
    overrides: tuple[str, ...]  # key=value
    out: Path

    def config(self, arm: Arm) -> RunConfig:
        """The config of an arm with seed 0. ConfigError, PluginError."""
        for item in (*self.overrides, *arm.overrides):
            if flag := OWN.get(item.partition("=")[0]):
                raise ConfigError(f"{item}: choose it with {flag}")
        overrides = [*self.overrides, *arm.overrides]
        return compose(**self.flags, algo=arm.algo, overrides=overrides)

    def run(self, arm: Arm, config: RunConfig, seed: int) -> Run:
        """The run of an arm with a seed."""
        return Run(arm, seed, self.out / arm.name / f"s{seed}", replace(config, seed=seed), self)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One cell of the table of arms and seeds; equal to itself only, so that it can be a key."""

    arm: Arm
    seed: int
    folder: Path
    config: RunConfig
    setup: Setup

    @property
    def log(self) -> Path:
        """What the process said; beside the folder, which the run makes itself."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def arguments(self, state: State) -> list[str]:
        """Those of ``rsipo-fit``."""
        if state is State.STARTED:
            return ["--resume", str(self.folder)]
        flags = {**self.setup.flags, "algo": self.arm.algo}
        return [
            *(part for name, value in flags.items() for part in (f"--{name}", value)),
            *self.setup.overrides,
            *self.arm.overrides,
            f"seed={self.seed}",
            f"run.dir={_quoted(self.folder)}",
        ]

    def state(self) -> State:
        """Read from its folder. ConfigError if that was run with another config."""
        from rsipo_lightning.callbacks.checkpoints import FOLDER, saved

        if not (self.folder / CONFIG).is_file() or not (self.folder / RECORD).is_file():
            return State.NEW
        before = compose(config=self.folder / CONFIG)
        if keys := differences(before, self.config):
            old, new = flat(before).get(keys[0]), flat(self.config).get(keys[0])
            raise ConfigError(
                f"{self.folder} was run with {keys[0]}={old}, now it would be {new}; "
                "choose another --out, or move that folder away"
            )
        result = RunFolder.open(self.folder).record().get("result", {})
        if result.get("updates") == self.config.trainer.updates and "after" in result:
            return State.DONE
        return State.STARTED if saved(self.folder / FOLDER) else State.NEW


def _quoted(path: Path) -> str:
    """A path as the value of a key, which is read as YAML: a comment begins in ``a #1``."""
    text = str(path)
    plain = re.fullmatch(r"[\w./+-]+", text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def parse_arm(text: str) -> Arm:
    """``"short: rsipo algo.replays=2 env.questions='[a.jsonl, b.jsonl]'"``; quotes as in a shell.

    >>> parse_arm("short: rsipo algo.replays=2").overrides
    ('algo.replays=2',)
    """
    name, colon, rest = text.partition(":")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"--arm '{text}': {error}") from error
    if not colon or not words:
        raise ConfigError(f"--arm '{text}' is not 'NAME: ALGO key=value ...'")
    return Arm(name.strip(), words[0], tuple(words[1:]))


def parse_seeds(text: str) -> list[int]:
    """``5`` is 0, 1, 2, 3, 4; ``3,8`` is 3 and 8; ``7,`` is 7 alone.

    >>> parse_seeds("3"), parse_seeds("3,8"), parse_seeds("7,")
    ([0, 1, 2], [3, 8], [7])
    """
    parts = [part.strip() for part in text.split(",")]
    if not parts[-1]:
        parts.pop()
    if not parts or not all(part.isdecimal() and len(part) <= 10 for part in parts):
        raise ConfigError(f"--seeds {text}: give a number of seeds, or seeds with commas: 3,5,8")
    seeds = [int(part) for part in parts]
    if "," not in text:
        if seeds[0] > MOST_SEEDS:
            raise ConfigError(f"--seeds {text}: at most {MOST_SEEDS}; {text}, is this one alone")
        seeds = list(range(seeds[0]))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: at least one seed, each once")
    return seeds


def plan(
    setup: Setup, arms: Sequence[Arm], seeds: Sequence[int], control: str | None
) -> dict[Arm, list[Run]]:
    """All runs of each arm. ``control``: the algorithm that an arm with matched episodes uses.

    That arm is added where some arm plays episodes beyond its groups: its groups are larger by as
    many. An arm that trains nothing makes few updates, for its evaluations: further ones would show
    the same. Raises ConfigError and PluginError before anything is run.
    """
    names = [arm.name for arm in arms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two arms are called '{twice[0]}'")
    if not arms:
        raise ConfigError("name arms with --algos or --arm")
    configs = {arm: setup.config(arm) for arm in arms}
    episodes = [
        config.rollout.group + extra
        for config in configs.values()
        if (extra := extra_episodes(config))
    ]
    if control and episodes and f"{control}-matched" not in names:
        arm = Arm(f"{control}-matched", control, (f"rollout.group={max(episodes)}",))
        configs[arm] = setup.config(arm)
        if more := extra_episodes(configs[arm]):
            raise ConfigError(
                f"--control-algo {control}: it plays {more} replays of a task itself; choose one "
                "that plays none"
            )
    _check(configs)
    return {
        arm: [setup.run(arm, config, seed) for seed in seeds]
        for arm, config in map(_shortened, configs, configs.values())
    }


def trains(config: RunConfig) -> bool:
    """Whether the objective has a term at all."""
    from rsipo_lightning.algorithms.base import active

    return bool(active(_algorithm(config).streams))


def extra_episodes(config: RunConfig) -> int:
    """Episodes per task beyond the group, at most."""
    return int(_algorithm(config).extra_episodes)


def flat(config: RunConfig) -> dict[str, Any]:
    """``{"optim.lr": 1e-6, ...}``."""
    found: dict[str, Any] = {}
    waiting = [("", plain(config))]
    for prefix, node in waiting:
        for name, value in node.items():
            if isinstance(value, dict) and value:
                waiting.append((f"{prefix}{name}.", value))
            else:
                found[f"{prefix}{name}"] = value
    return found


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """Keys whose values differ, of those that change what a run finds."""
    a, b = flat(one), flat(other)
    keys = [key for key in {**a, **b} if key.split(".")[0] not in NO_RESULT]
    return [key for key in keys if a.get(key) != b.get(key)]


def _algorithm(config: RunConfig) -> Any:
    from rsipo_lightning.algorithms.base import Algorithm

    found = registry.load_class("algorithms", component("algo", config.groups["algo"]), Algorithm)
    found.check(config.algo, config.rollout)
    if found.uses_bank(config.algo) and config.algo.bank:
        SkillBank.load(config.algo.bank)  # what is not there is said now, not by every seed
    return found(config.algo, config.seed)


def _shortened(arm: Arm, config: RunConfig) -> tuple[Arm, RunConfig]:
    """An arm that trains nothing goes on until its first look at the validation tasks."""
    updates = min(config.trainer.updates, config.eval.every or 1)
    if trains(config) or updates == config.trainer.updates:
        return arm, config
    arm = replace(arm, overrides=(*arm.overrides, f"trainer.updates={updates}"))
    return arm, replace(config, trainer=replace(config.trainer, updates=updates))


def _check(configs: Mapping[Arm, RunConfig]) -> None:
    (first, base), *others = configs.items()
    if not base.eval.episodes:
        raise ConfigError("eval.episodes=0: a comparison needs test tasks")
    for arm, config in others:
        a, b = flat(base), flat(config)
        for key in differences(base, config):
            if any(key == shared or key.startswith(f"{shared}.") for shared in SHARED):
                raise ConfigError(
                    f"arms must share {key}: {first.name} has {a.get(key)}, "
                    f"{arm.name} has {b.get(key)}"
                )


def check_data(done: Iterable[Run]) -> None:
    """DataError if two finished runs read different files (by the checksums in run.json)."""
    known: dict[str, Path] = {}
    for run in done:
        known.setdefault(str(RunFolder.open(run.folder).record()["data"]), run.folder)
    if len(known) > 1:
        one, other, *_ = known.values()
        raise DataError(
            f'{one} and {other} read different data ("data" of their run.json); '
            "move the older one away, the same command makes it again"
        )
