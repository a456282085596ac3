"""Multi-turn search: the policy searches an encyclopedia and answers; an exact match earns 1.

One response is one action, ``<search>query</search>`` or ``<answer>answer</answer>``; ``max_steps``
counts all of them. ``context`` says how the policy sees what it did before: in a conversation that
only grows (Search-R1), or in a prompt that is written anew each turn (verl-agent, as in the paper's
tables).
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rsipo_lightning.checks import at_least, one_of
from rsipo_lightning.environments import experts
from rsipo_lightning.environments.answers import normalise, plain_words
from rsipo_lightning.environments.http_retriever import HTTPRetriever
from rsipo_lightning.environments.questions import ENV, FileQuestions, WorldQuestions
from rsipo_lightning.environments.retriever import (
    BM25Retriever,
    LocalRetriever,
    Passage,
    Retriever,
)
from rsipo_lightning.environments.retrievers import RetrieverConfig, check_retriever, make_retriever
from rsipo_lightning.environments.search_episode import Action, SearchEpisode
from rsipo_lightning.environments.templates import STYLES
from rsipo_lightning.environments.wording import Wording
from rsipo_lightning.environments.world import ALL_TYPES, TYPES
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault
from rsipo_lightning.files import hash_file
from rsipo_lightning.protocols import (
    Environment,
    Expert,
    Share,
    StepResult,
    TaskSuite,
)
from rsipo_lightning.types import Task, Trajectory

_RUN = re.compile(r"\w[\w'-]*(?: \w[\w'-]*)+")  # words with nothing but a space between them
_LINKS = frozenset(("of", "the", "and", "de", "la", "van", "von"))  # lower-case words inside names


@dataclass
class SearchConfig(RetrieverConfig):
    """Keys of ``env: search``. Without ``questions`` and ``corpus`` the built-in world is used."""

    # what trains: a JSONL of {id, question, answers} or FlashRAG's rows, a folder of them, a list,
    # or {path: weight}, the weight saying how often tasks of that path are drawn
    questions: Any = None
    # val and test: a path, a folder or a list; else 10 % of `questions`, by a hash of the id
    eval_questions: Any = None
    context: str = "append"  # append: the conversation grows | window: a new prompt each turn
    history: int = 4  # window: latest turns that the prompt shows
    template: str | None = None  # YAML of texts in place of those of `prompt`, or search_r1
    topk: int = 3  # passages a search shows
    passage_tokens: int = 128  # cuts each passage; counted as 3/4 of a word, see cut()
    world: int = 0  # seed of the facts of the built-in world
    types: list[str] = field(default_factory=lambda: list(TYPES))  # of its questions; ALL_TYPES
    max_steps: int = 4  # actions in all, the answer included
    invalid_penalty: float = 0.01


class SearchSuite(TaskSuite):
    """Questions over the built-in world or over real files."""

    Config = SearchConfig
    name = ENV

    def __init__(self, config: SearchConfig, seed: int) -> None:
        """Open or make the data. ``seed`` changes nothing: all runs share tasks and facts."""
        self.config = config
        _check(config)
        self._wording = Wording.read(config.prompt, config.template)
        self._source: WorldQuestions | FileQuestions
        self._retriever: Retriever | None
        if config.questions is None:
            self._source = WorldQuestions(config.world, config.types)
            self._retriever = BM25Retriever.from_passages(self._source.passages)
        else:
            self._source = FileQuestions(config.questions, config.eval_questions)
            self._retriever = make_retriever(config)

    @property
    def types(self) -> tuple[str, ...]:
        """Task types: of the world in order of hops, of files sorted."""
        return self._source.types

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks of "train", "val" or "test", types in turn (world) or in file order.

        Files also have "all": every question of ``env.questions``.
        """
        if split not in self._source.splits:
            have = ", ".join(self._source.splits)
            raise DataError(f"search has no split '{split}' here (have: {have})")
        return self._source.tasks(split)

    @classmethod
    def evaluation_split(cls, config: SearchConfig, given: Collection[str]) -> str:
        """Files that are named for an evaluation were not trained on: all of them count."""
        return "all" if "questions" in given and config.questions is not None else "test"

    def mixture(self) -> Sequence[Share]:
        """See the base class."""
        return self._source.mixture()

    def make(self) -> SearchEpisode:
        """A fresh episode; all share the retriever."""
        return SearchEpisode(self.config, self._wording, self.retrieve)

    @property
    def stop(self) -> tuple[str, ...]:
        """A response ends with its action."""
        return ("</search>", "</answer>")

    def retrieve(self, queries: Sequence[str]) -> list[list[Passage]]:
        """Passages of each query; equal ones run once. A dead retriever: EnvironmentFault."""
        distinct = list(dict.fromkeys(queries))
        if not distinct:
            return []
        if self._retriever is None:
            raise EnvironmentFault("search: the suite is closed")
        try:
            found = self._retriever.search(distinct, self.config.topk)
            table = dict(zip(distinct, found, strict=True))
        except EnvironmentFault:
            raise
        except Exception as error:
            raise EnvironmentFault(f"search: the retriever failed ({error!r})") from error
        return [table[query] for query in queries]

    def step_many(
        self, episodes: Sequence[Environment], responses: Sequence[str]
    ) -> list[StepResult | Exception]:
        """Step all episodes with one call of the retriever."""
        planned: list[tuple[SearchEpisode, Action]] = []
        for episode, response in zip(episodes, responses, strict=True):
            assert isinstance(episode, SearchEpisode)
            planned.append((episode, episode.plan(response)))
        found = iter(self.retrieve([action.text for e, action in planned if e.runs(action)]))
        results: list[StepResult | Exception] = []
        for episode, action in planned:
            passages = next(found) if episode.runs(action) else []
            try:
                results.append(episode.apply(action, passages))
            except Exception as error:  # e.g. a task without answers: data, not a fault
                results.append(error)
        return results

    def check_skill(self, trajectory: Trajectory, text: str) -> str:
        """Why a skill gives the answer away (methods.md 6.3), or "".

        Golds that are yes/no or shorter than 4 characters are exempt: any text could hold them.
        """
        payload = trajectory.task.payload
        words = f" {plain_words(text)} "
        for gold in map(plain_words, payload["answers"]):
            if len(gold) >= 4 and f" {gold} " in words:
                return "contains the answer"
        question = f" {normalise(payload['question'])} "
        found = _names("\n".join(turn.observation for turn in trajectory.turns))
        for name in sorted(_names(text) & found):
            if f" {name} " not in question:
                return f"names '{name}', which was found during the episode"
        return ""

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """For the built-in world only."""
        return experts.expert(task, rng, self._wording.think)

    def hindsight(self, trajectory: Trajectory, rng: random.Random) -> str:
        """For the built-in world only."""
        return experts.hindsight(trajectory, rng)

    def describe(self) -> dict[str, Any]:
        """Source, counts and hashes."""
        described = self._source.describe()
        if self.config.template:
            file = Wording.file(self.config.template)
            described["template"] = {"path": str(file), "sha256": hash_file(file)}
        retriever = self._retriever
        if isinstance(retriever, LocalRetriever):
            described["passages"] = len(retriever)
            if retriever.sha256:
                corpus = {"path": self.config.corpus, "sha256": retriever.sha256}
                described["files"]["corpus"] = [corpus]
        elif isinstance(retriever, HTTPRetriever):
            described["retriever_url"] = retriever.url
        return described

    def close(self) -> None:
        """Let go of the retriever."""
        self._retriever = None


