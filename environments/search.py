"""Multi-turn search: the policy searches an encyclopedia and answers; an exact match earns 1.

One response is one action, ``<search>query</search>`` or ``<answer>answer</answer>``; ``max_steps``
counts all of them. The conversation only grows: each step returns the next user message. Source:
the Search-R1 protocol with the four actions of verl-agent, as the paper's tables used it.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rsipo_lightning.checks import at_least
from rsipo_lightning.environments.answers import exact_match, lenient_match, normalise, plain_words
from rsipo_lightning.environments.http_retriever import PROTOCOLS, HTTPRetriever, check_url
from rsipo_lightning.environments.retriever import (
    BM25Retriever,
    Passage,
    Retriever,
    hash_file,
    read_jsonl,
)
from rsipo_lightning.environments.world import SPLITS, TYPES, World
from rsipo_lightning.errors import ConfigError, DataError, EnvironmentFault
from rsipo_lightning.protocols import Environment, EnvironmentConfig, StepResult, TaskSuite
from rsipo_lightning.types import Stop, Task, Trajectory

FULL = """\
You answer a question with the help of a search engine over an encyclopedia. The answer is short, \
such as a name or a year. You have {max_steps} turns; each search or answer takes one.
Your question: {question}

Now it's your turn to act. Reason first inside <think></think>. Then either search with \
<search>query</search>, which shows passages inside <information></information>, or finish with \
<answer>answer</answer>."""
FULL_NEXT = """\
{body}

Turns taken: {taken} of {max_steps}. Now it's your turn: <think></think> first, then either \
<search>query</search> or <answer>answer</answer>."""
COMPACT = "Your question: {question}\nSearch or answer."
EMPTY = "No passage was found."
INVALID = {
    "full": "That was not a valid action ({why}). Write exactly one search or one answer.",
    "compact": "Not valid. Search or answer.",
}
LAST_TURN = (
    "That was the last turn: it was not an answer, so the search was not run and the episode ends."
)

LENIENT = "lenient_match"  # measure of an episode: its answer is right in the lenient sense

_TAG = re.compile(r"</?(?:search|answer|think|information)>")
_FORMS = {
    ("<search>", "</search>"): "search",
    ("<answer>", "</answer>"): "answer",
    ("<think>", "</think>", "<search>", "</search>"): "search",
    ("<think>", "</think>", "<answer>", "</answer>"): "answer",
}
# "<" before anything that could make it a tag or a chat marker, and Mistral's [INST]
_CONTROL = re.compile(r"<(?=[^\s\d=])|\[(?=/?INST\])")
_RUN = re.compile(r"\w[\w'-]*(?: \w[\w'-]*)+")  # words with nothing but a space between them
_LINKS = frozenset(("of", "the", "and", "de", "la", "van", "von"))  # lower-case words inside names


@dataclass
class SearchConfig(EnvironmentConfig):
    """Keys of ``env: search``. Without ``questions`` and ``corpus`` the built-in world is used."""

    questions: str | None = None  # JSONL that trains: {id, question, answers} or FlashRAG rows
    corpus: str | None = None  # JSONL of passages: {id, title, text} or {id, contents}
    eval_questions: str | None = None  # val and test; else 10 % of `questions`, by a hash of the id
    topk: int = 3  # passages a search shows
    passage_tokens: int = 128  # cuts each passage; counted as 3/4 of a word, see cut()
    world: int = 0  # seed of the facts of the built-in world
    max_steps: int = 4  # actions in all, the answer included
    invalid_penalty: float = 0.01
    retriever: str = "bm25"  # bm25 over `corpus` | http: a server (rsipo-retriever, Search-R1's)
    retriever_url: str | None = None  # http://host:port of the server; its path is /retrieve
    retriever_protocol: str = "batch"  # batch: "queries", a list | single: one "query" a request
    retriever_timeout_s: float = 30  # for each request
    retriever_retries: int = 3  # after a failed connection, a timeout or a 5xx


