"""``check_environment``: what rollouts, replays and stage 1 rely on in every environment."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from omegaconf import OmegaConf

from rsipo_lightning import registry
from rsipo_lightning.codec import Codec
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault
from rsipo_lightning.files import half_character
from rsipo_lightning.protocols import (
    SPLITS,
    EnvironmentConfig,
    Expert,
    StepResult,
    TaskSuite,
)
from rsipo_lightning.rollout import ExpertPlayer, Job, Sampling
from rsipo_lightning.testing.contract import Contract
from rsipo_lightning.testing.toys import byte_tokenizer
from rsipo_lightning.types import Role, Stop, Task

ANY_TEXT = ("", "nonsense", "<answer>x</answer>", "<action>look</action>", "\n\x00 é<|end|>" * 99)

# Plays recorded responses again, with other hashes of strings: {stdin} -> {stdout}, pickled.
_CHILD = """
import pickle, sys
try:
    suite, config, played, splits = pickle.load(sys.stdin.buffer)
except (ImportError, AttributeError):
    sys.exit(3)
same = suite(config, 0)
ids = {split: [task.id for task in same.tasks(split)] for split in splits}
done, suite = [], suite(config, 1)
for task, responses in played:
    episode = suite.make()
    done.append((episode.reset(task), [episode.step(r) for r in responses]))