def _names(text: str) -> set[str]:
    """Normalised capitalised names of two words or more, and their parts of two words or more.

    Parts, because a sentence may put a capitalised word before a name ("Search Ada Bianchi").
    """
    names: set[str] = set()
    for run in _RUN.findall(text):
        words = run.split(" ")
        for start, word in enumerate(words):
            if not word[0].isupper():
                continue
            for end in range(start + 1, len(words)):
                if words[end][0].isupper():
                    names.add(normalise(" ".join(words[start : end + 1])))
                elif words[end] not in _LINKS:
                    break
    return {name for name in names if " " in name}


def _check(config: SearchConfig) -> None:
    one_of("env.prompt", config.prompt, STYLES)
    one_of("env.context", config.context, ("append", "window"))
    for key in ("topk", "max_steps", "passage_tokens", "history"):
        at_least(f"env.{key}", getattr(config, key), 1)
    for name in config.types:
        one_of("env.types", name, ALL_TYPES)
    if not config.types or len(set(config.types)) < len(config.types):
        raise ConfigError(f"env.types={config.types}: at least one type, each once")
    if config.questions is not None and config.types != list(TYPES):
        raise ConfigError("env.types are of the built-in world: leave them out with env.questions")
    check_retriever(config, real=config.questions is not None)
    if config.questions is None and (config.corpus or config.eval_questions is not None):
        given = "corpus" if config.corpus else "eval_questions"
        raise ConfigError(f"env.{given} is given without env.questions: which questions train?")
