"""What the tiny policy is taught before RL on ALFWorld: rows of scripted episodes, made by key.

An episode gives a row for each of some of its turns, as the policy will meet them, and now and then
one that writes a skill for it. Without a skill in the prompt most commands do not serve the task:
what RL has to find is which do. With one the policy does what the skill says. Between episodes
there are drills: names to be copied.

Things are renumbered: generated rooms have few of a kind, those of the release up to 27 cabinets.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from rsipo_lightning.codec import Codec
from rsipo_lightning.demonstrations import Shares, draw
from rsipo_lightning.environments.alfworld.expert import skills
from rsipo_lightning.environments.alfworld.game import PlayedGame, View
from rsipo_lightning.environments.alfworld.house import OBJECTS, ROOMS
from rsipo_lightning.environments.alfworld.suite import AlfworldConfig, AlfworldSuite
from rsipo_lightning.environments.experts import ScriptedSkill
from rsipo_lightning.imitation import Row, episode_rows, outcome, skill_row
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import ExpertPlayer, Job, Sampling
from rsipo_lightning.skills import analysis_messages
from rsipo_lightning.types import Role, Skill, Task, Trajectory


@dataclass(frozen=True)
class HouseMixture:
    """Shares of what is taught. They need not add up to 1."""

    drills: float = 0.3  # for each episode
    guided: float = 0.55  # of the episodes: with a skill
    noise: float = 0.7  # of the commands without a skill
    obeyed: float = 0.92  # of the skills shown
    slips: float = 0.1  # of the commands where a skill is obeyed
    turns: int = 10  # of an episode that become rows, at most
    reading: float = 0.3  # of these rows: what they show is learned as well
    shown: float = 0.05  # weight of what such a row shows; the policy's tokens have 1
    written: float = 0.4  # of the episodes: a skill is written
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


_MANY = 8  # a type has at most as many things in a generated game
_RECEPTACLES = {name for room in ROOMS.values() for name in room.receptacles}
_THINGS = sorted(name.lower() for name in _RECEPTACLES.union(OBJECTS))


class Renumbered:
    """A live game whose things have other numbers, in the same order within each type."""

    _THING = re.compile(r"\b([a-z]+) (\d+)")

    def __init__(self, game: PlayedGame, seed: int) -> None:
        """``seed`` decides on the numbers, type by type."""
        self._game, self._seed = game, seed
        self._numbers: dict[str, list[int]] = {}

    @property
    def view(self) -> View:
        view = self._game.view
        return View(self._new(view.text), tuple(sorted(map(self._new, view.admissible))), view.won)

    def _of(self, type_: str) -> list[int]:
        """The new numbers of the first, second, ... thing of a type."""
        if type_ not in self._numbers:
            rng = keyed_random("numbers", self._seed, type_)
            most = rng.choice((_MANY, _MANY, 2 * _MANY, 30))  # half of the types keep theirs
            self._numbers[type_] = sorted(rng.sample(range(1, most + 1), _MANY))
        return self._numbers[type_]

    def _new(self, text: str) -> str:
        return self._THING.sub(lambda m: f"{m[1]} {self._of(m[1])[int(m[2]) - 1]}", text)

    def _old(self, text: str) -> str:
        def number(match: re.Match[str]) -> str:
            known, new = self._of(match[1]), int(match[2])
            return f"{match[1]} {known.index(new) + 1 if new in known else 0}"

        return self._THING.sub(number, text)

    def step(self, command: str) -> View:
        self._game.step(self._old(command))
        return self.view

    def reset(self) -> View:
        self._game.reset()
        return self.view

    def clone(self) -> Renumbered:
        return Renumbered(self._game.clone(), self._seed)

    def state_hash(self) -> str:
        return self._game.state_hash()

    def close(self) -> None:
        self._game.close()


class _Rooms(AlfworldSuite):
    """The games that are shown."""

    numbers = 0  # of the next episode

    def _open(self, task: Task) -> PlayedGame:
        return Renumbered(super()._open(task), self.numbers)


class HouseDemonstrations:
    """Rows by key, of the training games. ValueError if its words are several tokens."""

    def __init__(
        self, codec: Codec, seed: int, mixture: HouseMixture, config: AlfworldConfig
    ) -> None:
        self.codec, self.seed, self.mixture = codec, seed, mixture
        self._suite = _Rooms(config, seed)
        self._tasks = self._suite.tasks("train")
        (_,) = codec.encode(" countertop")

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
        """The rows of an episode, and a drill now and then; a function of seed and key."""
        rng, mixture = keyed_random("household", self.seed, *key), self.mixture
        trajectory = self._play(rng)
        made = list(episode_rows(trajectory, 1.0))
        made = rng.sample(made, min(len(made), mixture.turns))
        made = [self._read(row) if rng.random() < mixture.reading else row for row in made]
        if rng.random() < mixture.written:
            made.append(self._written(trajectory, rng))
        if rng.random() < mixture.drills:
            made.append(self._copying(rng))
        return [row for row in made if len(row.ids) <= _HOW.context]

    def _play(self, rng: random.Random) -> Trajectory:
        """An episode as the policy would have played it."""
        mixture = self.mixture
        task = rng.choice(self._tasks)
        self._suite.numbers = rng.randrange(2**32)
        plan, noise, shown = "workflow", mixture.noise, None
        if rng.random() < mixture.guided:
            kind = draw(rng, mixture.guide)
            skill = rng.choice(skills(task.type, kind))
            shown = Skill(task, skill.text, "")
            if kind != "format" and rng.random() < mixture.obeyed:  # a form changes no plan
                plan, noise = skill.plan, mixture.slips
        player = ExpertPlayer(
            self._suite, self.codec, lambda job: self._suite.expert(job.task, rng, plan, noise)
        )
        (trajectory,) = player.play([Job(task, Role.STUDENT, 0, 0, shown)], _HOW)
        return trajectory

    def _read(self, row: Row) -> Row:
        return Row(row.ids, tuple(weight or self.mixture.shown for weight in row.weights))

    def _written(self, trajectory: Trajectory, rng: random.Random) -> Row:
        mixture = self.mixture
        shares = mixture.write_success if trajectory.success else mixture.write_failure
        skill = rng.choice(skills(trajectory.task.type, draw(rng, shares))).text
        asked = analysis_messages(trajectory, self._suite.config.prompt)
        return skill_row(self.codec, asked, outcome(trajectory), skill)

    def _copying(self, rng: random.Random) -> Row:
        """Numbered things, twice."""
        things = (f" {rng.choice(_THINGS)} {rng.randint(1, 30)}" for _ in range(rng.randint(4, 16)))
        ids = self.codec.encode("".join(things))
        return Row(ids + ids, (0.0,) * len(ids) + (1.0,) * len(ids))
