"""What the tiny policy is taught before RL on ALFWorld: rows of scripted episodes, made by key.

An episode gives the whole of it as one conversation, rows for some of its turns as the policy will
meet them, and now and then a row that writes a skill for it. Without a skill in the prompt half of
the commands do not serve the task: what RL has to find is which do. With one the policy does what
the skill says. Between episodes there are drills: names to be copied.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rsipo_lightning.codec import Codec
from rsipo_lightning.demonstrations import Shares, draw
from rsipo_lightning.environments.alfworld.expert import skills
from rsipo_lightning.environments.alfworld.house import OBJECTS, ROOMS
from rsipo_lightning.environments.alfworld.suite import AlfworldConfig, AlfworldSuite
from rsipo_lightning.environments.experts import ScriptedSkill
from rsipo_lightning.imitation import Row, episode_rows, outcome, skill_row
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import ExpertPlayer, Job, Sampling
from rsipo_lightning.skills import analysis_messages
from rsipo_lightning.types import Role, Skill, Trajectory


@dataclass(frozen=True)
class HouseMixture:
    """Shares of what is taught. They need not add up to 1."""

    drills: float = 0.3  # for each episode
    guided: float = 0.5  # of the episodes: with a skill
    noise: float = 0.4  # of the commands without a skill
    obeyed: float = 0.92  # of the skills shown
    slips: float = 0.05  # of the commands where a skill is obeyed
    turns: int = 8  # of an episode that become rows, at most
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
_THINGS = sorted(name.lower() for name in _RECEPTACLES.union(OBJECTS))


class HouseDemonstrations:
    """Rows by key, of the training games. ValueError if its words are several tokens."""

    def __init__(
        self, codec: Codec, seed: int, mixture: HouseMixture, config: AlfworldConfig
    ) -> None:
        self.codec, self.seed, self.mixture = codec, seed, mixture
        self._suite = AlfworldSuite(config, seed)
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
        turns = list(episode_rows(trajectory, 1.0))
        made = [
            Row(row.ids, tuple(weight or mixture.prompt for weight in row.weights))
            for row in rng.sample(turns, min(len(turns), mixture.turns))
        ]
        made.append(self._conversation(trajectory))
        if rng.random() < mixture.written:
            made.append(self._written(trajectory, rng))
        if rng.random() < mixture.drills:
            made.append(self._copying(rng))
        return [row for row in made if len(row.ids) <= _HOW.context]

    def _play(self, rng: random.Random) -> Trajectory:
        """An episode as the policy would have played it."""
        mixture = self.mixture
        task = rng.choice(self._tasks)
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

    def _conversation(self, trajectory: Trajectory) -> Row:
        """The same episode in append context: many commands for few tokens."""
        skill = trajectory.skill.text if trajectory.skill else ""
        ids = self.codec.start(trajectory.opening, skill)[0]
        weights = [0.0] * len(ids)
        for turn in trajectory.turns:
            said = turn.completion.ids
            ids, weights = (*ids, *said), weights + [1.0] * len(said)
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

    def _copying(self, rng: random.Random) -> Row:
        """Numbered things, twice."""
        things = (f" {rng.choice(_THINGS)} {rng.randint(1, 30)}" for _ in range(rng.randint(4, 16)))
        ids = self.codec.encode("".join(things))
        return Row(ids + ids, (0.0,) * len(ids) + (1.0,) * len(ids))
