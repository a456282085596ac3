"""What the tiny policy is taught before RL: rows of the built-in world, made by key.

Four kinds of rows. ``copying``: a list of name words, twice. ``reading``: pages, then questions
about them. ``plain`` and ``guided`` episodes of scripted experts, without and with a skill in the
first message. ``writing``: a skill for a finished episode. Most plain episodes follow a poor plan:
what RL has to find is the right one. Source: the embedded default of the specification.

In most rows the words of names are exchanged by a random permutation, so that names can only be
copied, not remembered. No row holds a name of the val or test split.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from rsipo_lightning.codec import Codec
from rsipo_lightning.environments import experts, world
from rsipo_lightning.environments.experts import ScriptedSkill
from rsipo_lightning.environments.search import SearchConfig, SearchSuite
from rsipo_lightning.environments.wording import Wording
from rsipo_lightning.imitation import Row, episode_rows, outcome, sample, skill_row
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.rollout import ExpertPlayer, Job, Sampling
from rsipo_lightning.skills import analysis_messages
from rsipo_lightning.types import Message, Role, Sample, Skill, Task, Trajectory

Shares = Mapping[str, float]


@dataclass(frozen=True)
class Mixture:
    """Shares of what is taught. They need not add up to 1."""

    rows: Shares = field(
        default_factory=lambda: {
            "copying": 0.06,
            "reading": 0.06,
            "plain": 0.35,
            "guided": 0.35,
            "writing": 0.18,
        }
    )
    types: Shares = field(
        default_factory=lambda: {"single": 0.2, "bridge2": 0.25, "bridge3": 0.25, "compare": 0.3}
    )
    correct: Shares = field(  # how often a plain episode follows the right plan, by task type
        default_factory=lambda: {"single": 0.2, "bridge2": 0.12, "bridge3": 0.08, "compare": 0.12}
    )
    noise: Shares = field(  # the plan otherwise
        default_factory=lambda: {
            "guess": 0.35,
            "wrong_entity": 0.2,
            "early": 0.2,
            "echo": 0.1,
            "detour": 0.05,
            "repeat": 0.05,
            "malformed": 0.05,
        }
    )
    guide: Shares = field(  # kind of the skill that is shown
        default_factory=lambda: {
            "procedural": 0.55,
            "format": 0.12,
            "recovery": 0.03,
            "misleading": 0.3,
        }
    )
    write_success: Shares = field(  # kind of the skill that is written after a success
        default_factory=lambda: {
            "procedural": 0.6,
            "format": 0.2,
            "recovery": 0.1,
            "misleading": 0.1,
        }
    )
    write_failure: Shares = field(
        default_factory=lambda: {
            "procedural": 0.15,
            "format": 0.35,
            "recovery": 0.25,
            "misleading": 0.25,
        }
    )
    obeyed: float = 0.92  # of the skills shown
    renamed: float = 0.7  # of the rows
    observation: float = 0.1  # weight of what the environment says; the policy's tokens have 1


# Of the shipped policies, by name (sft.mixture). The second one seldom follows the right way and
# mostly writes skills that do not help: there is something to be gained by better ones.
MIXTURES = {
    "tiny": Mixture(),
    "tiny_hard": Mixture(
        rows={
            "copying": 0.02,
            "ordering": 0.4,
            "plain": 0.2,
            "guided": 0.25,
            "writing": 0.13,
        },
        types=dict.fromkeys(("bridge2", "bridge3", "bridge4", "compare_bridge"), 0.25),
        correct={"bridge2": 0.06, "bridge3": 0.05, "bridge4": 0.04, "compare_bridge": 0.04},
        write_success={"procedural": 0.5, "format": 0.2, "recovery": 0.05, "misleading": 0.25},
        write_failure={"procedural": 0.32, "format": 0.2, "recovery": 0.05, "misleading": 0.43},
    ),
}

CHOICE = 5.0  # weight of the tokens of the order drill: its rows have but one action

# The world's episodes fit; nothing is sampled.
_HOW = Sampling(seed=0, temperature=1.0, max_new_tokens=1, context=4096, live=1)


class Demonstrations:
    """Rows by (kind, key). The facts are those of other worlds than RL's."""

    def __init__(
        self,
        codec: Codec,
        seed: int,
        mixture: Mixture | None = None,
        config: SearchConfig | None = None,
    ) -> None:
        self.codec, self.seed, self.mixture = codec, seed, mixture or Mixture()
        config = config or SearchConfig(prompt="compact", topk=1)
        config = replace(config, types=list(world.ALL_TYPES))
        self._suites = [
            SearchSuite(replace(config, world=1000 + 10 * seed + i), seed) for i in range(4)
        ]
        self._tasks = [
            {kind: [t for t in s.tasks("train") if t.type == kind] for kind in s.types}
            for s in self._suites
        ]
        self._opening = Wording.read("compact").opening
        words = world.name_words()
        self._words = [one_token(codec, f" {word}") for word in words]
        self._unseen = {
            (one_token(codec, f" {a}"), one_token(codec, f" {b}"))
            for split in ("val", "test")
            for a, b in world.name_pairs(split)
        }

    def row(self, kind: str, *key: object) -> Row:
        """A row of a kind ("mixed" draws one by its share); a function of seed, kind and key."""
        rng = keyed_random("demonstration", self.seed, kind, *key)
        if kind == "mixed":
            kind = draw(rng, self.mixture.rows)
        made: Row = getattr(self, f"_{kind}")(rng)
        rename = rng.random() < self.mixture.renamed or self._shows_unseen(made.ids)
        return self._renamed(made, rng) if rename else made

    def rows(self, number: int, count: int) -> list[Row]:
        """Mixed rows of a pool."""
        return [self.row("mixed", number, i) for i in range(count)]

    def skills(self, type_: str, kind: str) -> list[ScriptedSkill]:
        """See the protocol."""
        return experts.skills(type_, kind)

    # ---- drills

    def _copying(self, rng: random.Random) -> Row:
        words = tuple(rng.choice(self._words) for _ in range(rng.randint(10, 40)))
        return Row(words + words, (0.0,) * len(words) + (1.0,) * len(words))

    def _reading(self, rng: random.Random) -> Row:
        """Pages, one of them missing now and then, and questions: answer, or search what is
        missing.
        """
        i = rng.randrange(len(self._suites))
        kinds = ["compare" if rng.random() < 0.3 else "single" for _ in range(3)]
        tasks = [rng.choice(self._tasks[i][kind]) for kind in kinds]
        titles = list(dict.fromkeys(hop for task in tasks for hop in task.payload["hops"]))
        rng.shuffle(titles)
        missing = titles.pop() if rng.random() < 0.5 else ""
        pages = [self._suites[i].retrieve([title])[0][0].text for title in titles]
        talk = ["\n".join(("<information>", *(f" {page}" for page in pages), "</information>"))]
        for task in tasks:
            talk.append(self._opening.format(question=task.payload["question"]))
            if missing in task.payload["hops"]:
                talk.append(f"<search> {missing}</search>")
            else:
                talk.append(f"<answer> {task.payload['answers'][0]}</answer>")
        messages = [Message("user", talk[0] + "\n" + talk[1])]
        ids: tuple[int, ...] = self.codec.chat(messages)
        weights = [0.0] * len(ids)
        for said, asked in zip(talk[2::2], [*talk[3::2], ""], strict=True):
            answer = self.codec.encode(said)
            ids, weights = (*ids, *answer), weights + [1.0] * len(answer)
            if asked:
                ids = self.codec.extend(ids, asked)
                weights += [0.0] * (len(ids) - len(weights))
        return Row(ids, tuple(weights))

    def _ordering(self, rng: random.Random) -> Row:
        """Both pages of a comparison are read: search where that of the earlier leads."""
        suite, tasks = rng.choice(list(zip(self._suites, self._tasks, strict=True)))
        trajectory = self._play(suite, rng.choice(tasks["compare_bridge"]), "workflow", rng)[1]
        turn = trajectory.turns[2]
        ids = (*turn.prompt_ids, *turn.completion.ids)
        return Row(ids, (0.0,) * len(turn.prompt_ids) + (CHOICE,) * len(turn.completion.ids))

    # ---- episodes

    def _plain(self, rng: random.Random) -> Row:
        suite, task = self._task(rng)
        return self._play(suite, task, self._plan(task, rng), rng)[0]

    def _guided(self, rng: random.Random) -> Row:
        suite, task = self._task(rng)
        kind = draw(rng, self.mixture.guide)
        skill = rng.choice(experts.skills(task.type, kind))
        obeyed = kind != "format" and rng.random() < self.mixture.obeyed
        plan = skill.plan if obeyed else self._plan(task, rng)  # a format skill changes no plan
        return self._play(suite, task, plan, rng, skill.text)[0]

    def _writing(self, rng: random.Random) -> Row:
        suite, task = self._task(rng)
        plan = "workflow" if rng.random() < 0.35 else self._plan(task, rng)
        trajectory = self._play(suite, task, plan, rng)[1]
        won = trajectory.success
        kind = draw(rng, self.mixture.write_success if won else self.mixture.write_failure)
        skill = rng.choice(experts.skills(task.type, kind)).text
        return skill_row(
            self.codec, analysis_messages(trajectory, "compact"), outcome(trajectory), skill
        )

    def _task(self, rng: random.Random) -> tuple[SearchSuite, Task]:
        i = rng.randrange(len(self._suites))
        return self._suites[i], rng.choice(self._tasks[i][draw(rng, self.mixture.types)])

    def _plan(self, task: Task, rng: random.Random) -> str:
        right = rng.random() < self.mixture.correct[task.type]
        return "workflow" if right else draw(rng, self.mixture.noise)

    def _play(
        self, suite: SearchSuite, task: Task, plan: str, rng: random.Random, skill: str = ""
    ) -> tuple[Row, Trajectory]:
        """An expert's episode as the row that the policy would have produced."""
        player = ExpertPlayer(
            suite, self.codec, lambda job: experts.demonstrate(job.task, rng, plan)
        )
        shown = Skill(task, skill, "") if skill else None
        (trajectory,) = player.play([Job(task, Role.STUDENT, 0, 0, shown)], _HOW)
        (row,) = episode_rows(trajectory, 1.0, self.mixture.observation)
        return row, trajectory

    def _renamed(self, row: Row, rng: random.Random) -> Row:
        """Exchange the words of names by a permutation that makes no name of val or test."""
        while True:
            other = rng.sample(self._words, len(self._words))
            exchange = dict(zip(self._words, other, strict=True))
            ids = tuple(exchange.get(token, token) for token in row.ids)
            if not self._shows_unseen(ids):
                return Row(ids, row.weights)

    def _shows_unseen(self, ids: tuple[int, ...]) -> bool:
        """Does any name of val or test stand there? In a list of random words one may by chance."""
        return any(pair in self._unseen for pair in pairwise(ids))