class Action(NamedTuple):
    """What a response says: ``kind`` "search" or "answer", or "" and the reason in ``why``."""

    kind: str
    text: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"<{self.kind}>{self.text}</{self.kind}>" if self.kind else ""


def parse(response: str, think: bool) -> Action:
    """The one action of a response; ``think`` says whether a thought must precede it.

    Both kinds, repeated, nested, unclosed or empty blocks and a block that only the environment may
    write make it invalid. Text outside the blocks is ignored.
    """
    tags = list(_TAG.finditer(response))
    names = tuple(tag.group() for tag in tags)
    kind = _FORMS.get(names, "")
    if not kind:
        if any("information" in name for name in names):
            return Action("", why="only the search engine writes information blocks")
        blocks = [name for name in names if name in ("<search>", "<answer>")]
        why = "more than one action" if len(blocks) > 1 else "no complete action"
        return Action("", why=why)
    if think and len(tags) < 4:
        return Action("", why="no thought")
    text = " ".join(response[tags[-2].end() : tags[-1].start()].split())
    return Action(kind, text) if text else Action("", why=f"the {kind} is empty")


def inert(text: str) -> str:
    """Data on one line that cannot act: "<search>" becomes "< search>", chat markers likewise."""
    return _CONTROL.sub(lambda match: match.group() + " ", " ".join(text.split()))


def cut(text: str, tokens: int) -> str:
    """The start of a text that takes about ``tokens`` tokens, so 96 words for 128.

    Environments know no tokenizer. A word counts as 4/3 of a token, a long one (or a sentence of a
    script without spaces) as a token for each 6 bytes.
    """
    room = float(tokens)
    kept: list[str] = []
    for word in text.split():
        cost = max(4 / 3, len(word.encode()) / 6)
        if cost > room + 1e-6:
            start = word.encode()[: int(room * 6)].decode(errors="ignore") if cost > tokens else ""
            return " ".join([*kept, start + "..."])
        kept.append(word)
        room -= cost
    return " ".join(kept)


class SearchEpisode:
    """One live episode; ``suite`` owns the retriever."""

    def __init__(self, suite: SearchSuite) -> None:
        self._suite = suite
        self._task: Task | None = None
        self._taken = 0

    def reset(self, task: Task) -> str:
        """The first user message: template and question, a function of the task and the config."""
        self._task, self._taken = task, 0
        config = self._suite.config
        template = FULL if config.prompt == "full" else COMPACT
        question = inert(task.payload["question"])
        return template.format(question=question, max_steps=config.max_steps)

    def step(self, response: str) -> StepResult:
        """See the protocol."""
        action = self.plan(response)
        return self.apply(
            action, self._suite.retrieve([action.text])[0] if self.runs(action) else []
        )

    def close(self) -> None:
        """End the episode."""
        self._task = None

    def plan(self, response: str) -> Action:
        """What ``response`` asks for, without doing it. After the end: EnvironmentFault."""
        if self._task is None:
            raise EnvironmentFault(
                "search: step() after the end of the episode; call reset(task) first"
            )
        return parse(response, think=self._suite.config.prompt == "full")

    def runs(self, action: Action) -> bool:
        """Whether the action needs passages: a search, unless no turn is left to use them."""
        return action.kind == "search" and self._taken + 1 < self._suite.config.max_steps

    def apply(self, action: Action, passages: Sequence[Passage]) -> StepResult:
        """Take the step that :meth:`plan` understood with what the retriever found for it."""
        assert self._task is not None
        task, config = self._task, self._suite.config
        self._taken += 1
        if action.kind == "answer":
            self.close()
            answers = task.payload["answers"]
            won = exact_match(action.text, answers)
            lenient = {LENIENT: float(lenient_match(action.text, answers))}
            return StepResult(str(action), "", float(won), won, stop=Stop.DONE, measures=lenient)
        valid = bool(action.kind)
        if self._taken >= config.max_steps:
            self.close()
            return StepResult(
                str(action), LAST_TURN, valid=valid, stop=Stop.MAX_TURNS, measures={LENIENT: 0.0}
            )
        body = self._block(passages) if valid else INVALID[config.prompt].format(why=action.why)
        if config.prompt == "full":
            body = FULL_NEXT.format(body=body, taken=self._taken, max_steps=config.max_steps)
        return StepResult(str(action), body, valid=valid)

    def _block(self, passages: Sequence[Passage]) -> str:
        config = self._suite.config
        lines = []
        for i, passage in enumerate(passages, 1):
            title, text = inert(passage.title), inert(cut(passage.text, config.passage_tokens))
            if config.prompt == "full":
                lines.append(f"Doc {i}(Title: {title}) {text}")
            else:  # short: a title that its text repeats is left out
                # A word behind a space and one at the start of a line are two tokens to most
                # tokenizers; a policy that must learn to copy gets one of them everywhere.
                lines.append(f" {text}" if title in text else f" {title}: {text}")
        return "\n".join(("<information>", *(lines or [EMPTY]), "</information>"))