sys.stdout.buffer.write(pickle.dumps((ids, done)))
"""


def check_environment(
    suite: str | type[TaskSuite], config: Any = None, responses: Sequence[str] = ()
) -> None:
    """Raise ContractError for the first rule that an environment breaks.

    ``suite`` is a registered name or a class, ``config`` an instance of its Config, ``responses``
    are texts in the form that it expects, to be tried beside those of its scripted expert. The
    rules: ids are unique, no training task is in another split, types are known, payloads are plain
    JSON; the tasks of a split and their order are a function of config and seed, an episode one of
    its task and the responses: in a fresh suite with another seed, behind other episodes and in
    another process (where the class can be imported there) too; each first message has the place
    for a skill; any text is answered, within ``max_steps``; after the end EnvironmentFault is
    raised; ``step_many`` is ``step``; stop strings end a response; ``check_skill`` and
    ``hindsight`` give text; all can be closed twice.
    """
    _Check(suite, config, responses).run()


@dataclass(frozen=True, slots=True)
class _Played:
    task: Task
    opening: str
    responses: tuple[str, ...]
    results: tuple[StepResult, ...]
    expert: bool


class _Check(Contract):
    def __init__(self, suite: Any, config: Any, responses: Sequence[str]) -> None:
        named = isinstance(suite, str)
        super().__init__(suite if named else getattr(suite, "__name__", str(suite)))
        self.kind = registry.load("environments", suite) if named else suite
        rule = "is no subclass of TaskSuite"
        self.require(isinstance(self.kind, type) and issubclass(self.kind, TaskSuite), rule)
        self.config = self.kind.Config() if config is None else config
        self.responses = (*ANY_TEXT, *responses)
        self.codec = Codec(byte_tokenizer())

    def make(self, seed: int = 0) -> TaskSuite:
        """A fresh suite."""
        made: TaskSuite = self.call("the suite", self.kind, self.config, seed)
        return made

    def run(self) -> None:
        suite = self.make()
        self.declares(suite)
        self.tasks(suite)
        chosen = self.chosen(suite)
        played = [p for k, task in enumerate(chosen) for p in self.episodes(suite, task, k)]
        self.replays(suite, played)
        self.step_many(suite, played)
        self.stops(suite, played)
        self.skills(suite, played)
        for _ in range(2):
            self.call("close of the suite", suite.close)

    # ---- the rules, one method each

    def declares(self, suite: TaskSuite) -> None:
        """Name, types, stop strings, config, description."""
        name = getattr(suite, "name", None)
        self.require(isinstance(name, str), "name is missing: set it to the registered name")
        for kind in (EnvironmentConfig, self.kind.Config):
            self.require(isinstance(self.config, kind), f"its config is no {kind.__name__}")
        self.call("OmegaConf.structured(Config)", OmegaConf.structured, type(self.config))
        types = suite.types
        unique = len(types) > 0 and len(set(types)) == len(types)
        self.require(unique and all(map(_text, types)), "types must be names, each once")
        good = isinstance(suite.stop, tuple) and all(map(_text, suite.stop))
        self.require(good, "stop must be a tuple of texts")
        self.require(_plain(suite.describe()), "describe() is not plain JSON")

    def tasks(self, suite: TaskSuite) -> None:
        """Tasks of all splits."""
        train = [task for share in suite.mixture() for task in share.tasks]
        first = {split: list(suite.tasks(split)) for split in SPLITS}
        splits = first | {"train": train}
        again = {split: [task.id for task in suite.tasks(split)] for split in SPLITS}
        for split, tasks in splits.items():
            self.require(len(tasks) > 0, f"split '{split}' has no tasks")
            rule = f"tasks('{split}') gives other tasks, or another order, when it is called again"
            self.require(again[split] == [task.id for task in first[split]], rule)
            ids = {task.id for task in tasks}
            self.require(len(ids) == len(tasks), f"split '{split}' has an id twice")
            if split != "train":
                both = sorted(ids & {task.id for task in train})
                self.require(not both, f"task {both[:1]} is in 'train' and in '{split}'")
            for task in tasks:
                what, types = f"task '{task.id}' of '{split}'", ", ".join(suite.types)
                self.require(task.type in suite.types, f"{what}: type '{task.type}' ({types})")
                rule = f"{what}: env is '{task.env}', the suite's name '{suite.name}'"
                self.require(task.env == suite.name, rule)
                self.require(_plain(task.payload), f"{what}: the payload is not plain JSON")
        try:
            suite.tasks("no such split")
        except DataError:
            return
        self.require(False, "tasks('no such split') must raise DataError")

    def chosen(self, suite: TaskSuite) -> list[Task]:
        """The first task of each type of each split."""
        first: dict[tuple[str, str], Task] = {}
        for split in SPLITS:
            for task in suite.tasks(split):
                first.setdefault((split, task.type), task)
        return list(first.values())

    def episodes(self, suite: TaskSuite, task: Task, k: int) -> Iterator[_Played]:
        """An episode of any text, the k-th one first, and one of the expert, if there is one."""
        texts = islice(cycle(self.responses), k, None)
        yield self.play(suite, task, lambda seen: next(texts))
        try:
            expert = suite.expert(task, random.Random(0))
        except ConfigError:
            return
        yield self.play(suite, task, expert.act, expert=True)
        for _ in range(2):
            self.call("close of the expert", lambda: expert.close())

    def play(
        self, suite: TaskSuite, task: Task, act: Callable[[str], str], expert: bool = False
    ) -> _Played:
        """One episode from reset to behind its end."""
        self.where = f"task '{task.id}'"
        episode, most = suite.make(), self.config.max_steps
        opening = self.call("reset", episode.reset, task)
        self.opening(opening, "the first message")
        self.require(self.call("reset", episode.reset, task) == opening, "reset twice, two texts")
        said: list[str] = []
        results: list[StepResult] = []
        seen = opening
        while not results or results[-1].stop is None:
            self.require(len(results) < most, f"goes on after max_steps={most} steps")
            said.append(self.call("act of the expert", act, seen) if expert else act(seen))
            result = self.call(f"step({said[-1][:40]!r})", episode.step, said[-1])
            self.result(result)
            results.append(result)
            seen = result.prompt or result.observation
        try:
            episode.step(said[-1])
        except EnvironmentFault:
            pass
        except Exception as error:
            name = type(error).__name__
            self.require(False, f"step after the end raises {name}, not EnvironmentFault")
        else:
            self.require(False, "step after the end must raise EnvironmentFault")
        for _ in range(2):
            self.call("close", episode.close)
        self.where = ""
        return _Played(task, opening, tuple(said), tuple(results), expert)

    def opening(self, text: Any, what: str) -> None:
        """A message that begins a conversation."""
        self.require(_text(text), f"{what} is no text")
        try:
            self.codec.start(text, "a skill")
        except ConfigError as error:
            self.require(False, f"{what}: {error}")

    def result(self, result: StepResult) -> None:
        """One answer of the environment."""
        self.require(isinstance(result, StepResult), "step returns no StepResult")
        for name in ("action", "observation", "prompt"):
            rule = f"the {name} of a step is no text"
            self.require(_text(getattr(result, name), empty=True), rule)
        if result.prompt:
            self.opening(result.prompt, "the prompt of a step")
        stop, ends = result.stop, (None, Stop.DONE, Stop.MAX_TURNS)
        self.require(stop in ends, f"a step ends with {stop!r}, not with DONE or MAX_TURNS")
        self.require(stop is not None or not result.success, "success is said before the end")
        numbers = [result.reward, *result.measures.values()]
        finite = all(isinstance(x, int | float) and abs(x) < float("inf") for x in numbers)
        self.require(finite, "reward and measures must be finite numbers")

    def replays(self, suite: TaskSuite, played: Sequence[_Played]) -> None:
        """The same responses give the same episode, anywhere."""
        self.equal([self.again(suite, p) for p in reversed(played)][::-1], played, "a second time")
        other = self.make(seed=1)
        found = [self.again(other, p) for p in played]
        self.equal(found, played, "in a fresh suite with another seed")
        other.close()
        child = self.child(played)
        if child is not None:
            where = "in another process, with another PYTHONHASHSEED"
            ids, found = child
            for split in SPLITS:
                rule = f"tasks('{split}') gives other tasks, or another order, {where}"
                self.require(ids[split] == [task.id for task in suite.tasks(split)], rule)
            self.equal(found, played, where)

    def again(self, suite: TaskSuite, p: _Played) -> tuple[str, list[StepResult]]:
        """Its responses in a fresh episode."""
        episode = suite.make()
        opening = self.call("reset", episode.reset, p.task)
        results = [self.call(f"step({r[:40]!r}) again", episode.step, r) for r in p.responses]
        episode.close()
        return opening, results

    def child(
        self, played: Sequence[_Played]
    ) -> tuple[dict[str, list[str]], list[tuple[str, list[StepResult]]]] | None:
        """Ids of each split and the same episodes in another process; None if it cannot import the
        suite.
        """
        given = (self.kind, self.config, [(p.task, p.responses) for p in played], SPLITS)
        try:
            data = pickle.dumps(given)
        except (pickle.PicklingError, AttributeError, TypeError):
            return None
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        path = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", _CHILD]
        done = subprocess.run(command, input=data, capture_output=True, env=env, check=False)
        if done.returncode == 3:
            return None
        last = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        self.require(done.returncode == 0, f"in another process: {last}")
        found: tuple[dict[str, list[str]], list[tuple[str, list[StepResult]]]] = pickle.loads(
            done.stdout
        )
        return found

    def equal(self, found: Sequence[Any], played: Sequence[_Played], where: str) -> None:
        """Whether replays are what was recorded."""
        for (opening, results), p in zip(found, played, strict=True):
            what = f"task '{p.task.id}' {where}"
            rule = f"{what}: reset gives another first message, it must depend on the task alone"
            self.require(opening == p.opening, rule)
            rule = f"{what}: the same responses give other results"
            self.require(tuple(results) == p.results, rule)

    def step_many(self, suite: TaskSuite, played: Sequence[_Played]) -> None:
        """All episodes in lockstep."""
        episodes = [suite.make() for _ in played]
        for episode, p in zip(episodes, played, strict=True):
            episode.reset(p.task)
        for k in range(max(len(p.responses) for p in played)):
            live = [(e, p) for e, p in zip(episodes, played, strict=True) if k < len(p.responses)]
            responses = [p.responses[k] for _, p in live]
            got = self.call("step_many", suite.step_many, [e for e, _ in live], responses)
            same = list(got) == [p.results[k] for _, p in live]
            self.require(same, "step_many gives other results than step, or in another order")
        for episode in episodes:
            episode.close()

    def stops(self, suite: TaskSuite, played: Sequence[_Played]) -> None:
        """What an expert says ends with a stop string, and what a token adds to one is ignored."""
        for p in played if suite.stop else ():
            ends = [r.endswith(suite.stop) for r in p.responses]
            for r, end in zip(p.responses, ends, strict=True):
                rule = f"the expert says {r[-40:]!r}, which ends with no string of stop"
                self.require(end or not p.expert, rule)
            said = zip(p.responses, ends, strict=True)
            texts = tuple(f"{r}\n" if end else r for r, end in said)
            longer = _Played(p.task, p.opening, texts, (), p.expert)
            rule = "a line break behind a stop string changes the result; a token may hold both"
            self.require(tuple(self.again(suite, longer)[1]) == p.results, rule)

    def skills(self, suite: TaskSuite, played: Sequence[_Played]) -> None:
        """Trajectories by the real rollout loop, and what is said of them."""
        jobs = [Job(p.task, Role.STUDENT, i, 0) for i, p in enumerate(played)]
        acting = {id(job): p.responses for job, p in zip(jobs, played, strict=True)}
        player = ExpertPlayer(suite, self.codec, lambda job: _Script(acting[id(job)]))
        done = player.play(jobs, Sampling(0, 1.0, 1, 10**9, len(jobs)))
        for p, trajectory in zip(played, done, strict=True):
            ends = (trajectory.stop, trajectory.success)
            rule = f"the rollout loop ends task '{p.task.id}' with {ends}"
            self.require(ends == (p.results[-1].stop, p.results[-1].success), rule)
            for text in ("", "first look around, then act", p.opening):
                why = self.call("check_skill", suite.check_skill, trajectory, text)
                self.require(_text(why, empty=True), "check_skill returns no text")
            try:
                advice = suite.hindsight(trajectory, random.Random(0))
            except ConfigError:
                continue
            self.require(_text(advice), "hindsight returns no text")
            again = suite.hindsight(trajectory, random.Random(0))
            self.require(advice == again, "hindsight is no function of episode and rng")


class _Script(Expert):
    def __init__(self, responses: Sequence[str]) -> None:
        self.left = list(responses)

    def act(self, observation: str) -> str:
        return self.left.pop(0)

    def close(self) -> None:
        self.left.clear()


def _text(x: Any, empty: bool = False) -> bool:
    """Text that a tokenizer and a file take."""
    if not isinstance(x, str):
        return False
    return (empty or x != "") and not half_character(x)


def _plain(x: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(x, allow_nan=False)) == x)
    except (TypeError, ValueError):
        return False