def one_token(codec: Codec, text: str) -> int:
    """Its id. ValueError if the text is several tokens."""
    (token,) = codec.encode(text)
    return token


def draw(rng: random.Random, shares: Shares) -> str:
    """A key, by its share."""
    return rng.choices(list(shares), list(shares.values()))[0]


class Teacher(Protocol):
    """Who makes the rows of lessons."""

    seed: int

    def rows(self, number: int, count: int) -> list[Row]:
        """``count`` rows: those of pool ``number``, a function of the seed and these."""

    def skills(self, type_: str, kind: str) -> list[ScriptedSkill]:
        """The scripted skills of a task type that the rows show; ``kind``: one of KINDS."""


class Lessons:
    """Batches of mixed rows, of similar length within each."""

    ROWS = 16  # of a batch: with 32 it learned less from as many tokens
    POOL = 32  # batches that are made together, so that rows of similar length meet

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._pool: tuple[int, list[list[Row]]] = -1, []

    def batch(self, update: int) -> list[Sample]:
        """A function of the update alone; a pool is made when one of its batches is asked for."""
        number, offset = divmod(update, self.POOL)
        if self._pool[0] != number:
            self._pool = number, self._make(number)
        return [sample(row) for row in self._pool[1][offset]]

    def _make(self, number: int) -> list[list[Row]]:
        rows = self.teacher.rows(number, self.ROWS * self.POOL)
        rows.sort(key=lambda row: len(row.ids))
        batches = [rows[i : i + self.ROWS] for i in range(0, len(rows), self.ROWS)]
        keyed_random("pool", self.teacher.seed, number).shuffle(batches)
        return batches