class SearchSuite(TaskSuite):
    """Questions over the built-in world or over real files."""

    Config = SearchConfig
    name = "search"

    def __init__(self, config: SearchConfig, seed: int) -> None:
        """Open or make the data. ``seed`` changes nothing: all runs share tasks and facts."""
        self.config = config
        _check(config)
        self._source: _World | _Files = _Files(config) if config.questions else _World(config.world)
        self._retriever: Retriever | None = self._source.retriever

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

    def make(self) -> SearchEpisode:
        """A fresh episode; all share the retriever."""
        return SearchEpisode(self)

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

    def describe(self) -> dict[str, Any]:
        """Source, counts and hashes."""
        return self._source.describe()

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
    if config.prompt not in INVALID:
        raise ConfigError(f"env.prompt={config.prompt}: must be full or compact")
    for key in ("topk", "max_steps", "passage_tokens"):
        if getattr(config, key) < 1:
            raise ConfigError(f"env.{key}={getattr(config, key)}: must be at least 1")
    _check_retriever(config)
    if config.questions and not config.corpus and config.retriever == "bm25":
        raise ConfigError("env.questions is given without env.corpus: which passages are searched?")
    if not config.questions and (config.corpus or config.eval_questions):
        given = "corpus" if config.corpus else "eval_questions"
        raise ConfigError(f"env.{given} is given without env.questions: which questions train?")


def _check_retriever(config: SearchConfig) -> None:
    if config.retriever not in ("bm25", "http"):
        raise ConfigError(f"env.retriever={config.retriever}: must be bm25 or http")
    if config.retriever_protocol not in PROTOCOLS:
        got = config.retriever_protocol
        raise ConfigError(f"env.retriever_protocol={got}: must be {' or '.join(PROTOCOLS)}")
    at_least("env.retriever_retries", config.retriever_retries, 0)
    if not 0 < config.retriever_timeout_s < 1e6:  # a socket takes no infinite one
        got = f"{config.retriever_timeout_s:g}"
        raise ConfigError(f"env.retriever_timeout_s={got}: must be above 0 and below 1e6")
    if config.retriever == "bm25":
        if config.retriever_url:
            raise ConfigError("env.retriever_url is given: set env.retriever=http to use it")
        return
    if not config.retriever_url:
        raise ConfigError("env.retriever=http needs env.retriever_url=http://host:port")
    check_url(config.retriever_url)
    if not config.questions:
        raise ConfigError("env.retriever=http needs env.questions: the world has its own passages")
    if config.corpus:
        raise ConfigError("env.corpus is given with env.retriever=http: the server has the corpus")


class _World:
    """The built-in world: made in memory, questions when a split is first asked for."""

    types = TYPES
    splits = SPLITS

    def __init__(self, seed: int) -> None:
        self._world = World(seed)
        self._tasks: dict[str, list[Task]] = {}

    @cached_property
    def retriever(self) -> BM25Retriever:
        return BM25Retriever.from_passages(self._world.passages)

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._tasks:
            self._tasks[split] = [
                Task(
                    question.id,
                    SearchSuite.name,
                    question.type,
                    {
                        "question": question.text,
                        "answers": list(question.answers),
                        "hops": list(question.hops),
                        "path": list(question.path),
                    },
                )
                for question in self._world.questions(split)
            ]
        return self._tasks[split]

    def describe(self) -> dict[str, Any]:
        return {
            "source": "world",
            "world": self._world.seed,
            "passages": len(self._world.passages),
            "tasks": {split: len(self.tasks(split)) for split in SPLITS},
        }


