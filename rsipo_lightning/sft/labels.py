"""Hindsight skills for finished episodes: scripted, from a file, or from a large model.

``labels.jsonl`` has a row for each episode. Its form is also that of ``sft.labels_file``:

    {"task": "t1", "index": 0, "episode": "4f...", "episode_summary": "...", "episode_skill": "..."}

``task`` and ``index`` name the episode of ``trajectories.jsonl``. ``episode`` is a hash of what was
said in it and may be left out; a label whose hash is another one was written for another episode
and is not used. A row with ``problem`` says why there is no label; as an input it is skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsipo_lightning.endpoint import Answer, Endpoint
from rsipo_lightning.errors import DataError
from rsipo_lightning.files import append_jsonl, parse_object
from rsipo_lightning.imitation import outcome
from rsipo_lightning.protocols import TaskSuite
from rsipo_lightning.rng import keyed_random
from rsipo_lightning.skills import read_analysis, write_analysis
from rsipo_lightning.types import Message, Trajectory

MISSING = "no label in the file"
OTHER = "label of another episode"
LEAK = "gives the answer away: "


@dataclass(frozen=True, slots=True)
class Label:
    """A skill and a summary for one episode, or why there is none."""

    summary: str = ""
    skill: str = ""
    problem: str = ""
    answer: str = ""  # what was said, if it cannot be used

    @property
    def reason(self) -> str:
        """The problem without its details, to be counted."""
        return self.problem.partition(": ")[0]


Ask = Callable[[Trajectory], Sequence[Message]]  # the analysis prompt of an episode
Key = tuple[str, int]
Known = Mapping[Key, list[tuple[str, str]]]  # {episode: (hash or "", text)}


def fingerprint(trajectory: Trajectory) -> str:
    """A hash of what was said and answered in an episode."""
    said = [part for t in trajectory.turns for part in (t.completion.text, t.observation)]
    return hashlib.sha256("\x1f".join(said).encode("utf-8", "replace")).hexdigest()[:16]


def read_label(suite: TaskSuite, trajectory: Trajectory, text: str) -> Label:
    """The label that a text holds, checked as a skill of the policy is."""
    summary, skill, problem = read_analysis(text)
    if not problem and (leak := suite.check_skill(trajectory, skill)):
        problem = f"{LEAK}{leak}"
    return Label(problem=problem, answer=text) if problem else Label(summary, skill)


def read_known(path: str) -> Known:
    """Labels of a file. Unreadable or a row that is none: DataError "file:line: what".

    A last line that a killed run has cut off is left out, and rows that say why there is no label.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    known: dict[Key, list[tuple[str, str]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_object(line, f"{path}:{number}")
        except DataError:
            if number == len(lines):
                break
            raise
        if "problem" not in row:
            key, label = _known(row, f"{path}:{number}")
            known.setdefault(key, []).append(label)
    return known


def _known(row: Mapping[str, Any], where: str) -> tuple[Key, tuple[str, str]]:
    if type(row.get("index")) is not int:
        raise DataError(f"{where}: field 'index' must be a whole number")
    episode = row.get("episode")
    texts = {name: row.get(name) for name in ("task", "episode_summary", "episode_skill")}
    for name, text in {**texts, "episode": "" if episode is None else episode}.items():
        if not isinstance(text, str):
            raise DataError(f"{where}: field '{name}' must be text")
    text = write_analysis(row["episode_summary"], row["episode_skill"])
    return (row["task"], row["index"]), (episode or "", text)


class Labeller:
    """Labels episodes and writes each label to a file as soon as it is there."""

    def __init__(
        self,
        suite: TaskSuite,
        ask: Ask,
        seed: int,
        known: Known | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        """Without an endpoint and without known labels the environment's scripted ones are used."""
        self.suite, self.ask, self.seed = suite, ask, seed
        self.known, self.endpoint = known, endpoint

    def label(
        self,
        trajectories: Sequence[Trajectory],
        file: Path,
        progress: Callable[[int], None] = lambda n: None,
    ) -> list[Label]:
        """One label per episode, same order. EngineError if the endpoint fails for good.

        ``file`` appears once all labels that need no asking are in it.
        """
        labels = {i: self._at_hand(trajectory) for i, trajectory in enumerate(trajectories)}
        asked = [i for i, label in labels.items() if label.problem in (MISSING, OTHER)]
        if self.endpoint:
            for i in asked:
                del labels[i]
        if labels:
            part = file.with_name(file.name + ".part")
            append_jsonl(part, [_row(trajectories[i], label) for i, label in labels.items()])
            part.rename(file)
            progress(len(labels))

        def keep(index: int, label: Label) -> None:
            labels[index] = label
            append_jsonl(file, [_row(trajectories[index], label)])
            progress(1)

        if self.endpoint:
            self._ask(self.endpoint, trajectories, asked, keep)
        return [labels[i] for i in range(len(trajectories))]

    def _at_hand(self, trajectory: Trajectory) -> Label:
        """What needs no asking."""
        task = trajectory.task.id
        if self.known is None and self.endpoint is None:
            rng = keyed_random(self.seed, "hindsight", task, trajectory.index)
            text = write_analysis(outcome(trajectory), self.suite.hindsight(trajectory, rng))
            return read_label(self.suite, trajectory, text)
        found = (self.known or {}).get((task, trajectory.index), [])
        fit = [text for episode, text in found if episode in ("", fingerprint(trajectory))]
        if fit:
            return read_label(self.suite, trajectory, fit[-1])
        return Label(problem=OTHER if found else MISSING)

    def _ask(
        self,
        endpoint: Endpoint,
        trajectories: Sequence[Trajectory],
        asked: Sequence[int],
        keep: Callable[[int, Label], None],
    ) -> None:
        def check(place: int, text: str) -> str:
            return read_label(self.suite, trajectories[asked[place]], text).problem

        def done(place: int, answer: Answer) -> None:
            if answer.problem:
                label = Label(problem=answer.problem, answer=answer.text)
            else:
                label = read_label(self.suite, trajectories[asked[place]], answer.text)
            keep(asked[place], label)

        endpoint.complete([self.ask(trajectories[i]) for i in asked], check, done)


def _row(trajectory: Trajectory, label: Label) -> dict[str, Any]:
    episode = {
        "task": trajectory.task.id,
        "index": trajectory.index,
        "episode": fingerprint(trajectory),
    }
    if label.problem:
        return {**episode, "problem": label.problem, "answer": label.answer}
    return {**episode, "episode_summary": label.summary, "episode_skill": label.skill}
