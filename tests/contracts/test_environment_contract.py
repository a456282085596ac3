"""All environments keep the rules of ``check_environment``; a broken one for each rule."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rsipo_lightning.composing import component, compose, members
from rsipo_lightning.errors import DataError, EnvironmentFault
from rsipo_lightning.protocols import EnvironmentConfig, StepResult, TaskSuite
from rsipo_lightning.testing import ContractError, check_environment
from rsipo_lightning.types import Stop, Task

PLUGIN = Path(__file__).parents[1] / "plugin" / "rsipo_demo"


@pytest.mark.parametrize("prompt", ["compact", "full"])
@pytest.mark.parametrize("env", members("env"))
def test_every_environment_and_preset(env: str, prompt: str) -> None:
    config = compose(algo="grpo", env=env, overrides=[f"env.prompt={prompt}"]).env
    check_environment(component("env", env), config)


class Door:
    """Say "open". Three steps."""

    def __init__(self, suite: Doors) -> None:
        self.suite, self.left, self.own = suite, 0, random.random()

    def reset(self, task: Task) -> str:
        self.left = 3
        return f"Your task is to: leave {task.id}."

    def step(self, response: str) -> StepResult:
        if not self.left:
            raise EnvironmentFault("over")
        won = response.startswith("open")
        self.left = 0 if won else self.left - 1
        if won:
            return StepResult("open", "", 1.0, success=True, stop=Stop.DONE)
        stop = None if self.left else Stop.MAX_TURNS
        return StepResult("", "It is shut.", valid=False, stop=stop)

    def close(self) -> None:
        self.left = 0


class Opens:
    says = "open!"

    def act(self, observation: str) -> str:
        return self.says

    def close(self) -> None:
        pass


class Doors(TaskSuite):
    Config = EnvironmentConfig
    name = "doors"
    types = ("wood", "iron")  # type: ignore[assignment]
    stop = ("!",)  # type: ignore[assignment]
    episode: Callable[..., Any] = Door
    actor: Callable[[], Any] = Opens

    def __init__(self, config: EnvironmentConfig, seed: int) -> None:
        self.config, self.seed, self.made = config, seed, 0

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in ("train", "val", "test"):
            raise DataError("no such split")
        return [self.task(split, kind) for kind in ("wood", "iron")]

    def task(self, split: str, kind: str) -> Task:
        return Task(f"{split}-{kind}", "doors", kind, {"n": 1})

    def make(self) -> Any:
        self.made += 1
        return type(self).episode(self)

    def expert(self, task: Task, rng: random.Random) -> Any:
        return type(self).actor()

    def hindsight(self, trajectory: Any, rng: random.Random) -> str:
        return f"say open, {rng.random()}"


class Turning(Doors):
    """Tasks in another order at each call."""

    def tasks(self, split: str) -> Sequence[Task]:
        self.made += 1
        return super().tasks(split)[:: (-1) ** self.made]


def suite(**members: Any) -> type[Doors]:
    return type("Broken", (Doors,), members)


def tasks(**change: Any) -> type[Doors]:
    """Each task with other fields."""
    return suite(task=lambda self, split, kind: replace(Doors.task(self, split, kind), **change))


def episode(**members: Any) -> type[Doors]:
    return suite(episode=type("Broken", (Door,), members))


def results(change: Callable[[Any, StepResult], Any]) -> type[Doors]:
    """Each result is another one."""
    return episode(step=lambda self, response: change(self, Door.step(self, response)))


def after_end(self: Door, response: str) -> StepResult:
    if not self.left:
        raise ValueError("over")
    return Door.step(self, response)


def endless(self: Door, response: str) -> StepResult:
    self.left = 2
    return StepResult("", "It is shut.")


def once(method: Callable[[Any], None]) -> Callable[[Any], None]:
    def close(self: Any) -> None:
        method(self)
        if vars(self).setdefault("closed", False):
            raise RuntimeError("closed")
        self.closed = True

    return close


def opening(text: Callable[[Any], Any]) -> type[Doors]:
    return episode(reset=lambda self, task: (Door.reset(self, task), text(self))[1])


LINE = "Your task is to: leave"
BROKEN: list[tuple[Any, str]] = [
    (Door, "Door: is no subclass of TaskSuite"),
    # what is declared
    (suite(name=None), "name is missing"),
    (suite(types=("wood", "wood")), "types must be names, each once"),
    (suite(stop=["!"]), "stop must be a tuple of texts"),
    (suite(Config=dict), "its config is no dict"),
    (suite(describe=lambda self: {"files": Path("x")}), "describe() is not plain JSON"),
    # tasks
    (tasks(id="one"), "split 'train' has an id twice"),
    (
        suite(task=lambda self, split, kind: Task(kind, "doors", kind, {})),
        "is in 'train' and in 'val'",
    ),
    (tasks(type="glass"), "type 'glass'"),
    (tasks(env="windows"), "env is 'windows', the suite's name 'doors'"),
    (tasks(payload={"n": (1, 2)}), "the payload is not plain JSON"),
    (tasks(payload={1: 2}), "the payload is not plain JSON"),
    (
        suite(tasks=lambda self, split: [] if split == "val" else Doors.tasks(self, split)),
        "split 'val' has no tasks",
    ),
    (suite(tasks=lambda self, split: [self.task(split, "wood")]), "must raise DataError"),
    (Turning, "gives other tasks, or another order, when it is called again"),
    # the first message
    (opening(lambda self: None), "the first message is no text"),
    (opening(lambda self: "Leave."), "the first message: no place for a skill"),
    (opening(lambda self: f"{LINE} \ud800"), "the first message is no text"),
    (opening(lambda self: f"{LINE} {random.random()}"), "reset twice, two texts"),
    (opening(lambda self: f"{LINE} {self.own}"), "a second time: reset gives another first"),
    (opening(lambda self: f"{LINE} {self.suite.made}"), "reset gives another first message"),
    (opening(lambda self: f"{LINE} {self.suite.seed}"), "fresh suite with another seed: reset"),
    # steps
    (results(lambda self, r: None), "step returns no StepResult"),
    (results(lambda self, r: replace(r, observation=None)), "the observation of a step is no text"),
    (results(lambda self, r: replace(r, prompt="Go on.")), "the prompt of a step: no place for a"),
    (results(lambda self, r: replace(r, stop=Stop.CONTEXT)), "a step ends with <Stop.CONTEXT"),
    (results(lambda self, r: replace(r, success=True)), "success is said before the end"),
    (results(lambda self, r: replace(r, reward=float("nan"))), "must be finite numbers"),
    (results(lambda self, r: replace(r, measures={"x": "y"})), "must be finite numbers"),
    (results(lambda self, r: replace(r, reward=random.random())), "the same responses give other"),
    (results(lambda self, r: replace(r, reward=self.suite.seed)), "another seed: the same"),
    (episode(step=endless), "goes on after max_steps=5 steps"),
    (episode(step=lambda self, r: {"open": 1}[r]), "step('') raised KeyError: ''"),
    (episode(step=lambda self, r: StepResult("", "", stop=Stop.DONE)), "after the end must raise"),
    (episode(step=after_end), "step after the end raises ValueError, not EnvironmentFault"),
    (episode(close=once(Door.close)), "close raised RuntimeError: closed"),
    (
        suite(step_many=lambda self, e, r: TaskSuite.step_many(self, e, r)[::-1]),
        "step_many gives other results than step",
    ),
    # experts, skills, the end
    (suite(actor=type("X", (Opens,), {"says": "open"})), "'open', which ends with no string of"),
    (
        suite(actor=type("X", (Opens,), {"close": once(Opens.close)})),
        "close of the expert raised RuntimeError: closed",
    ),
    (
        episode(step=lambda self, r: Door.step(self, r if not r.endswith("!\n") else "")),
        "a line break behind a stop string changes the result",
    ),
    (suite(check_skill=lambda self, trajectory, text: None), "check_skill returns no text"),
    (suite(check_skill=lambda self, trajectory, text: text[0]), "check_skill raised IndexError"),
    (suite(hindsight=lambda self, trajectory, rng: ""), "hindsight returns no text"),
    (suite(hindsight=lambda self, t, rng: f"{random.random()}"), "hindsight is no function of"),
    (suite(close=once(lambda self: None)), "close of the suite raised RuntimeError: closed"),
]


@pytest.mark.parametrize(("broken", "says"), BROKEN)
def test_a_rule(broken: type[Any], says: str) -> None:
    with pytest.raises(ContractError, match=re.escape(says)) as caught:
        check_environment(broken, EnvironmentConfig(max_steps=5))
    assert "\n" not in str(caught.value)


def test_what_was_changed_is_what_is_wrong() -> None:
    check_environment(suite(), EnvironmentConfig(max_steps=3), ["open!"])


def numbers(name: str, old: str, new: str, folder: Path) -> Any:
    """The suite of the example plugin, changed."""
    text = (PLUGIN / "environment.py").read_text()
    assert old in text
    (folder / f"{name}.py").write_text(text.replace(old, new))
    return import_module(name).Numbers


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("numbers_hashed", '"Lower."', 'f"{hash(response)}"', "the same responses give other"),
        ("numbers_set", "for kind, n in mine]", "for kind, n in {*mine}]", "or another order, in"),
    ],
)
def test_hashes_of_strings_must_not_decide(
    name: str, old: str, new: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only another process can show it."""
    monkeypatch.syspath_prepend(tmp_path)
    guesses = [f"<guess>{n}</guess>" for n in (99, 9, 98)]
    check_environment(numbers("numbers_sound", old, old, tmp_path), responses=guesses)
    broken = numbers(name, old, new, tmp_path)
    with pytest.raises(ContractError, match="in another process, with another PYTHONHASHSEED") as e:
        check_environment(broken, responses=guesses)
    assert says in str(e.value)


def test_a_stop_string_ends_a_response_without_an_expert_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    broken = numbers("numbers_strict", '</guess>", resp', '</guess>\\Z", resp', tmp_path)
    with pytest.raises(ContractError, match="a line break behind a stop string changes the result"):
        check_environment(broken, responses=["<guess>5</guess>"])