class _Files:
    """Real questions and passages."""

    splits = (*SPLITS, "all")

    def __init__(self, config: SearchConfig) -> None:
        assert config.questions
        self._files = {"questions": config.questions}
        train = every = read_questions(config.questions)
        if config.eval_questions:
            self._files["eval_questions"] = config.eval_questions
            held = read_questions(config.eval_questions)
        else:
            held = [task for task in train if _held_out(task.id)]
            train = [task for task in train if not _held_out(task.id)]
        self._tasks = {"train": train, "val": held, "test": held, "all": every}
        self.types = tuple(sorted({task.type for task in train + held}))
        self.retriever: BM25Retriever | HTTPRetriever
        if config.retriever == "http":
            assert config.retriever_url
            self.retriever = HTTPRetriever(
                config.retriever_url,
                config.retriever_timeout_s,
                config.retriever_retries,
                config.retriever_protocol,
            )
        else:
            assert config.corpus
            self._files["corpus"] = config.corpus
            self.retriever = BM25Retriever.from_file(config.corpus)

    def tasks(self, split: str) -> Sequence[Task]:
        if not self._tasks[split]:
            raise DataError(
                f"{self._files['questions']}: too few rows to hold 10 % of them out; "
                "give env.eval_questions"
            )
        return self._tasks[split]

    def describe(self) -> dict[str, Any]:
        files = {
            key: {"path": path, "sha256": hash_file(path)}
            for key, path in self._files.items()
            if key != "corpus"
        }
        passages: dict[str, Any]
        if isinstance(self.retriever, BM25Retriever):
            files["corpus"] = {"path": self._files["corpus"], "sha256": self.retriever.sha256}
            passages = {"passages": len(self.retriever.passages)}
        else:
            passages = {"retriever_url": self.retriever.url}
        tasks = {split: len(self._tasks[split]) for split in SPLITS}
        return {"source": "files", "files": files, **passages, "tasks": tasks}


def _held_out(ident: str) -> bool:
    """A fixed tenth of all ids."""
    return int(hashlib.sha256(ident.encode()).hexdigest()[:8], 16) % 10 == 0


def read_questions(path: str | Path) -> list[Task]:
    """Tasks of a JSONL file of {id, question, answers} or FlashRAG's {question, golden_answers}.

    The type is the field ``source``, else the file's stem. Broken row: DataError "file:line: what".
    A row of which no gold can ever match (only punctuation or articles) is left out with a warning.
    """
    path = Path(path)
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    empty: list[int] = []
    for number, _, row in read_jsonl(path):
        where = f"{path}:{number}"
        question = row.get("question")
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"{where}: field 'question' must be text that is not empty")
        golds = row.get("answers", row.get("golden_answers"))
        if not isinstance(golds, list) or not golds or not all(isinstance(g, str) for g in golds):
            raise DataError(
                f"{where}: field 'answers' (or 'golden_answers') must be a list of texts"
            )
        ident = str(row.get("id") or f"{path.stem}-{number}")
        if ident in lines:
            raise DataError(f"{where}: id '{ident}' is also on line {lines[ident]}")
        lines[ident] = number
        if not any(map(normalise, golds)):
            empty.append(number)
            continue
        type_ = str(row.get("source") or path.stem)
        tasks.append(Task(ident, SearchSuite.name, type_, {"question": question, "answers": golds}))
    if not tasks:
        raise DataError(f"{path}: holds no questions that can be answered")
    if empty:
        some = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        what = f"{len(empty)} rows left out, their answers are empty once normalised"
        warnings.warn(f"{path}:{some}: {what}", stacklevel=2)
    return tasks
