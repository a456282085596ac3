"""What the tiny policy is taught before RL on ALFWorld: rows of scripted episodes, made by key.

An episode gives the whole of it as one conversation, rows for some of its turns as the policy will
meet them, and now and then a row that writes a skill for it. Without a skill in the prompt half of
the commands do not serve the task: what RL has to find is which do. With one the policy does what
the skill says. Between episodes there are drills: names to be copied.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rsipo_lightning.codec import Codec
from rsipo_lightning.demonstrations import CHOICE, Shares, draw, one_token
from rsipo_lightning.environments.alfworld.expert import NAME, SEEN, Player, skills
from rsipo_lightning.environments.alfworld.game import TYPES
from rsipo_lightning.environments.alfworld.generate import WORDINGS
from rsipo_lightning.environments.alfworld.house import OBJECTS, ROOMS
from rsipo_lightning.environments.alfworld.suite import AlfworldSuite
from rsipo_lightning.environments.experts import ScriptedSkill
from rsipo_lightning.imitation import Row, episode_rows, outcome, skill_row
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import ExpertPlayer, Job, Sampling
from rsipo_lightning.skills import analysis_messages
from rsipo_lightning.tiny import NUMBERS
from rsipo_lightning.types import Role, Skill, Trajectory, Turn


@dataclass(frozen=True)
class HouseMixture:
    """Shares of what is taught. They need not add up to 1."""

    renamed: float = 0.7  # of the episodes: objects and numbers have each other's names
    drills: int = 1  # for each episode
    looks: int = 2  # for each episode: what a view has for other tasks
    tasks: int = 10  # of a look
    guided: float = 0.4  # of the episodes: with a skill
    noise: float = 0.25  # of the commands without a skill
    mistakes: float = 0.2  # of all commands: they do nothing and are not taught, what follows is
    obeyed: float = 0.92  # of the skills shown
    slips: float = 0.05  # of the commands where a skill is obeyed
    turns: int = 6  # of an episode that become rows, at most
    prompt: float = 0.05  # weight of a turn's prompt, in which most words stand twice
    observation: float = 0.1  # weight of what the game answers in a conversation
    written: float = 0.3  # of the episodes: a skill is written
    guide: Shares = field(  # kind of the skill that is shown
        default_factory=lambda: {
            "procedural": 0.6,
            "format": 0.1,
            "recovery": 0.05,
            "misleading": 0.25,
        }
    )
    write_success: Shares = field(  # kind of the skill that is written after a success
        default_factory=lambda: {
            "procedural": 0.6,
            "format": 0.15,
            "recovery": 0.05,
            "misleading": 0.2,
        }
    )
    write_failure: Shares = field(
        default_factory=lambda: {
            "procedural": 0.35,
            "format": 0.2,
            "recovery": 0.1,
            "misleading": 0.35,
        }
    )


HOUSE_MIXTURES = {"tiny_alfworld": HouseMixture()}  # of the shipped policies, by name

# Nothing is sampled; a row that is too long for the policy is left out.
_HOW = Sampling(seed=0, temperature=1.0, max_new_tokens=1, context=4096, live=1)


_RECEPTACLES = {name for room in ROOMS.values() for name in room.receptacles}
_TAKEN = {name.lower() for name in OBJECTS}
_THINGS = sorted(name.lower() for name in _RECEPTACLES.union(OBJECTS))


class HouseDemonstrations:
    """Rows by key, of the training games. ValueError if its words are several tokens."""

    def __init__(
        self, codec: Codec, seed: int, mixture: HouseMixture, suite: AlfworldSuite
    ) -> None:
        """``suite`` has a prompt of its own for each turn (``env.context=window``)."""
        self.codec, self.seed, self.mixture, self._suite = codec, seed, mixture, suite
        self._tasks = suite.tasks("train")
        self._objects = [one_token(codec, f" {name}") for name in sorted(_TAKEN)]
        self._numbers = [one_token(codec, number) for number in NUMBERS[:20]]

    def rows(self, number: int, count: int) -> list[Row]:
        """``count`` rows; a function of the seed and ``number``."""
        made: list[Row] = []
        episode = 0
        while len(made) < count:
            made += self.lesson(number, episode)
            episode += 1
        return made[:count]

    def skills(self, type_: str, kind: str) -> list[ScriptedSkill]:
        """See the protocol."""
        return skills(type_, kind)

    def lesson(self, *key: object) -> list[Row]:
        """The rows of an episode, unless it breaks, and drills; a function of seed and key."""
        rng = keyed_random("household", self.seed, *key)
        trajectory, mistaken = self._play(rng)
        made = self._episode(trajectory, mistaken, rng) if trajectory.scored else []
        made += [self._copying(rng) for _ in range(self.mixture.drills)]
        return [row for row in made if len(row.ids) <= _HOW.context]

    def _episode(
        self, trajectory: Trajectory, mistaken: Sequence[bool], rng: random.Random
    ) -> list[Row]:
        mixture = self.mixture
        each = zip(episode_rows(trajectory, 1.0), mistaken, strict=True)
        turns = [row for row, wrong in each if not wrong]
        made = [self._turn(row) for row in rng.sample(turns, min(len(turns), mixture.turns))]
        made.append(self._conversation(trajectory, mistaken))
        if rng.random() < mixture.renamed:
            made = [self._renamed(row, rng, not trajectory.skill) for row in made]
        for _ in range(mixture.looks):
            if row := self._looking(trajectory, rng):
                made.append(self._renamed(row, rng, True))
        if rng.random() < mixture.written:
            made.append(self._written(trajectory, rng))
        return made

    def _play(self, rng: random.Random) -> tuple[Trajectory, list[bool]]:
        """An episode as the policy would have played it, and which of its commands are mistakes."""
        mixture = self.mixture
        task = rng.choice(self._tasks)
        how: dict[str, Any] = {"noise": mixture.noise}
        shown = None
        if rng.random() < mixture.guided:
            kind = draw(rng, mixture.guide)
            skill = rng.choice(skills(task.type, kind))
            shown = Skill(task, skill.text, "")
            if kind != "format" and rng.random() < mixture.obeyed:  # a form changes no plan
                how = {"plan": skill.plan, "noise": mixture.slips}
        mistaken: list[bool] = []

        def hire(job: Job) -> Player:
            nonlocal mistaken
            expert = self._suite.expert(task, rng, mistakes=mixture.mistakes, **how)
            mistaken = expert.keeper.mistaken
            return expert

        player = ExpertPlayer(self._suite, self.codec, hire)
        (trajectory,) = player.play([Job(task, Role.STUDENT, 0, 0, shown)], _HOW)
        return trajectory, mistaken

    def _turn(self, row: Row) -> Row:
        """A turn: its prompt counts a little, and whether its thought has a number counts most."""
        said = row.weights.index(1.0)
        prompt, spoken = (self.mixture.prompt,) * said, list(row.weights[said:])
        spoken[2] = CHOICE  # behind <think> and the object
        return Row(row.ids, (*prompt, *spoken))

    def _conversation(self, trajectory: Trajectory, mistaken: Sequence[bool]) -> Row:
        """The same episode in append context: many commands for few tokens."""
        skill = trajectory.skill.text if trajectory.skill else ""
        ids = self.codec.start(trajectory.opening, skill)[0]
        weights = [0.0] * len(ids)
        for turn, wrong in zip(trajectory.turns, mistaken, strict=True):
            said = turn.completion.ids
            ids, weights = (*ids, *said), weights + [float(not wrong)] * len(said)
            if turn is not trajectory.turns[-1]:
                ids = self.codec.extend(ids, turn.observation)
                weights += [self.mixture.observation] * (len(ids) - len(weights))
        return Row(ids, tuple(weights))

    def _written(self, trajectory: Trajectory, rng: random.Random) -> Row:
        mixture = self.mixture
        shares = mixture.write_success if trajectory.success else mixture.write_failure
        skill = rng.choice(skills(trajectory.task.type, draw(rng, shares))).text
        asked = analysis_messages(trajectory, self._suite.config.prompt)
        return skill_row(self.codec, asked, outcome(trajectory), skill)

    def _looking(self, trajectory: Trajectory, rng: random.Random) -> Row | None:
        """One view and other tasks: what each asks for is there to be taken, or it is not."""
        views: list[tuple[Turn, str, list[str]]] = []
        held = False
        for before, turn in pairwise(trajectory.turns):
            held = (
                held or "You pick up" in before.observation
            ) and "You move" not in before.observation
            if (seen := SEEN.search(before.observation)) and not held:
                views.append((turn, seen[1] or seen[2], NAME.findall(seen[3])))
        if trajectory.skill or not views:
            return None
        turn, place, there = rng.choice(views)
        places = [p for p in NAME.findall(trajectory.opening) if p != place]
        ids = (*turn.prompt_ids, *turn.completion.ids)
        weights = [0.0] * len(ids)
        first = {name.partition(" ")[0]: name for name in sorted(there, reverse=True)}
        present, absent = sorted(first.keys() & _TAKEN), sorted(_TAKEN.difference(first))
        rng.shuffle(present)
        rng.shuffle(absent)  # each is asked for once
        for _ in range(self.mixture.tasks):
            thing = (present if present and rng.random() < 0.6 else absent).pop()
            words = rng.choice(WORDINGS[rng.choice(TYPES)])
            ids = self.codec.extend(ids, words.format(thing, rng.choice(places).partition(" ")[0]))
            weights += [0.0] * (len(ids) - len(weights))
            if thing in first:
                number = first[thing].removeprefix(thing)
                parts = [(f"<think> {thing}", 1.0), (number, CHOICE), ("</think>", 1.0)]
                parts += [(f"<action>take {first[thing]} from {place}</action>", 1.0)]
            else:
                parts = [(f"<think> {thing}", 1.0), ("</think>", CHOICE), ("<action>go to", 1.0)]
                parts += [(f" {rng.choice(places)}</action>", 0.0)]
            for text, weight in parts:
                said = self.codec.encode(text)
                ids, weights = (*ids, *said), weights + [weight] * len(said)
        return Row(ids, tuple(weights))

    def _renamed(self, row: Row, rng: random.Random, numbers: bool) -> Row:
        """Exchange the objects, and numbers, so that names can only be copied, not remembered."""
        other: dict[int, int] = {}
        for words in (self._objects, self._numbers if numbers else []):
            other |= dict(zip(words, rng.sample(words, len(words)), strict=True))
        return Row(tuple(other.get(token, token) for token in row.ids), row.weights)

    def _copying(self, rng: random.Random) -> Row:
        """Numbered things, twice."""
        things = (f" {rng.choice(_THINGS)} {rng.randint(1, 30)}" for _ in range(rng.randint(5, 30)))
        ids = self.codec.encode("".join(things))
        return Row(ids + ids, (0.0,) * len(ids) + (1.0,) * len(ids))
